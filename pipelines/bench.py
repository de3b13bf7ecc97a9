"""`rutter bench`: what look-up, decision, artifact and simulator cost on this machine, and the peer beside it."""

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from learn.saturation import saturation_rate
from learn.simulation import Topology
from pipelines import bench_dynamo
from pipelines.bench_artifact import ArtifactFound, artifact_to_measure, load_ms
from pipelines.bench_decision import (
    decision_cases,
    decision_us,
    lookup_us,
    remote_share,
    resident_book,
    with_residents,
)
from pipelines.bench_report import Conditions, DecisionDetail, Detail, Report, text_lines
from pipelines.bench_simulator import Setting, measured_speeds, mixed_traces
from pipelines.bench_timing import Spread, spread, this_machine
from pipelines.progress import Progress
from serve_table.artifact import write_atomically
from serve_table.errors import ArtifactError, RunError, RutterError
from serve_table.policy import Policy, policy
from serve_table.predictor import LengthPredictor
from serve_table.situation import features_of
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

DEFAULT_JSON = Path("build/bench.json")
SEED = 0
TOPOLOGY = Topology(prefill_engines=2, decode_engines=4, profile=A40_3B)
SMALL_FLEET = (3, 5)
LARGE_FLEET = (24, 40)
SIMULATED_POLICIES = ("round_robin", "least_loaded", "dynamo_style", "marginal_cost", "table")


@dataclass(frozen=True)
class Sizes:
    """How much is measured. cases: of one block of look-ups or decisions; rows: behind a built artifact."""

    cases: int
    blocks: int
    loads: int
    rows: int
    requests: int
    traces: int
    rounds: int
    peer_requests: int
    peer_rounds: int


FULL = Sizes(
    cases=1000,
    blocks=100,
    loads=200,
    rows=8000,
    requests=20_000,
    traces=3,
    rounds=5,
    peer_requests=4000,
    peer_rounds=5,
)
QUICK = Sizes(
    cases=200, blocks=20, loads=30, rows=2000, requests=4000, traces=2, rounds=2, peer_requests=1000, peer_rounds=2
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, metavar="PATH", help="result file (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: seconds, and less certain figures")
    parser.add_argument(
        "--artifact",
        type=Path,
        metavar="FILE",
        help="the artifact to measure (artifacts/default.safetensors if there, else one built for this)",
    )
    parser.add_argument(
        "--dynamo-python",
        type=Path,
        metavar="PATH",
        help=f"interpreter that has {bench_dynamo.PACKAGE}=={bench_dynamo.VERSION}, to compare its offline replay "
        f"(${bench_dynamo.ENVIRONMENT_VARIABLE}, else {bench_dynamo.DEFAULT_PYTHON} if there)",
    )


