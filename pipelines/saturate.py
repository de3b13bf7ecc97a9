"""`rutter saturate`: the rate at which round robin is in mid-collapse on a live cluster."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import msgspec

from learn.saturation import MID_COLLAPSE
from pipelines.live_run import (
    ClusterConfig,
    Engines,
    RunPolicy,
    add_cluster_arguments,
    cluster_from,
    engines_of,
)
from pipelines.live_start import (
    LiveStart,
    add_start_arguments,
    lasting,
    simulated_rate,
    stage_word,
    start_of,
    typical,
)
from pipelines.policy_run import PolicyRun, pass_gates
from pipelines.saturation_curve import (
    CurveFile,
    Probe,
    bracket,
    curve_lines,
    goodput_interval,
    next_rate,
    rate_at,
    why_not,
)
from pipelines.stages import Run, Stage, add_run_arguments, run_from
from pipelines.workload_spec import HELD_OUT_SEED, WorkloadSpec, requests_of
from serve_table.artifact import write_atomically
from serve_table.errors import ClusterError, ConfigError, RunError
from serve_table.slo import SloTargets
from serve_table.step_time import hardware_profile

WORKLOADS = ("mixed", "multi-turn")
REQUESTS = 400
"""As many as a compared run has."""
SEED = 2 * HELD_OUT_SEED
"""Neither training's nor a comparison's."""
SPOILT_PROBES = 2
"""So many in a row that do not count end the search."""


class SaturateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a saturation rate is of. The number of probes is not part of it: more of them continue the same curve."""

    workload: str
    n_requests: int
    tight_share: float
    cluster: ClusterConfig
    slo: SloTargets
    goodput: float


class Saturation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rate found, between two that were probed."""

    workload: str
    requests_per_s: float
    low_requests_per_s: float
    high_requests_per_s: float
    goodput: float
    probes: int
    settled: bool


@dataclass(frozen=True)
class Search:
    """One workload's search in its stage's folder."""

    config: SaturateConfig
    cluster: ClusterConfig
    start: LiveStart
    spec: WorkloadSpec
    stage: Stage
    max_probes: int

    @property
    def curve(self) -> CurveFile:
        return CurveFile(self.stage.folder / "curve.jsonl")

    def done(self) -> bool:
        """Whether the bracket is narrow enough, or the probes are used up."""
        probes = self.curve.probes()
        n_counted = sum(probe.counted for probe in probes)
        return bracket(probes, self.config.goodput).settled(self.config.goodput) or n_counted >= self.max_probes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    add_cluster_arguments(parser)
    add_start_arguments(parser)
    add = parser.add_argument
    add(
        "--workloads", nargs="+", default=list(WORKLOADS), metavar="NAME", help="workloads or traces (mixed multi-turn)"
    )
    add("--requests", type=int, default=REQUESTS, help="of a probe; as many as a compared run is to have (%(default)s)")
    add("--probes", type=int, default=8, help="at most so many that count, for each workload (%(default)s)")
    add("--goodput", type=float, default=MID_COLLAPSE, help="round robin's at the rate looked for (%(default)s)")
    add("--rate", type=float, help="first rate to probe; default: where the simulator has that goodput")
    add("--start", type=int, default=1500, help="first request of an imported trace (%(default)s: after collect's)")
    add("--tight-share", type=float, default=0.3, help="share of requests of the tight SLO class (%(default)s)")
    add("--seed", type=int, default=SEED, help="first of the seeds that the probes' trace is chosen from (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Search, or continue a killed search, or say that it is done."""
    check(args)
    cluster = cluster_from(args)
    start = start_of(args, cluster)
    run_ = run_from(args)
    with run_.lock():
        searches = [search_of(args, name, cluster, start, run_) for name in dict.fromkeys(args.workloads)]
        left = [search for search in searches if not search.done()]
        if left:
            firsts = [first_probe(search, args.rate, run_) for search in left]
            with engines_of(cluster, run_.folder, say) as engines:
                pass_gates(engines, cluster, say)
                for search, first in zip(left, firsts, strict=True):
                    probe_all(search, first, engines)
        for search in searches:
            if search not in left:
                say(f"{search.config.workload}: already done; more --probes continue it")
        # All are finished before one without a rate is complained of.
        missing = [search for search in searches if not finish(search, run_)]
    if missing:
        names = ", ".join(search.config.workload for search in missing)
        raise RunError(f"no rate found for {names} within the probes: run the same command with more --probes")
    return 0


