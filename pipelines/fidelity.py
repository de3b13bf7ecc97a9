"""`rutter fidelity`: the same trace and policy on a live cluster and in the simulator, side by side."""

import argparse
import sys
from pathlib import Path

import msgspec

from learn.costs import fitted_topology
from learn.evaluate import bench_of
from learn.simulation import Topology, simulate
from learn.table import costs_of_artifact
from learn.trace import Trace
from pipelines.collect import mid_collapse_rate
from pipelines.live_run import ClusterConfig, RunPolicy, add_cluster_arguments, cluster_from, engines_of, profile_of
from pipelines.policy_run import Measured, PolicyRun
from pipelines.stages import Run, add_run_arguments, run_from
from pipelines.workload_spec import HELD_OUT_SEED, WorkloadSpec, default_name, requests_of
from serve_table.artifact import Artifact, load, write_atomically
from serve_table.errors import ClusterError, ConfigError
from serve_table.policy import policy

POLICIES = ("round_robin", "table")
GOODPUT_LIMIT = 0.02
TIME_LIMIT = 0.10
MEASURES = tuple((name, q) for name in ("ttft", "tpot") for q in (50, 90))
DEFAULT_ARTIFACT = Path("artifacts/rutter.safetensors")
REPORT = Path("build/fidelity.json")


class FidelityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workload: WorkloadSpec
    cluster: ClusterConfig
    policy: str
    artifact: str
    seed: int


class Agreement(msgspec.Struct, frozen=True):
    """One policy, measured and simulated. Times in seconds of engine time, by name as ttft_p50_s.

    engines_kept_pace: None for engines that run at a pace of their own.
    """

    policy: str
    requests: int
    live_goodput: float
    simulated_goodput: float
    live: dict[str, float]
    simulated: dict[str, float]
    within_limits: bool
    load_kept_schedule: bool
    engines_kept_pace: bool | None


class Report(msgspec.Struct, frozen=True):
    """What `build/fidelity.json` holds, with its conditions."""

    cluster_kind: str
    topology: str
    dilation: float
    workload: str
    requests_per_s: float
    artifact: str
    goodput_limit: float
    time_limit: float
    policies: list[Agreement]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    add_cluster_arguments(parser)
    add = parser.add_argument
    add("--artifact", type=Path, default=DEFAULT_ARTIFACT, help="table and fitted costs (%(default)s)")
    add("--trace", help="trace or workload; default: azure-conv where the traces are at hand, else mixed")
    add("--requests", type=int, default=1500, help="how many requests of each policy (%(default)s)")
    add("--start", type=int, help="first request of the trace; default: after what collect takes by default")
    add("--rate", type=float, help="requests per second of engine time; default: where round robin is in mid-collapse")
    add("--tight-share", type=float, default=0.3, help="share of requests of the tight SLO class (%(default)s)")
    add("--policies", nargs="+", default=list(POLICIES), choices=POLICIES, help="policies to run (%(default)s)")
    add("--seed", type=int, default=HELD_OUT_SEED, help="seed of workload and SLO classes (%(default)s)")
    add("--json", action="store_true", help=f"print the report as JSON; {REPORT} has it in any case")


def run(args: argparse.Namespace) -> int:
    """Run and compare every policy; 1 where the simulator is out of its limits."""
    artifact = load(args.artifact)
    cluster = cluster_from(args)
    if args.requests < 100:
        raise ConfigError(f"--requests {args.requests}: at least 100 are needed for a 90th percentile")
    if args.rate is not None and not 0.0 < args.rate < float("inf"):
        raise ConfigError(f"--rate {args.rate} must be above 0")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} must be at least 0")
    profile = profile_of(cluster)
    costs = costs_of_artifact(artifact)
    topology = fitted_topology(cluster.prefill_engines, cluster.decode_engines, profile, costs)
    spec = workload_from(args, profile.max_model_len_tokens)
    spec = msgspec.structs.replace(spec, requests_per_s=args.rate or mid_collapse_rate(spec, topology, say))
    trace = requests_of(spec)
    run_ = run_from(args)
    agreements = []
    with run_.lock():
        for name in args.policies:
            config = FidelityConfig(spec, cluster, name, artifact.digest(), args.seed)
            measured = live(run_, config, args.artifact, trace)
            agreements.append(agreement(name, trace, topology, artifact, measured, args.seed))
    report = Report(
        cluster_kind=cluster.kind,
        topology=str(topology),
        dilation=cluster.dilation,
        workload=spec.name,
        requests_per_s=spec.requests_per_s,
        artifact=artifact.digest(),
        goodput_limit=GOODPUT_LIMIT,
        time_limit=TIME_LIMIT,
        policies=agreements,
    )
    content = msgspec.json.format(msgspec.json.encode(report), indent=2)
    write_atomically(REPORT, content + b"\n")
    print(msgspec.json.encode(report).decode() if args.json else "\n".join(report_lines(report)))
    return 0 if all(found.within_limits for found in agreements) else 1


