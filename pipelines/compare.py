"""`rutter compare`: policies side by side, on one live cluster or simulated, over workloads and arrival seeds."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from learn.contenders import CONTENDERS, JOINT, RUTTER
from pipelines import simulated_compare
from pipelines.compared_runs import ComparedRun, CompareSettings, compared_runs, make_run, row_of
from pipelines.comparison_report import DEFAULT_LEARNED, markdown_lines, scores_of, text_lines
from pipelines.grid_cell import SIMULATED
from pipelines.live_run import add_cluster_arguments, cluster_from, engines_of
from pipelines.live_start import LiveStart, add_start_arguments, simulated_rate, start_of
from pipelines.policy_run import pass_gates
from pipelines.results import RESULTS_FOLDER, ResultFile, ResultRow
from pipelines.saturate import REQUESTS, WORKLOADS, cluster_text, found_rate
from pipelines.stages import Run, add_run_arguments, run_from
from pipelines.tuned_baselines import tuned_params
from pipelines.workload_spec import HELD_OUT_SEED, WorkloadSpec, requests_of
from serve_table.errors import ConfigError
from serve_table.policy import LEARNED_POLICIES, POLICIES, policy
from serve_table.step_time import hardware_profile

DEFAULT_POLICIES = ("round_robin", "least_loaded", "dynamo_style", "marginal_cost", DEFAULT_LEARNED)
ALL = "all"
DEFAULT_SEEDS = 3
LIVE_ONLY = "live clusters only"
SIMULATED_ONLY = "simulated only"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    add_cluster_arguments(parser, SIMULATED)
    add_start_arguments(parser)
    add = parser.add_argument
    workloads = f"workloads or traces; default: {' '.join(WORKLOADS)}, simulated every workload and three public traces"
    add("--workloads", nargs="+", metavar="NAME", help=workloads)
    names = list(dict.fromkeys((*POLICIES, *CONTENDERS, RUTTER)))
    policies = f"{ALL}, or some of {', '.join(names)}; default: {' '.join(DEFAULT_POLICIES)}, simulated {ALL}"
    add("--policies", nargs="+", choices=[ALL, *names], metavar="NAME", help=policies)
    seeds = (
        f"arrival seeds; default: {DEFAULT_SEEDS}, simulated {simulated_compare.DEFAULT_SEEDS}, of a trace's windows "
    )
    add("--seeds", type=int, metavar="N", help=f"{seeds}{simulated_compare.DEFAULT_WINDOWS}")
    add("--seed", type=int, default=HELD_OUT_SEED, help="the first of them (%(default)s: far from training's)")
    requests = f"of each run; default: {REQUESTS}, simulated {simulated_compare.DEFAULT_REQUESTS}"
    add("--requests", type=int, metavar="N", help=requests)
    start = f"first request of an imported trace (%(default)s: after collect's); {LIVE_ONLY}"
    add("--start", type=int, default=1500, help=start)
    add("--tight-share", type=float, default=0.3, help="share of requests of the tight SLO class (%(default)s)")
    rate = "requests per second of engine time, as mixed=10.1; default: what saturate found in the run, else simulated"
    add("--rate", action="extend", nargs="+", default=[], metavar="NAME=R", help=rate)
    tuned = "baselines as this training run, or simulated comparison, tuned them; default: published defaults"
    add("--tuned", metavar="RUN|FILE", help=tuned)
    out = f"results; default: {RESULTS_FOLDER}/<cluster kind>.csv, simulated {simulated_compare.DEFAULT_PATH}"
    add("--out", type=Path, metavar="FILE", help=out)
    topologies = simulated_compare.DEFAULT_TOPOLOGIES
    known = f"clusters to simulate, {SIMULATED_ONLY}; default: {' '.join(topologies)}"
    add("--topologies", nargs="+", default=topologies, metavar="P+D", help=known)
    add("--trials", type=int, default=200, help=f"to tune each policy in each cell (%(default)s); {SIMULATED_ONLY}")
    objective = "what the learned policy is learned for (%(default)s); latency's rows are of rutter_latency"
    add("--objective", choices=list(JOINT), default="goodput", help=f"{objective}; {SIMULATED_ONLY}")
    add("--jobs", type=int, default=os.cpu_count() or 1, help=f"cells at a time (%(default)s); {SIMULATED_ONLY}")
    add("--markdown", action="store_true", help="end with Markdown tables and their conditions")


def run(args: argparse.Namespace) -> int:
    """Make the runs that are missing, write every result, and show the comparison."""
    check(args)
    if args.cluster == SIMULATED:
        return simulated_compare.run(args)
    args.workloads = args.workloads or list(WORKLOADS)
    args.requests, args.seeds = args.requests or REQUESTS, args.seeds or DEFAULT_SEEDS
    cluster = cluster_from(args)
    start = start_of(args, cluster)
    topology = f"{cluster.prefill_engines}P+{cluster.decode_engines}D"
    settings = CompareSettings(cluster, start, tuned_params(args.tuned, args.workloads, topology))
    policies = args.policies or DEFAULT_POLICIES
    names = tuple(POLICIES) if ALL in policies else tuple(dict.fromkeys(policies))
    for name in names:
        for workload in args.workloads:
            policy(name, settings.params(name, workload), start.loaded)
    results = ResultFile(args.out or RESULTS_FOLDER / f"{cluster.kind}.csv", cluster.kind)
    results.rows()
    given = given_rates(args.rate, args.workloads)
    run_ = run_from(args)
    with run_.lock():
        specs = [specs_of(args, name, given.get(name), settings, run_) for name in dict.fromkeys(args.workloads)]
        runs = compared_runs(specs, names, settings, run_)
        rows = complete(runs, settings, run_, results)
    say(f"results in {results.path}")
    print("\n".join(report_lines(rows, args.markdown, conditions(args, settings, names))))
    return 0


def check(args: argparse.Namespace) -> None:
    """ConfigError for a flag out of range."""
    if args.requests is not None and args.requests < 100:
        raise ConfigError(f"--requests {args.requests}: at least 100 are needed for a 99th percentile")
    if args.seeds is not None and args.seeds < 1:
        raise ConfigError(f"--seeds {args.seeds}: at least 1 is needed")
    if args.seed < 0 or args.start < 0:
        raise ConfigError("--seed and --start must be at least 0")


def say(line: str) -> None:
    print(f"compare: {line}", flush=True)


def given_rates(texts: Sequence[str], workloads: Sequence[str]) -> dict[str, float]:
    """NAME=R by name; ConfigError for another form, a rate that is none, or a workload that is not compared."""
    rates = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = 0.0
        if not name or not 0.0 < rate < float("inf"):
            raise ConfigError(f"--rate {text!r}: give it as WORKLOAD=REQUESTS_PER_S, such as mixed=10.1")
        if name not in workloads:
            raise ConfigError(f"--rate {text!r}: {name} is not among --workloads {' '.join(workloads)}")
        rates[name] = rate
    return rates


def specs_of(
    args: argparse.Namespace, name: str, given: float | None, settings: CompareSettings, run_: Run
) -> list[WorkloadSpec]:
    """A workload's requests for each arrival seed: other draws where it is synthetic, later windows where imported."""
    limit = hardware_profile(settings.cluster.hardware).max_model_len_tokens
    first = WorkloadSpec(name, args.requests, args.seed, args.start, 1.0, args.tight_share, limit)
    specs = []
    for k in range(args.seeds):
        start = 0 if first.is_synthetic else args.start + k * args.requests
        spec = WorkloadSpec(name, args.requests, args.seed + k, start, 1.0, args.tight_share, limit)
        n_found = len(requests_of(spec))
        if n_found < args.requests:
            raise ConfigError(f"trace {name}: window {k + 1} from request {start} on has {n_found} requests only")
        specs.append(spec)
    rate = rate_of(specs[0], given, settings.start, settings, run_)
    return [WorkloadSpec(name, s.n_requests, s.seed, s.start, rate, s.tight_share, limit) for s in specs]