def check(args: argparse.Namespace) -> None:
    """ConfigError for a flag out of range."""
    if args.requests < 20:
        raise ConfigError(f"--requests {args.requests}: at least 20 are needed for a goodput")
    if args.probes < 2:
        raise ConfigError(f"--probes {args.probes}: at least 2 are needed for a bracket")
    if not 0.0 < args.goodput < 1.0:
        raise ConfigError(f"--goodput {args.goodput} must be between 0 and 1")
    if args.rate is not None and not 0.0 < args.rate < float("inf"):
        raise ConfigError(f"--rate {args.rate} must be above 0")
    if args.seed < 0 or args.start < 0:
        raise ConfigError("--seed and --start must be at least 0")


def say(line: str) -> None:
    print(f"saturate: {line}", flush=True)


def search_of(args: argparse.Namespace, name: str, cluster: ClusterConfig, start: LiveStart, run_: Run) -> Search:
    """A workload's search as the run folder has it; the first rate and trace are found when they are needed."""
    limit = hardware_profile(cluster.hardware).max_model_len_tokens
    spec = WorkloadSpec(name, args.requests, args.seed, args.start, 1.0, args.tight_share, limit)
    if spec.is_synthetic:
        spec = msgspec.structs.replace(spec, start=0)
    requests_of(spec)  # a name that is none is told before engines start
    config = saturate_config(spec, cluster, start.slo, args.goodput)
    stage = run_.begin(stage_name(name), msgspec.to_builtins(config))
    return Search(config, cluster, start, spec, stage, args.probes)


def saturate_config(spec: WorkloadSpec, cluster: ClusterConfig, slo: SloTargets, goodput: float) -> SaturateConfig:
    """Under which a rate for this workload on this cluster is kept."""
    return SaturateConfig(spec.name, spec.n_requests, spec.tight_share, lasting(cluster), slo, goodput)


def stage_name(workload: str) -> str:
    return f"saturate-{stage_word(workload)}"


def first_probe(search: Search, rate: float | None, run_: Run) -> WorkloadSpec:
    """The trace of all probes, at the first one's rate. rate: None for the simulator's."""
    spec = search.spec
    first = rate or simulated_rate(run_, spec, search.cluster, search.start, say)
    spec = msgspec.structs.replace(spec, requests_per_s=first)
    probes = search.curve.probes()
    if not probes:
        return typical(spec, search.cluster, search.start)
    # All probes of a curve are of one trace, or their order by rate means nothing.
    say(f"{spec.name}: continuing after {len(probes)} probes")
    return msgspec.structs.replace(spec, seed=probes[0].seed, start=probes[0].start)


def probe_all(search: Search, spec: WorkloadSpec, engines: Engines) -> None:
    """Probe until the search is done; ClusterError where probe after probe does not count."""
    config, first = search.config, spec.requests_per_s
    spoilt = 0
    while not search.done():
        rate = float(f"{next_rate(search.curve.probes(), config.goodput, first):.4g}")
        probe = probe_at(search, msgspec.structs.replace(spec, requests_per_s=rate), engines)
        search.curve.append(probe)
        say(f"{spec.name}: goodput {probe.goodput:.3f} at {rate:g} requests/s" + ("" if probe.counted else " (spoilt)"))
        spoilt = 0 if probe.counted else spoilt + 1
        if not probe.counted:
            say(f"{spec.name}: this probe does not count, for its {why_not(probe)}")
        if spoilt == SPOILT_PROBES:
            raise ClusterError(
                f"{spoilt} probes of {spec.name} at {rate:g} requests/s in a row do not count ({why_not(probe)}): free "
                "the machine or take a larger --dilation, then run the same command"
            )


