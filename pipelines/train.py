"""`rutter train`: learn clusters, lengths, costs and policy from journals."""

import argparse
import os
from pathlib import Path

import msgspec

from learn.compaction import compact
from learn.frame import CleanFrame
from learn.journal_trace import JournalTrace, journal_trace, left_out_reason, runs
from learn.objective import OBJECTIVES
from learn.policy_search import Searched
from learn.search import SAMPLER
from learn.table import SearchRecord, build_artifact, with_regimes
from learn.trace import Trace
from learn.training import Learned, learn_from, training_bench
from pipelines.calibration_start import Start, calibration_line, digest_of_calibration, start_from
from pipelines.collect import CollectConfig
from pipelines.path_digest import digest_of_path
from pipelines.stages import Run, Stage, add_run_arguments, run_from
from pipelines.train_config import Baselines, TrainConfig
from pipelines.train_search import front_json, searched_lines, searched_policies
from pipelines.workload_spec import WorkloadSpec
from serve_table.artifact import Artifact, save, write_atomically
from serve_table.artifact import load as load_artifact
from serve_table.calibration import Calibration
from serve_table.calibration import load as load_calibration
from serve_table.errors import ConfigError, RunError
from serve_table.journal import JournalReader
from serve_table.step_time import hardware_profile

JOURNAL_WORKLOAD = "journal"
JOURNAL_TRAINING_SHARE = 0.75
"""Of a journal whose workload is not known, the search sees this earlier part; the rest is held out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    add = parser.add_argument
    add(
        "--journal",
        action="extend",
        nargs="+",
        default=[],
        type=Path,
        metavar="PATH",
        help="journals to learn from; default: those collected",
    )
    add("--hardware", default=None, help="profile that the fit of costs starts from; default: the collection's")
    add("--calibration", type=Path, metavar="FILE", help="costs to start from, and SLO targets, of `rutter calibrate`")
    add("--cluster-kind", help="use rows of this kind of cluster only")
    add("--trials", type=int, default=300, help="trials of the search, and of each baseline's tuning (%(default)s)")
    minutes = "for all searches together, whichever is spent first; the result depends on the machine's speed then"
    add("--minutes", type=float, metavar="M", help=f"{minutes}. Kept across resumptions; default: no limit")
    objective = "of the learned policies: %(default)s, latency profile or P99 TTFT against the tuned baselines"
    add("--objective", choices=list(OBJECTIVES), default="goodput", help=objective)
    add("--from", dest="start", type=Path, metavar="ARTIFACT", help="artifact whose parameters are tried first")
    add(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="trials at a time (%(default)s); 1 repeats exactly from the seed",
    )
    add("--seed", type=int, default=0, help="seed of clustering, resampling and search (%(default)s)")
    add("--storage", metavar="URL", help="Optuna storage shared by several machines; default: a file in the run")


def run(args: argparse.Namespace) -> int:
    """Train, or continue a killed search, or say that it is done."""
    run_ = run_from(args)
    if args.trials < 1 or args.jobs < 1 or args.seed < 0:
        raise ConfigError("--trials and --jobs must be at least 1, --seed at least 0")
    if args.minutes is not None and not 0.0 < args.minutes < float("inf"):
        raise ConfigError(f"--minutes {args.minutes} must be above 0")
    start = None if args.start is None else load_artifact(args.start)
    with run_.lock():
        paths, config = config_from(args, run_, start)
        stage = run_.begin("train", msgspec.to_builtins(config))
        if stage.record is not None:
            print(f"train: already done, candidate in {run_.output_path(stage.record, 'candidate')}")
            return 0
        for change in stage.changes:
            print(f"train: training anew, {change}")
        calibration = None if args.calibration is None else load_calibration(args.calibration)
        train(run_, stage, config, paths, calibration, start)
    return 0


def config_from(args: argparse.Namespace, run_: Run, start: Artifact | None) -> tuple[list[Path], TrainConfig]:
    """The journals to read, and the configuration; those that the run collected where none are given."""
    workload: WorkloadSpec | None = None
    hardware = "a40-3b"
    if args.journal:
        paths = [path.resolve() for path in args.journal]
        digests = {str(path): digest_of_journal(path) for path in paths}
    else:
        record = run_.latest("collect")
        hardware = msgspec.json.decode(record.config, type=CollectConfig).cluster.hardware
        workload = msgspec.json.decode(run_.output_path(record, "workload").read_bytes(), type=WorkloadSpec)
        paths = [run_.output_path(record, "journal")]
        digests = {"collected": record.outputs["journal"].digest}
    hardware = args.hardware or hardware
    hardware_profile(hardware)
    return paths, TrainConfig(
        journals=digests,
        hardware=hardware,
        cluster_kind=args.cluster_kind,
        trials=args.trials,
        jobs=args.jobs,
        seed=args.seed,
        storage=args.storage,
        workload=workload,
        calibration=None if args.calibration is None else digest_of_calibration(args.calibration),
        objective=args.objective,
        minutes=args.minutes,
        start=None if start is None else start.digest(),
    )


def digest_of_journal(path: Path) -> str:
    if not path.exists():
        raise RunError(f"no journal at {path}: give a folder of .jsonl segments or one such file")
    return digest_of_path(path)


def train(
    run_: Run,
    stage: Stage,
    config: TrainConfig,
    paths: list[Path],
    calibration: Calibration | None = None,
    first: Artifact | None = None,
) -> None:
    """Clean, fit, search, and leave a candidate artifact, the price's front and the tuned baselines.

    first: the artifact whose parameters the search tries first.
    """
    start = start_from(config.hardware, calibration)
    slo = start.slo
    frame = compact(paths, stage.folder / "rows.parquet", cluster_kind=config.cluster_kind)
    for line in frame.report.lines():
        print(f"train: {line}")
    if calibration is not None:
        print(f"train: {calibration_line(calibration, frame)}")
    journals = journal_runs(paths, frame)
    learned = learn_from(frame, journals, start.profile, slo, config.seed, start.overhead_s)
    for line in learned_lines(learned):
        print(f"train: {line}", flush=True)
    bench = training_bench(training_traces(journals, config), learned, slo, config.seed)
    searched = searched_policies(stage.folder, config, bench, learned, first)
    for line in searched_lines(searched, config.objective):
        print(f"train: {line}")
    candidate = stage.folder / "candidate.safetensors"
    save(artifact_of(frame, learned, searched, config, start, journals), candidate)
    baselines = stage.folder / "baselines.json"
    tuned = Baselines({name: dict(params) for name, params in searched.baselines.items()}, searched.training_goodput)
    write_atomically(baselines, msgspec.json.encode(tuned))
    front = stage.folder / "pareto.json"
    write_atomically(front, front_json(searched.front))
    outputs = {"candidate": candidate, "baselines": baselines, "pareto": front}
    run_.finish("train", msgspec.to_builtins(config), outputs)
    print(f"train: done, candidate in {candidate}")


def journal_runs(paths: list[Path], frame: CleanFrame) -> list[JournalTrace]:
    """The journal's router runs as traces, of the frame's kind of cluster and dilation.

    Runs that executed nothing, as of a router whose engines were down, are left out.
    """
    rows = [
        row for row in JournalReader(paths) if row.cluster_kind == frame.cluster_kind and row.dilation == frame.dilation
    ]
    executed = [found for found in runs(rows) if any(left_out_reason(row) is None for row in found)]
    return [journal_trace(found, f"run {k + 1}") for k, found in enumerate(executed or [rows])]


def training_traces(journals: list[JournalTrace], config: TrainConfig) -> list[Trace]:
    """What the search may see: all of it where other traces of the kind can be had, else the earlier part."""
    if config.workload is not None:
        return [journal.trace for journal in journals]
    return [journal.trace.window(0, training_end(journal)) for journal in journals]


def training_end(journal: JournalTrace) -> int:
    """Requests of a journaled run that the search may see; those after it are held out."""
    return max(int(len(journal.trace) * JOURNAL_TRAINING_SHARE), 1)


def learned_lines(learned: Learned) -> list[str]:
    """What was learned before the search, for people."""
    error = learned.length_error
    compiled = learned.compiled
    lines = list(learned.cost_fit.lines())
    if error.median_relative is not None:
        lines.append(f"output lengths: median error {error.median_relative:.0%} on {error.rows} held-out rows")
    if learned.clusters.note is not None:
        lines.append(learned.clusters.note)
    held_out = "" if compiled.held_out_agreement is None else f", held out {compiled.held_out_agreement:.1%}"
    lines.append(
        f"{len(learned.clusters)} clusters x {len(compiled.regimes)} regimes; the table of {compiled.grid.n_cells} "
        f"cells agrees with exact k-means on {compiled.agreement:.1%} of rows{held_out}"
    )
    return lines


def artifact_of(
    frame: CleanFrame,
    learned: Learned,
    searched: Searched,
    config: TrainConfig,
    start: Start,
    journals: list[JournalTrace],
) -> Artifact:
    """The candidate: everything but held-out scores, which export adds."""
    compiled = with_regimes(learned.compiled, searched.table.regimes, frame.pressures())
    record = SearchRecord(
        seed=config.seed,
        sampler=SAMPLER,
        search_jobs=config.jobs,
        trials=searched.price_best.tried if searched.form == "price" else searched.table_best.tried,
        study=searched.form,
        held_out=(),
    )
    return build_artifact(
        frame,
        compiled,
        searched.table.actions,
        searched.table.placement,
        learned.lengths,
        learned.cost_fit.costs,
        start.slo,
        record,
        form=searched.form,
        price=searched.price,
        profile=start.profile,
        workload=config.workload.name if config.workload is not None else JOURNAL_WORKLOAD,
        prefill_engines=max(len(journal.prefill_engines) for journal in journals),
        decode_engines=max(len(journal.decode_engines) for journal in journals),
        calibrated_time=start.calibrated_time,
    )
