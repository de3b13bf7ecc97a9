"""`rutter collect`: run a workload through a cluster, with a router in front that explores and journals."""

import argparse

import msgspec

from learn.saturation import MID_COLLAPSE, saturation_rate
from learn.simulation import Topology
from pipelines.attempts import Attempts
from pipelines.live_run import (
    ClusterConfig,
    RunPolicy,
    add_cluster_arguments,
    cluster_from,
    engines_of,
    send_through_router,
)
from pipelines.progress import Progress
from pipelines.stages import Run, Stage, add_run_arguments, run_from
from pipelines.workload_spec import WorkloadSpec, default_name, requests_of
from serve_table.errors import ClusterError, ConfigError
from serve_table.policy import POLICIES
from serve_table.slo import targets_from_profile
from serve_table.step_time import hardware_profile

SATURATION_WINDOWS = 3
PROFILE_OVERHEAD_S = 0.003
"""Assumed for a leg until the journal tells: what a router and HTTP take on one machine."""


class CollectConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides what is collected."""

    workload: WorkloadSpec
    cluster: ClusterConfig
    policy: str
    explore: float
    seed: int


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


def run(args: argparse.Namespace) -> int:
    """Collect, or continue what a killed run left, or say that it is done."""
    config = config_from(args)
    run_ = run_from(args)
    with run_.lock():
        stage = run_.begin("collect", msgspec.to_builtins(config))
        if stage.record is not None:
            print(f"collect: already done, journal in {stage.folder / 'journal'}; another --run collects anew")
            return 0
        for change in stage.changes:
            print(f"collect: collecting anew, {change}")
        collect(run_, stage, config)
    return 0


def config_from(args: argparse.Namespace) -> CollectConfig:
    """The checked configuration, its rate found where none is given."""
    cluster = cluster_from(args)
    if args.policy not in POLICIES or args.policy == "table":
        known = ", ".join(name for name in POLICIES if name != "table")
        raise ConfigError(f"--policy {args.policy!r}: collect with one of {known}")
    if args.requests < 100:
        raise ConfigError(f"--requests {args.requests}: at least 100 are needed to learn anything")
    if not 0.0 <= args.explore <= 1.0:
        raise ConfigError(f"--explore {args.explore} must be from 0 to 1")
    profile = hardware_profile(cluster.hardware)
    name, why = (args.trace, "as asked") if args.trace else default_name()
    print(f"collect: workload {name}, {why}", flush=True)
    spec = WorkloadSpec(name, args.requests, args.seed, args.start, 1.0, args.tight_share, profile.max_model_len_tokens)
    topology = Topology(max(cluster.prefill_engines, 1), cluster.decode_engines, profile, PROFILE_OVERHEAD_S)
    spec = msgspec.structs.replace(spec, requests_per_s=args.rate or mid_collapse_rate(spec, topology))
    return CollectConfig(
        workload=spec,
        cluster=cluster,
        policy=args.policy,
        explore=args.explore,
        seed=args.seed,
    )


def mid_collapse_rate(spec: WorkloadSpec, topology: Topology) -> float:
    """The rate at which the simulator has round robin in mid-collapse, to three digits."""
    print("collect: finding the rate at which round robin is in mid-collapse (simulated)", flush=True)
    traces = [requests_of(msgspec.structs.replace(spec, seed=spec.seed + k)) for k in range(SATURATION_WINDOWS)]
    rate = saturation_rate(traces, topology, targets_from_profile(topology.profile))
    rate = float(f"{rate:.3g}")
    print(f"collect: {rate:g} requests/s, where round robin's goodput is about {MID_COLLAPSE:.2f}")
    return rate


def collect(run_: Run, stage: Stage, config: CollectConfig) -> None:
    """Send what has no journal row yet, check the outcome and finish the stage."""
    trace = requests_of(config.workload)
    for note in trace.notes:
        print(f"collect: {note}")
    journal = stage.folder / "journal"
    attempts = Attempts(stage.folder)
    left = attempts.left(journal, len(trace))
    if len(left) < len(trace):
        print(f"collect: continuing, {len(trace) - len(left)} of {len(trace)} requests are journaled already")
    if len(left):
        progress = Progress("collect", total=len(trace), done=len(trace) - len(left))
        # A seed of its own for each attempt: equal prompts would find a warm cache, equal draws explore nothing new.
        seed = config.seed + 1000 * len(attempts.paths())
        policy = RunPolicy(config.policy, explore=config.explore, seed=seed)
        with engines_of(config.cluster, stage.folder) as engines:
            prefix = attempts.begin(left)
            report = send_through_router(
                config.cluster, engines, policy, trace.rows(left), stage.folder, progress, prefix
            )
        for line in report.lines():
            print(f"collect: {line}")
        if not report.complete:
            raise KeyboardInterrupt
        missing = attempts.left(journal, len(trace))
        if len(missing) > 0.01 * len(trace):
            raise ClusterError(
                f"{len(missing)} of {len(trace)} requests have no journal row; the router's log is "
                f"{stage.folder / 'router.log'}. Run the same command to send them again"
            )
    run_.finish("collect", msgspec.to_builtins(config), {"journal": journal})
    print(f"collect: done, {len(trace)} requests; journal in {journal}")