def probe_at(search: Search, spec: WorkloadSpec, engines: Engines) -> Probe:
    """One run of round robin at the specification's rate."""
    number = len(search.curve.probes()) + 1
    start = search.start
    policy = RunPolicy("round_robin", artifact=start.artifact, calibration=start.calibration, seed=spec.seed)
    what = f"{spec.name} probe {number} at {spec.requests_per_s:g}/s"
    folder = search.stage.folder / f"probe-{number}"
    measured = PolicyRun(search.cluster, policy, requests_of(spec), folder, what).make(engines, say)
    low, high = goodput_interval(int(measured.slo_met.sum()), len(measured.slo_met))
    return Probe(
        workload=spec.name,
        requests_per_s=spec.requests_per_s,
        goodput=measured.goodput,
        goodput_low=low,
        goodput_high=high,
        kept_pace=measured.conditions.engines_kept_pace,
        kept_schedule=measured.conditions.load_kept_schedule,
        requests=len(measured.slo_met),
        failed=measured.n_failed,
        seed=spec.seed,
        start=spec.start,
        cluster_kind=search.cluster.kind,
        prefill_engines=search.cluster.prefill_engines,
        decode_engines=search.cluster.decode_engines,
        dilation=search.cluster.dilation,
    )


def finish(search: Search, run_: Run) -> bool:
    """Show the curve and keep the rate; False where none was bracketed."""
    probes, config = search.curve.probes(), search.config
    lines = curve_lines(probes, config.goodput)
    print("\n".join(["", f"{config.workload} on {cluster_text(config.cluster)}", *lines]))
    found = saturation(probes, config)
    if found is None:
        say(f"{config.workload}: round robin's goodput did not pass {config.goodput:g} in {len(probes)} probes")
        return False
    text, rate = search.stage.folder / "curve.txt", search.stage.folder / "saturation.json"
    write_atomically(text, ("\n".join(lines) + "\n").encode())
    write_atomically(rate, msgspec.json.encode(found))
    outputs = {"curve": search.curve.path, "text": text, "saturation": rate}
    run_.finish(stage_name(config.workload), msgspec.to_builtins(config), outputs)
    say(
        f"{config.workload}: {found.requests_per_s:g} requests/s, between {found.low_requests_per_s:g} and "
        f"{found.high_requests_per_s:g}, where round robin's goodput is {found.goodput:g}; curve in {search.curve.path}"
    )
    return True


def saturation(probes: list[Probe], config: SaturateConfig) -> Saturation | None:
    """What the curve says; None where it does not bracket the goodput."""
    found, rate = bracket(probes, config.goodput), rate_at(probes, config.goodput)
    if rate is None or found.low is None or found.high is None:
        return None
    n_counted = sum(probe.counted for probe in probes)
    rounded = float(f"{rate:.3g}")
    return Saturation(
        config.workload, rounded, found.low, found.high, config.goodput, n_counted, found.settled(config.goodput)
    )


def found_rate(
    run_: Run, spec: WorkloadSpec, cluster: ClusterConfig, slo: SloTargets, goodput: float = MID_COLLAPSE
) -> float | None:
    """The rate that a finished search of this run folder found for the workload, None where there is none."""
    config = msgspec.to_builtins(saturate_config(spec, cluster, slo, goodput))
    record = run_.done(stage_name(spec.name), config)
    if record is None:
        return None
    content = Path(run_.output_path(record, "saturation")).read_bytes()
    return msgspec.json.decode(content, type=Saturation).requests_per_s


def cluster_text(cluster: ClusterConfig) -> str:
    """The cluster in a few words."""
    text = f"{cluster.kind} {cluster.prefill_engines}P+{cluster.decode_engines}D"
    return text if cluster.kind == "existing" else f"{text}, {cluster.hardware}, dilation {cluster.dilation:g}"