def run(args: argparse.Namespace) -> int:
    peer = bench_dynamo.peer_python(args.dynamo_python)
    report = measured(QUICK if args.quick else FULL, args.artifact, peer, args.quick)
    print("\n".join(text_lines(report)))
    try:
        write_atomically(args.json, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except ArtifactError as error:
        raise RunError(f"{error}; choose another --json") from error
    print(f"written to {args.json}")
    if report.detail.dynamo_replay_error is not None:
        print(f"rutter bench: the peer was not measured: {report.detail.dynamo_replay_error}", file=sys.stderr)
        return 1
    return 0


def measured(sizes: Sizes, asked: Path | None, peer: Path | None, quick: bool) -> Report:
    """Everything, one after the other. asked: an artifact; peer: the interpreter that has the peer.

    Raises ArtifactError where the artifact cannot be used; a peer that fails is told in the report.
    """
    machine = this_machine()  # before the bench itself loads it
    slo = targets_from_profile(TOPOLOGY.profile)
    steps = 4 + (sizes.peer_rounds * len(bench_dynamo.ROUTERS) if peer is not None else 0)
    with tempfile.TemporaryDirectory(prefix="rutter-bench-") as name, Progress("bench", steps, "steps") as progress:
        folder = Path(name)
        progress.note("the simulator is compiled first where it is not yet: about a minute, once")
        found = artifact_to_measure(asked, folder, TOPOLOGY, slo, sizes.rows, SEED)
        loads = spread(load_ms(found.path, sizes.loads))
        progress.advance(1)
        table = policy("table", artifact=found.artifact)
        setting = Setting(TOPOLOGY, slo, found.artifact.predictor())
        lookup = _lookup(table, setting.predictor, sizes)
        small, large = (_decision(table, setting.predictor, fleet, sizes) for fleet in (SMALL_FLEET, LARGE_FLEET))
        progress.advance(1, lookup_us=lookup.median, decision_64_engines_us=large.time_us.median)
        priced, priced_large = (
            _priced_decision(found, setting.predictor, fleet, n_residents, sizes)
            for fleet, n_residents in ((SMALL_FLEET, 512), (LARGE_FLEET, 4096))
        )
        progress.advance(1, price_64_engines_us=priced_large.time_us.median)
        traces = mixed_traces(sizes.requests, range(SEED, SEED + sizes.traces))
        rate = saturation_rate(traces, TOPOLOGY, slo)
        policies = [table if name == "table" else policy(name) for name in SIMULATED_POLICIES]
        speeds = measured_speeds(setting, policies, [trace.scaled_to(rate) for trace in traces], sizes.rounds)
        progress.advance(1, **{name: speed.wall.median for name, speed in speeds.items()})
        comparison, failure = None, None
        if peer is not None:
            trace = mixed_traces(sizes.peer_requests, (SEED,))[0].scaled_to(rate)
            try:
                comparison = bench_dynamo.compare(peer, trace, setting, sizes.peer_rounds, folder, progress)
            except RutterError as error:  # the other figures are not lost
                failure = str(error)
        return Report(
            lookup_us=lookup.median,
            decision_8_engines_us=small.time_us.median,
            decision_64_engines_us=large.time_us.median,
            price_8_engines_us=priced.time_us.median,
            price_64_engines_us=priced_large.time_us.median,
            artifact_bytes=found.path.stat().st_size,
            artifact_load_ms=loads.median,
            simulator_requests_per_s={name: speed.wall.median for name, speed in speeds.items()},
            dynamo_replay_ratio=None if comparison is None else comparison.pairs[0].ratio.median,
            machine=machine,
            conditions=_conditions(sizes, found, rate, quick),
            detail=Detail(lookup, small, large, priced, priced_large, loads, speeds, comparison, failure),
        )


def _lookup(table: Policy, predictor: LengthPredictor, sizes: Sizes) -> Spread:
    cases = decision_cases(sizes.cases, *SMALL_FLEET, predictor, SEED)
    features = [features_of(case.request, case.fleet) for case in cases]
    return spread(lookup_us(table.table, features, sizes.blocks))


def _decision(table: Policy, predictor: LengthPredictor, fleet: tuple[int, int], sizes: Sizes) -> DecisionDetail:
    prefill, decode = fleet
    cases = decision_cases(sizes.cases, prefill, decode, predictor, SEED)
    times_us = spread(decision_us(table, cases, sizes.blocks))
    return DecisionDetail(f"{prefill}P+{decode}D", times_us, remote_share(table, cases))


def _priced_decision(
    found: ArtifactFound, predictor: LengthPredictor, fleet: tuple[int, int], n_residents: int, sizes: Sizes
) -> DecisionDetail:
    price = policy("price", artifact=found.artifact)
    book = resident_book(price, *fleet, n_residents, SEED)
    cases = with_residents(decision_cases(sizes.cases, *fleet, predictor, SEED), book)
    times_us = spread(decision_us(price, cases, sizes.blocks, book.seen))
    name = f"{fleet[0]}P+{fleet[1]}D with {n_residents:,} residents"
    return DecisionDetail(name, times_us, remote_share(price, cases, book.seen))


def _conditions(sizes: Sizes, found: ArtifactFound, rate: float, quick: bool) -> Conditions:
    return Conditions(
        quick=quick,
        artifact=found.source,
        artifact_digest=found.artifact.digest(),
        table_cells=len(found.artifact.arrays["clusters"]),
        decisions_a_block=sizes.cases,
        workload="mixed",
        topology=str(TOPOLOGY),
        hardware=TOPOLOGY.profile.name,
        saturated_requests_per_s=rate,
        requests_a_run=sizes.requests,
        traces=sizes.traces,
        rounds=sizes.rounds,
        compiled=os.environ.get("NUMBA_DISABLE_JIT", "0") == "0",
    )
