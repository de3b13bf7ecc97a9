"""`rutter export`: judge the candidate on held-out traces against every baseline, and write the artifact.

With `--confirm live` only what is better on the live cluster than what is there already is written.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path

import msgspec

from learn.costs import fitted_topology
from learn.evaluate import Bench, Comparison, bench_of, compare
from learn.frame import clean_journal
from learn.policy_space import baseline_policy
from learn.resample import resampled
from learn.splits import judged_splits, split_lines
from learn.table import costs_of_artifact, strict_score
from learn.trace import Trace, joined
from pipelines.confirm import ConfirmConfig, add_confirm_arguments, confirm_config, confirmation_of, confirmed
from pipelines.stages import Run, Stage, add_run_arguments, run_from
from pipelines.train import journal_runs, training_end
from pipelines.train_config import Baselines, TrainConfig
from pipelines.workload_spec import HELD_OUT_SEED, held_out
from serve_table.artifact import Artifact, load, save, write_atomically
from serve_table.artifact_metadata import Score
from serve_table.errors import ConfigError
from serve_table.policy import policy
from serve_table.step_time import hardware_profile

HELD_OUT_TRACES = 8
LEARNED = ("table", "price")
"""The policies of an artifact; its metadata say which of them training found the better."""
DEFAULT_PATH = Path("artifacts/rutter.safetensors")
NOTHING_CONFIRMED = 3
"""Exit status where the live confirmation says to keep what is there."""


class ExportConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides what is exported."""

    candidate: str
    path: str
    held_out_traces: int
    confirm: ConfirmConfig | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    add = parser.add_argument
    add("--to", type=Path, default=DEFAULT_PATH, metavar="FILE", help="where the artifact goes (%(default)s)")
    add("--held-out", type=int, default=HELD_OUT_TRACES, metavar="N", help="held-out traces to judge on (%(default)s)")
    add_confirm_arguments(parser, NOTHING_CONFIRMED)


def run(args: argparse.Namespace) -> int:
    """Export, or say that it is done; the previous artifact stays until the new one is whole."""
    if args.held_out < 2:
        raise ConfigError(f"--held-out {args.held_out}: at least 2 traces are needed for an interval")
    confirm = confirm_config(args)
    run_ = run_from(args)
    with run_.lock():
        digest = run_.latest("train").outputs["candidate"].digest
        config = ExportConfig(digest, str(args.to), args.held_out, confirm)
        stage = run_.begin("export", msgspec.to_builtins(config))
        if stage.record is not None:
            say("already done, nothing has changed since")
        elif not export(run_, stage, config, args.to):
            return NOTHING_CONFIRMED
        for line in summary(load(args.to), args.to):
            print(line)
    return 0


def say(line: str) -> None:
    print(f"export: {line}", flush=True)


def export(run_: Run, stage: Stage, config: ExportConfig, path: Path) -> bool:
    """Judge the candidate, confirm it where that is asked for, and write what is the best with its scores.

    Returns whether anything was written: not where the confirmation says to keep what is there.
    """
    record = run_.latest("train")
    trained = msgspec.json.decode(record.config, type=TrainConfig)
    baselines = msgspec.json.decode(run_.output_path(record, "baselines").read_bytes(), type=Baselines)
    chosen = load(run_.output_path(record, "candidate"))
    traces, where = held_out_traces(trained, config.held_out_traces)
    say(f"judging on {len(traces)} held-out traces ({where}), simulated with the fitted costs")
    comparison = evaluate(chosen, trained, baselines, traces)
    say_comparison(comparison, chosen)
    for line in advice(chosen, trained, traces):
        say(line)
    outputs = {"artifact": path}
    if config.confirm is not None:
        confirmation = confirmation_of(
            run_, stage.folder, trained, config.confirm, chosen, path, comparison.best_baseline, baselines, say
        )
        verdict = confirmed(confirmation, run_, say)
        outputs["confirmation"] = stage.folder / "confirmation.json"
        write_atomically(outputs["confirmation"], msgspec.json.format(msgspec.json.encode(verdict), indent=2))
        if verdict.chosen is None:
            say(f"{path} is as it was" if path.exists() else f"nothing was written to {path}")
            return False
        chosen = confirmation.learned[verdict.chosen]
        comparison = evaluate(chosen, trained, baselines, traces)
    held_out = [strict_score(score) for score in comparison.scores]
    save(replace(chosen, metadata=msgspec.structs.replace(chosen.metadata, held_out=held_out)), path)
    run_.finish("export", msgspec.to_builtins(config), outputs)
    return True


def say_comparison(comparison: Comparison, candidate: Artifact) -> None:
    sign = "better than" if comparison.low > 0 else "worse than" if comparison.high < 0 else "level with"
    say(
        f"the {candidate.metadata.policy} is {sign} the best baseline, {comparison.best_baseline}: goodput "
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
    bench = bench_for(candidate, trained, traces)
    tuned = {name: baseline_policy(name, params, costs, profile.kv_tokens) for name, params in baselines.params.items()}
    learned = {name: policy(name, artifact=candidate) for name in LEARNED}
    return compare(bench, {**tuned, **learned}, candidate.metadata.policy, tuned)


def bench_for(candidate: Artifact, trained: TrainConfig, traces: list[Trace]) -> Bench:
    """The traces on the cluster that the candidate was learned on."""
    costs, profile = costs_of_artifact(candidate), hardware_profile(trained.hardware)
    n_prefill, n_decode = candidate.metadata.prefill_engines, candidate.metadata.decode_engines
    topology = fitted_topology(n_prefill, n_decode, profile, costs)
    return bench_of(traces, topology, candidate.slo_targets(), candidate.predictor())


def advice(candidate: Artifact, trained: TrainConfig, traces: list[Trace]) -> list[str]:
    """How the candidate would do on other splits of the cluster's engines."""
    bench = bench_for(candidate, trained, traces)
    return split_lines(judged_splits(bench, policy("rutter", artifact=candidate)), bench.topology)


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
