"""`rutter compare --cluster simulated`: policies over workloads and topologies in the simulator, cells in parallel."""

import argparse
import re
import time
from collections.abc import Iterable, Sequence

import msgspec
from joblib import Parallel, delayed

from learn.contenders import CONTENDERS, JOINT, REFERENCES
from pipelines.grid_cell import SIMULATED, Cell, CellConfig, ContenderConfig, contender_config, make_cell, read_judged
from pipelines.grid_policy import TopologyWork, make_policy, topology_work
from pipelines.grid_report import report_lines
from pipelines.grid_traces import requests_for
from pipelines.live_start import LiveStart
from pipelines.progress import Progress
from pipelines.results import RESULTS_FOLDER, ResultFile, ResultRow
from pipelines.stages import Run, run_from
from pipelines.traces import PUBLIC_TRACES
from pipelines.workload_spec import WorkloadSpec
from pipelines.workloads import WORKLOADS
from serve_table.errors import ConfigError, TraceError

TRACES = ("azure-conv", "azure-code", "mooncake-conv")
DEFAULT_WORKLOADS = (*WORKLOADS, *TRACES)
DEFAULT_TOPOLOGIES = ("1P+2D", "2P+2D", "2P+3D", "2P+4D", "2P+6D")
DEFAULT_REQUESTS = 2000
DEFAULT_SEEDS = 8
DEFAULT_WINDOWS = 3
DEFAULT_PATH = RESULTS_FOLDER / "grid.csv"
TRAINING_SEED = 0


def run(args: argparse.Namespace) -> int:
    """Make the cells that are missing, write every result, and show the comparison."""
    check(args)
    names, learned = names_of(args)
    results = ResultFile(args.out or DEFAULT_PATH, SIMULATED)
    results.rows()
    run_ = run_from(args)
    with run_.lock():
        cells = cells_of(args, names, run_)
        rows = complete(cells, args.jobs, results)
        if learned:
            rows += complete_learned(works_of(cells, args, run_), args.jobs, results)
    say(f"results in {results.path}")
    print("\n".join([*report_lines(rows, args.markdown), "", conditions(args)]))
    return 0


def names_of(args: argparse.Namespace) -> tuple[tuple[str, ...], bool]:
    """The policies that are tuned for every cell, and whether the learned one is wanted, which needs its references."""
    learned = JOINT[args.objective]
    asked = (*CONTENDERS, learned) if args.policies is None or "all" in args.policies else tuple(args.policies)
    known = (*CONTENDERS, *JOINT.values())
    for name in asked:
        if name not in known:
            raise ConfigError(f"policy {name!r} is not compared in the simulator; known: {', '.join(known)}")
    is_learned = any(name in JOINT.values() for name in asked)
    tuned = [name for name in asked if name in CONTENDERS]
    return tuple(dict.fromkeys([*tuned, *REFERENCES] if is_learned else tuned)), is_learned


def check(args: argparse.Namespace) -> None:
    """ConfigError for a flag out of range, and for one that only a live cluster has."""
    live = {
        "--artifact": args.artifact is not None,
        "--tuned": args.tuned is not None,
        "--rate": bool(args.rate),
        "--dilation": args.dilation is not None,
        "--prefill-url": bool(args.prefill_url),
        "--decode-url": bool(args.decode_url),
    }
    for flag, given in live.items():
        if given:
            raise ConfigError(f"{flag} is for live clusters: --cluster simulated finds rates and tunes by itself")
    if (args.prefill, args.decode) != (2, 4):
        raise ConfigError("--cluster simulated takes several clusters: name them as --topologies 2P+4D")
    if args.trials < 1 or args.jobs < 1:
        raise ConfigError("--trials and --jobs must be at least 1")


def say(line: str) -> None:
    print(f"compare: {line}", flush=True)


def topology_of(text: str) -> tuple[int, int]:
    """Prefill and decode engines of a text such as 2P+4D."""
    found = re.fullmatch(r"([1-9]\d*)P\+([1-9]\d*)D", text)
    if found is None:
        raise ConfigError(f"--topologies {text!r}: give each as 2P+4D, with at least one engine of both kinds")
    return int(found[1]), int(found[2])


def cells_of(args: argparse.Namespace, names: Sequence[str], run_: Run) -> list[Cell]:
    """Every workload on every topology. A public trace that is not at hand is left out, where none was asked for."""
    topologies = [topology_of(text) for text in dict.fromkeys(args.topologies)]
    start = LiveStart(args.hardware, None, args.calibration)
    # As the engines are, so the router knows them: what a wrong calibration costs is another experiment.
    topology = start.topology_of(1, 1)
    limit = topology.profile.max_model_len_tokens
    cells = []
    for name in dict.fromkeys(args.workloads or DEFAULT_WORKLOADS):
        spec = WorkloadSpec(name, args.requests or DEFAULT_REQUESTS, 0, 0, 1.0, args.tight_share, limit)
        n_seeds = args.seeds or (DEFAULT_SEEDS if spec.is_synthetic else DEFAULT_WINDOWS)
        try:
            seeds = judged_seeds(spec, range(args.seed, args.seed + n_seeds))
        except TraceError as error:
            if args.workloads or name not in PUBLIC_TRACES:
                raise
            say(f"{name} is left out: {error}")
            continue
        for prefill, decode in topologies:
            config = CellConfig(spec, prefill, decode, topology.profile, topology.overhead_s, start.slo, TRAINING_SEED)
            contenders = tuple(contender_config(config, policy, args.trials, seeds) for policy in names)
            cells.append(Cell(config, contenders, run_))
    return cells


