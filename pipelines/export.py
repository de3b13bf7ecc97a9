"""`rutter export`: judge the candidate on held-out traces against every baseline, and write the artifact."""

import argparse
import math
from dataclasses import replace
from pathlib import Path

import msgspec

from learn.costs import fitted_topology
from learn.evaluate import Comparison, bench_of, compare
from learn.frame import clean_journal
from learn.policy_space import baseline_policy
from learn.resample import resampled
from learn.table import costs_of_artifact, strict_score
from learn.trace import Trace, joined
from pipelines.stages import add_run_arguments, run_from
from pipelines.train import Baselines, TrainConfig, journal_runs, training_end
from pipelines.workload_spec import HELD_OUT_SEED, held_out
from serve_table.artifact import Artifact, load, save
from serve_table.artifact_metadata import Score
from serve_table.errors import ConfigError
from serve_table.policy import policy
from serve_table.step_time import hardware_profile

HELD_OUT_TRACES = 8
LEARNED = ("table", "price")
"""The policies of an artifact; its metadata say which of them training found the better."""
DEFAULT_PATH = Path("artifacts/rutter.safetensors")


class ExportConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides what is exported."""

    candidate: str
    path: str
    held_out_traces: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    add = parser.add_argument
    add("--to", type=Path, default=DEFAULT_PATH, metavar="FILE", help="where the artifact goes (%(default)s)")
    add("--held-out", type=int, default=HELD_OUT_TRACES, metavar="N", help="held-out traces to judge on (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Export, or say that it is done; the previous artifact stays until the new one is whole."""
    if args.held_out < 2:
        raise ConfigError(f"--held-out {args.held_out}: at least 2 traces are needed for an interval")
    run_ = run_from(args)
    with run_.lock():
        record = run_.latest("train")
        candidate_path = run_.output_path(record, "candidate")
        config = ExportConfig(record.outputs["candidate"].digest, str(args.to), args.held_out)
        stage = run_.begin("export", msgspec.to_builtins(config))
        if stage.record is not None:
            print("export: already done, nothing has changed since")
        else:
            trained = msgspec.json.decode(record.config, type=TrainConfig)
            baselines = msgspec.json.decode(run_.output_path(record, "baselines").read_bytes(), type=Baselines)
            export(load(candidate_path), trained, baselines, args.to, args.held_out)
            run_.finish("export", msgspec.to_builtins(config), {"artifact": args.to})
        for line in summary(load(args.to), args.to):
            print(line)
    return 0


def export(candidate: Artifact, trained: TrainConfig, baselines: Baselines, path: Path, n_traces: int) -> None:
    """Evaluate the candidate and write it with its scores."""
    traces, where = held_out_traces(trained, n_traces)
    print(f"export: judging on {len(traces)} held-out traces ({where}), simulated with the fitted costs", flush=True)
    comparison = evaluate(candidate, trained, baselines, traces)
    metadata = msgspec.structs.replace(
        candidate.metadata, held_out=[strict_score(score) for score in comparison.scores]
    )
    save(replace(candidate, metadata=metadata), path)
    sign = "better than" if comparison.low > 0 else "worse than" if comparison.high < 0 else "level with"
    print(
        f"export: the {candidate.metadata.policy} is {sign} the best baseline, {comparison.best_baseline}: goodput "
        f"{comparison.difference:+.3f} [{comparison.low:+.3f}, {comparison.high:+.3f}], paired over the traces"
    )


def held_out_traces(trained: TrainConfig, n_traces: int) -> tuple[list[Trace], str]:
    """Traces that training did not see, and where they are from.

    From a known workload: other windows or seeds of it. From journals alone: the later part of each run, which the
    search did not see, with arrivals resampled.
    """
    if trained.workload is not None:
        spec = trained.workload
        kind = "other seeds" if spec.is_synthetic else "later windows"
        return held_out(spec, n_traces), f"{kind} of {spec.name} at {spec.requests_per_s:g} requests/s"
    paths = [Path(path) for path in trained.journals]
    journals = journal_runs(paths, clean_journal(paths, cluster_kind=trained.cluster_kind))
    later = joined([journal.trace.window(training_end(journal), len(journal.trace)) for journal in journals])
    n = sum(len(journal.trace) for journal in journals)
    traces = [resampled(later, HELD_OUT_SEED + k, n) for k in range(n_traces)]
    return traces, f"resampled from the last {len(later)} of {n} journaled requests"


