"""`rutter collect`: run a workload through a cluster, with a router in front that explores and journals."""

import argparse
from pathlib import Path

import msgspec

from learn.saturation import MID_COLLAPSE, RATE_ROUNDS, settled_rate
from learn.simulation import Topology
from learn.trace import Trace
from pipelines.attempts import Attempts
from pipelines.calibration_start import digest_of_calibration, start_from
from pipelines.live_run import (
    ClusterConfig,
    RunPolicy,
    Say,
    add_cluster_arguments,
    cluster_from,
    engines_of,
    send_through_router,
)
from pipelines.progress import Progress
from pipelines.stages import Run, Stage, add_run_arguments, run_from
from pipelines.workload_spec import WorkloadSpec, default_name, requests_of
from serve_table.artifact import write_atomically
from serve_table.calibration import load as load_calibration
from serve_table.errors import ClusterError, ConfigError
from serve_table.policy import OF_AN_ARTIFACT, POLICIES
from serve_table.slo import SloTargets, targets_from_profile
from serve_table.step_time import hardware_profile

SATURATION_WINDOWS = 3
PROFILE_OVERHEAD_S = 0.003
"""Assumed for a leg until the journal tells: what a router and HTTP take on one machine."""


class CollectConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides what is collected. rate: None asks for the rate where round robin is in mid-collapse.

    calibration: the file's digest.
    """

    workload: WorkloadSpec
    rate: float | None
    cluster: ClusterConfig
    policy: str
    explore: float
    seed: int
    calibration: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    add_cluster_arguments(parser)
    add = parser.add_argument
    add("--trace", help="trace or workload; default: azure-conv where the traces are at hand, else mixed")
    add("--requests", type=int, default=1500, help="how many requests to send (%(default)s)")
    add("--start", type=int, default=0, help="first request of the trace (%(default)s)")
    add("--rate", type=float, help="requests per second of engine time; default: where round robin is in mid-collapse")
    add("--tight-share", type=float, default=0.3, help="share of requests of the tight SLO class (%(default)s)")
    add("--policy", default="least_loaded", help="policy whose choices are explored around (%(default)s)")
    add("--explore", type=float, default=0.3, help="share of requests that choose at random (%(default)s)")
    add("--seed", type=int, default=0, help="seed of workload, SLO classes and exploration (%(default)s)")
    add("--calibration", type=Path, metavar="FILE", help="SLO targets, and times for the rate, of `rutter calibrate`")


def run(args: argparse.Namespace) -> int:
    """Collect, or continue what a killed run left, or say that it is done."""
    config = config_from(args)
    run_ = run_from(args)
    with run_.lock():
        stage = run_.begin("collect", msgspec.to_builtins(config))
        if stage.record is not None:
            say(f"already done, journal in {stage.folder / 'journal'}; another --run collects anew")
            return 0
        for change in stage.changes:
            say(f"collecting anew, {change}")
        collect(run_, stage, config, args.calibration)
    return 0


def config_from(args: argparse.Namespace) -> CollectConfig:
    """The checked configuration; the workload's rate is a placeholder until `workload_of` finds it."""
    cluster = cluster_from(args)
    if args.policy not in POLICIES or args.policy in OF_AN_ARTIFACT:
        known = ", ".join(name for name in POLICIES if name not in OF_AN_ARTIFACT)
        raise ConfigError(f"--policy {args.policy!r}: collect with one of {known}")
    if args.requests < 100:
        raise ConfigError(f"--requests {args.requests}: at least 100 are needed to learn anything")
    if args.rate is not None and not 0.0 < args.rate < float("inf"):
        raise ConfigError(f"--rate {args.rate} must be above 0")
    if not 0.0 <= args.explore <= 1.0:
        raise ConfigError(f"--explore {args.explore} must be from 0 to 1")
    if args.seed < 0 or args.start < 0:
        raise ConfigError("--seed and --start must be at least 0")
    profile = hardware_profile(cluster.hardware)
    name, why = (args.trace, "as asked") if args.trace else default_name()
    say(f"workload {name}, {why}")
    spec = WorkloadSpec(name, args.requests, args.seed, args.start, 1.0, args.tight_share, profile.max_model_len_tokens)
    return CollectConfig(
        workload=spec,
        rate=args.rate,
        cluster=cluster,
        policy=args.policy,
        explore=args.explore,
        seed=args.seed,
        calibration=None if args.calibration is None else digest_of_calibration(args.calibration),
    )