def rate_of(spec: WorkloadSpec, given: float | None, start: LiveStart, settings: CompareSettings, run_: Run) -> float:
    """The given rate, else the one that saturate found on this cluster, else the simulator's."""
    if given is not None:
        return given
    found = found_rate(run_, spec, settings.cluster, start.slo)
    if found is not None:
        say(f"{spec.name}: {found:g} requests/s, as `rutter saturate` found")
        return found
    say(f"{spec.name}: no rate given, none found by `rutter saturate` in this run for {spec.n_requests} requests")
    return simulated_rate(run_, spec, settings.cluster, start, say)


def complete(runs: Sequence[ComparedRun], settings: CompareSettings, run_: Run, results: ResultFile) -> list[ResultRow]:
    """Make what is pending, one run after the other, and return the row of every run.

    Rows are written after every run; those that were made before are written again first, should the file lack them.
    """
    done = [row_of(one, settings, run_) for one in runs if one.made]
    if done:
        results.put(done)
    pending = [one for one in runs if one.pending]
    spoilt = sum(one.attempt > 1 for one in pending)
    say(
        f"{len(runs) - len(pending)} of {len(runs)} runs are done"
        + (f", {spoilt} are made once more" if spoilt else "")
    )
    if pending:
        with engines_of(settings.cluster, run_.folder, say) as engines:
            report = pass_gates(engines, settings.cluster, say)
            for i, one in enumerate(pending):
                left_s = sum(later.duration_s for later in pending[i:])
                say(f"run {i + 1} of {len(pending)}: {one.what}; {left_s / 60.0:.0f} min or more to go")
                row = make_run(one, settings, run_, engines, report, say)
                results.put([row])
                done.append(row)
                if not row.counted:
                    advice = "the next call makes it once more" if one.attempt == 1 else "it is not made again"
                    say(f"{one.what} does not count, its times were not kept; {advice}")
    by_key = {row.key: row for row in done}
    return list(by_key.values())


def conditions(args: argparse.Namespace, settings: CompareSettings, names: Sequence[str]) -> str:
    """What the figures hold for, in one line."""
    params = next(iter(settings.tuned.values()))
    tuned = [name for name in names if params.get(name)]
    defaults = [name for name in names if name not in tuned and name not in LEARNED_POLICIES]
    parts = [
        f"{cluster_text(settings.cluster)}",
        "times in engine time (wall time divided by the dilation)" if settings.cluster.dilation != 1.0 else "",
        f"arrival seeds {args.seed} to {args.seed + args.seeds - 1}, runs interleaved, prefix caches reset before each",
        "correctness gates passed",
        f"SLO targets of {settings.start.source}",
        f"tuned before: {', '.join(tuned)}" if tuned else "no baseline tuned",
        f"with their defaults: {', '.join(defaults)}" if defaults else "",
        "spread: standard deviation between seeds; intervals: 95 %, paired by seed",
        "times: means of the runs' percentiles over the requests that have them; failed requests missed their targets",
    ]
    return f"Conditions: {'; '.join(part for part in parts if part)}."


def report_lines(rows: Sequence[ResultRow], markdown: bool, conditions_: str) -> list[str]:
    """Every workload's table, and the conditions."""
    lines: list[str] = []
    for name in dict.fromkeys(row.workload for row in rows):
        found = scores_of([row for row in rows if row.workload == name])
        lines += markdown_lines(found) if markdown else text_lines(found)
    return [*lines, "", conditions_]