def judged_seeds(spec: WorkloadSpec, seeds: Iterable[int]) -> tuple[int, ...]:
    """Those of the seeds that the workload has requests for; fewer are said to be."""
    wanted = tuple(seeds)
    requests = requests_for(spec, wanted)
    if requests.imported is None:
        return wanted
    found = wanted[: len(requests.imported[2].tests)]
    if len(found) < len(wanted):
        say(
            f"{spec.name}: {len(requests.imported[0])} requests have room for {len(found)} windows of "
            f"{spec.n_requests} besides training's, not {len(wanted)}"
        )
    return found


def complete(cells: Sequence[Cell], jobs: int, results: ResultFile) -> list[ResultRow]:
    """Make what is pending, several cells at a time, and return the rows of all cells.

    Rows are written after every cell; those made before are written again first, should the file lack them.
    """
    rows = [row for cell in cells for contender in cell.contenders for row in judged_rows(cell, contender)]
    if rows:
        results.put(rows)
    pending = [found for cell in cells if (found := pending_of(cell)) is not None]
    say(f"{len(cells) - len(pending)} of {len(cells)} cells are done")
    if not pending:
        return rows
    jobs = min(jobs, len(pending))
    begun_s = time.monotonic()
    with Progress("compare", total=len(cells), unit="cells", done=len(cells) - len(pending)) as progress:
        made = Parallel(n_jobs=jobs, return_as="generator_unordered")(delayed(make_cell)(cell) for cell in pending)
        for k, cell in enumerate(made, 1):
            new = finish(cell)
            results.put(new)
            rows += new
            minutes = (time.monotonic() - begun_s) / 60.0
            left = minutes / k * (len(pending) - k)
            progress.note(f"{cell.config} is done, {k} of {len(pending)} in {minutes:.1f} min; {left:.0f} min to go")
            progress.advance(1)
    order = {(cell.config.workload.name, str(cell.config.topology)): k for k, cell in enumerate(cells)}
    return sorted(rows, key=lambda row: order[row.workload, f"{row.prefill_engines}P+{row.decode_engines}D"])


def works_of(cells: Sequence[Cell], args: argparse.Namespace, run_: Run) -> list[TopologyWork]:
    """One learned policy for each topology of the cells."""
    by_topology: dict[str, list[Cell]] = {}
    for cell in cells:
        by_topology.setdefault(str(cell.config.topology), []).append(cell)
    return [topology_work(found, args.objective, args.trials, run_) for found in by_topology.values()]


def complete_learned(works: Sequence[TopologyWork], jobs: int, results: ResultFile) -> list[ResultRow]:
    """Learn and judge the policies that are pending, several topologies at a time; returns the rows of all."""
    done = [rows for work in works if (rows := learned_rows(work))]
    for rows in done:
        results.put(rows)
    pending = [work for work in works if not learned_rows(work)]
    say(f"the learned policies of {len(done)} of {len(works)} topologies are done")
    begun_s = time.monotonic()
    made = Parallel(n_jobs=max(min(jobs, len(pending)), 1), return_as="generator_unordered")(
        delayed(make_policy)(work) for work in pending
    )
    for work in made:
        work.run.finish(work.config.stage_name, work.stage_config, work.outputs())
        results.put(row for cell in work.judged_cells() for row in finish(cell))
        say(f"{work.config.policy} of {work.config.topology} is done in {(time.monotonic() - begun_s) / 60.0:.1f} min")
    return [row for work in works for row in learned_rows(work)]


def learned_rows(work: TopologyWork) -> list[ResultRow]:
    """The rows of a topology's learned policy in all its cells; none where it is not done in one of them."""
    found = [judged_rows(cell, cell.contenders[0]) for cell in work.judged_cells()]
    done = work.run.done(work.config.stage_name, work.stage_config) is not None and all(found)
    return [row for rows in found for row in rows] if done else []


def pending_of(cell: Cell) -> Cell | None:
    """The cell with the policies that were not judged yet; None where all were."""
    left = tuple(
        contender
        for contender in cell.contenders
        if cell.run.done(contender.stage_name, msgspec.to_builtins(contender)) is None
    )
    return Cell(cell.config, left, cell.run) if left else None


def finish(cell: Cell) -> list[ResultRow]:
    """Record a made cell's policies as done; returns their rows."""
    for contender in cell.contenders:
        path = cell.judged_path(contender)
        cell.run.finish(contender.stage_name, msgspec.to_builtins(contender), {"judged": path})
    return [row for contender in cell.contenders for row in judged_rows(cell, contender)]


def judged_rows(cell: Cell, contender: ContenderConfig) -> tuple[ResultRow, ...]:
    """The rows of a policy in a cell; none where it is not done."""
    record = cell.run.done(contender.stage_name, msgspec.to_builtins(contender))
    if record is None:
        return ()
    return read_judged(cell, contender).rows


def conditions(args: argparse.Namespace) -> str:
    """What the figures hold for, in one line."""
    source = f"the {args.hardware} profile" if args.calibration is None else f"calibration {args.calibration.name}"
    return (
        f"Conditions: simulated, {args.hardware}; {args.requests or DEFAULT_REQUESTS} requests a run at the rate where "
        f"round robin is in mid-collapse on the training traces; times and SLO targets of {source}; every policy "
        f"tuned for its cell by {args.trials} trials on training seeds, the learned one for all workloads of a "
        f"topology at once for {args.objective}; judged on held-out seeds from {args.seed} on and on later windows of "
        "traces; intervals: 95 %, paired by seed."
    )