def say(line: str) -> None:
    print(f"collect: {line}", flush=True)


def workload_of(stage: Stage, config: CollectConfig, calibration: Path | None = None) -> tuple[WorkloadSpec, Path]:
    """The workload with its rate, found once and kept in the stage's folder; and its file."""
    path = stage.folder / "workload.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=WorkloadSpec), path
    cluster = config.cluster
    start = start_from(cluster.hardware, None if calibration is None else load_calibration(calibration))
    overhead_s = PROFILE_OVERHEAD_S if calibration is None else start.overhead_s
    topology = Topology(max(cluster.prefill_engines, 1), cluster.decode_engines, start.profile, overhead_s)
    rate = config.rate or mid_collapse_rate(config.workload, topology, say, start.slo)
    spec = msgspec.structs.replace(config.workload, requests_per_s=rate)
    write_atomically(path, msgspec.json.encode(spec))
    return spec, path


def mid_collapse_rate(spec: WorkloadSpec, topology: Topology, say: Say, slo: SloTargets | None = None) -> float:
    """The rate at which the simulator has round robin in mid-collapse, to three digits. slo: None for the profile's."""
    say("finding the rate at which round robin is in mid-collapse (simulated)")
    slo = targets_from_profile(topology.profile) if slo is None else slo

    def traces_at(rate: float) -> list[Trace]:
        seeds = range(spec.seed, spec.seed + SATURATION_WINDOWS)
        return [requests_of(msgspec.structs.replace(spec, seed=seed, requests_per_s=rate)) for seed in seeds]

    rate = settled_rate(traces_at, topology, slo, RATE_ROUNDS if spec.is_synthetic else 1)
    say(f"{rate:g} requests/s, where round robin's goodput is about {MID_COLLAPSE:.2f}")
    return rate


def collect(run_: Run, stage: Stage, config: CollectConfig, calibration: Path | None = None) -> None:
    """Send what has no journal row yet, check the outcome and finish the stage."""
    spec, spec_path = workload_of(stage, config, calibration)
    trace = requests_of(spec)
    for note in trace.notes:
        say(note)
    journal = stage.folder / "journal"
    attempts = Attempts(stage.folder)
    left = attempts.left(journal, len(trace))
    if len(left) < len(trace):
        say(f"continuing, {len(trace) - len(left)} of {len(trace)} requests are journaled already")
    if len(left):
        progress = Progress("collect", total=len(trace), done=len(trace) - len(left))
        # A seed of its own for each attempt: equal prompts would find a warm cache, equal draws explore nothing new.
        seed = config.seed + 1000 * len(attempts.paths())
        policy = RunPolicy(config.policy, calibration=calibration, explore=config.explore, seed=seed)
        with engines_of(config.cluster, stage.folder, say) as engines:
            prefix = attempts.begin(left)
            report = send_through_router(
                config.cluster, engines, policy, trace.rows(left), stage.folder, progress, prefix
            )
        for line in report.lines():
            say(line)
        if not report.complete:
            raise KeyboardInterrupt
        if not engines.kept_pace:
            say("the engines did not keep their step times: the journal shows a slower cluster than the asked one")
        missing = attempts.left(journal, len(trace))
        if len(missing) > 0.01 * len(trace):
            raise ClusterError(
                f"{len(missing)} of {len(trace)} requests have no journal row; the router's log is "
                f"{stage.folder / 'router.log'}. Run the same command to send them again"
            )
    run_.finish("collect", msgspec.to_builtins(config), {"journal": journal, "workload": spec_path})
    say(f"done, {len(trace)} requests; journal in {journal}")