def evaluate(candidate: Artifact, trained: TrainConfig, baselines: Baselines, traces: list[Trace]) -> Comparison:
    """Score both policies of the candidate and every tuned baseline on the same traces."""
    profile = hardware_profile(trained.hardware)
    costs = costs_of_artifact(candidate)
    n_prefill, n_decode = candidate.metadata.prefill_engines, candidate.metadata.decode_engines
    topology = fitted_topology(n_prefill, n_decode, profile, costs)
    bench = bench_of(traces, topology, candidate.slo_targets(), candidate.predictor())
    tuned = {name: baseline_policy(name, params, costs, profile.kv_tokens) for name, params in baselines.params.items()}
    learned = {name: policy(name, artifact=candidate) for name in LEARNED}
    return compare(bench, {**tuned, **learned}, candidate.metadata.policy, tuned)


def summary(artifact: Artifact, path: Path) -> list[str]:
    """The end of the main job: rows and drops, clusters, held-out table, the file."""
    metadata = artifact.metadata
    drops = ", ".join(f"{count} {reason}" for reason, count in metadata.journal_dropped.items()) or "none"
    return [
        "",
        f"journal: {metadata.journal_rows} rows used, dropped: {drops}; {metadata.cluster_kind} cluster "
        f"{metadata.prefill_engines}P+{metadata.decode_engines}D, workload {metadata.workload}, dilation "
        f"{metadata.dilation:g}",
        "",
        *cluster_lines(artifact),
        "",
        "held out, simulated:",
        *score_lines(metadata.held_out),
        "",
        f"artifact: {path}, {path.stat().st_size} bytes, digest {artifact.digest()}; policy 'rutter' is its "
        f"{metadata.policy}",
    ]


def cluster_lines(artifact: Artifact) -> list[str]:
    """One line a cluster: size, centre in tokens, and its action in each regime."""
    arrays = artifact.arrays
    prefill_edges = [f"{edge:.0f}" for edge in arrays["prefill_edges_tokens"]]
    decode_edges = [f"{edge:.1f}" for edge in arrays["decode_edges_requests"]]
    n_decode = len(decode_edges) + 1
    lines = [
        "clusters and their actions, l local, R remote: a group for each prefill pressure (borders at "
        f"{', '.join(prefill_edges) or 'none'} tokens an engine), in it a letter for each decode pressure (borders at "
        f"{', '.join(decode_edges) or 'none'} requests an engine)",
        f"{'rows':>7}{'prompt':>9}{'uncached P':>12}{'uncached D':>12}{'output':>8}{'tight':>7}  actions",
    ]
    for k in range(artifact.n_clusters):
        centre = arrays["centres_tokens"][k]
        letters = ["lR"[int(action)] for action in arrays["actions"].reshape(artifact.n_clusters, -1)[k]]
        groups = ["".join(letters[i : i + n_decode]) for i in range(0, len(letters), n_decode)]
        lines.append(
            f"{int(arrays['counts'][k]):>7}{centre[0]:>9.0f}{centre[1]:>12.0f}{centre[2]:>12.0f}{centre[3]:>8.0f}"
            f"{centre[4]:>7.0%}  {' '.join(groups)}"
        )
    return lines


def score_lines(scores: list[Score]) -> list[str]:
    """The held-out table, best first."""
    width = max([16, *(len(score.policy) for score in scores)]) + 2
    times_head = f"{'P90 TTFT':>10}{'P99 TTFT':>10}{'P90 TPOT':>10}"
    lines = [f"{'policy':<{width}}{'goodput':>8}  {'95 % interval':<15}{times_head}"]
    for score in scores:
        times = (milliseconds(value) for value in (score.ttft_p90_s, score.ttft_p99_s, score.tpot_p90_s))
        interval = f"{score.goodput_low:.3f} - {score.goodput_high:.3f}"
        lines.append(
            f"{score.policy:<{width}}{score.goodput:>8.3f}  {interval:<15}" + "".join(f"{t:>10}" for t in times)
        )
    return lines


def milliseconds(value_s: float | None) -> str:
    return "-" if value_s is None or not math.isfinite(value_s) else f"{value_s * 1e3:.1f} ms"