def say(line: str) -> None:
    """Standard output is for the report alone."""
    print(f"fidelity: {line}", file=sys.stderr, flush=True)


def workload_from(args: argparse.Namespace, max_model_len_tokens: int) -> WorkloadSpec:
    """The requests to run, from the flags; the rate is left to be found."""
    name = args.trace if args.trace else default_name()[0]
    spec = WorkloadSpec(name, args.requests, args.seed, 0, 1.0, args.tight_share, max_model_len_tokens)
    start = args.start if args.start is not None else (0 if spec.is_synthetic else args.requests)
    return msgspec.structs.replace(spec, start=start)


def live(run_: Run, config: FidelityConfig, artifact: Path, trace: Trace) -> Measured:
    """The policy's run on the cluster, from its journal where it is done already."""
    name = f"fidelity-{config.policy}"
    stage = run_.begin(name, msgspec.to_builtins(config))
    chosen = RunPolicy(config.policy, artifact=artifact, seed=config.seed)
    policy_run = PolicyRun(config.cluster, chosen, trace, stage.folder, f"fidelity {config.policy}")
    if stage.record is not None:
        return policy_run.measured()
    with engines_of(config.cluster, stage.folder, say) as engines:
        measured = policy_run.make(engines, say)
    run_.finish(name, msgspec.to_builtins(config), policy_run.outputs)
    return measured


def agreement(
    name: str, trace: Trace, topology: Topology, artifact: Artifact, measured: Measured, seed: int
) -> Agreement:
    """Simulate the same and compare."""
    chosen = policy(name, artifact=artifact if name == "table" else None)
    predicted = bench_of([trace], topology, artifact.slo_targets(), artifact.predictor()).predicted[0]
    simulated = simulate(trace, topology, chosen, artifact.slo_targets(), predicted, seed)
    live_times = {f"{kind}_p{q}_s": measured_percentile(measured, f"{kind}_s", q) for kind, q in MEASURES}
    times = {f"{kind}_p{q}_s": simulated.percentile(f"{kind}_s", q) for kind, q in MEASURES}
    goodput = measured.goodput
    within = abs(goodput - simulated.goodput) <= GOODPUT_LIMIT and all(
        abs(times[key] / live_times[key] - 1.0) <= TIME_LIMIT for key in times
    )
    return Agreement(
        name,
        len(trace),
        goodput,
        simulated.goodput,
        live_times,
        times,
        within,
        measured.conditions.load_kept_schedule,
        measured.conditions.engines_kept_pace,
    )


def measured_percentile(measured: Measured, column: str, q: float) -> float:
    """ClusterError where no request has that time: there is nothing to hold the simulator against."""
    found = measured.percentile(column, q)
    if found is None:
        raise ClusterError(f"no answered request has a {column}: nothing to compare the simulator with")
    return found


def report_lines(report: Report) -> list[str]:
    """The comparison for people."""
    lines = [
        f"fidelity: {report.cluster_kind} {report.topology}, dilation {report.dilation:g}, {report.workload} at "
        f"{report.requests_per_s:g} requests/s, artifact {report.artifact}; limits {report.goodput_limit} of goodput, "
        f"{report.time_limit:.0%} of times",
        f"{'policy':<14}{'measure':<10}{'live':>10}{'simulated':>11}{'difference':>12}",
    ]
    for found in report.policies:
        lines.append(
            f"{found.policy:<14}{'goodput':<10}{found.live_goodput:>10.3f}{found.simulated_goodput:>11.3f}"
            f"{found.simulated_goodput - found.live_goodput:>+12.3f}"
        )
        for key, value in found.live.items():
            simulated = found.simulated[key]
            lines.append(
                f"{'':<14}{key[:-2].replace('_', ' '):<10}{value * 1e3:>7.1f} ms{simulated * 1e3:>8.1f} ms"
                f"{simulated / value - 1.0:>+12.1%}"
            )
        verdict = "within limits" if found.within_limits else "OUT OF LIMITS"
        lines.append(f"{'':<14}{verdict}")
        if not found.load_kept_schedule:
            lines.append(f"{'':<14}the load generator did not keep its schedule: do not trust the live side")
        if found.engines_kept_pace is False:
            lines.append(f"{'':<14}the engines did not keep their step times: take a larger --dilation")
    return lines
