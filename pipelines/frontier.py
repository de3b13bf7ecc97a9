"""`rutter frontier`: the load that policies carry, and how many engines they need for one, in the simulator.

Takes the policies as `rutter compare --cluster simulated` tuned and learned them, from its run folder, and judges them
on the same held-out requests at other rates and on other clusters.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from joblib import Parallel, delayed

from learn.contenders import RUTTER
from learn.evaluate import Floats, interval
from learn.simulation import Topology
from learn.splits import judged_splits, split_lines
from pipelines.frontier_report import ENGINES, LOAD, SPLITS, FrontierRow, engine_lines, load_lines
from pipelines.grid_policy import Workload
from pipelines.grid_rivals import ComparedCell, Rival, compared_topologies, nearest
from pipelines.results import RESULTS_FOLDER
from pipelines.row_file import RowFile
from pipelines.simulated_compare import DEFAULT_WORKLOADS, topology_of
from pipelines.stages import Run, add_run_arguments, run_from
from serve_table.errors import ConfigError
from serve_table.policy import policy

DEFAULT_PATH = RESULTS_FOLDER / "frontier.csv"
DEFAULT_TOPOLOGY = "2P+4D"
LOAD_POLICIES = (RUTTER, "dynamo_style", "class_aware", "round_robin")
LOADS = tuple(round(0.6 + 0.1 * k, 1) for k in range(17))
"""Of the rate of the comparison, where round robin is in mid-collapse."""
ENGINE_POLICIES = (RUTTER, "dynamo_style", "round_robin")
ENGINE_COUNTS = ("1P+2D", "2P+2D", "2P+3D", "2P+4D", "2P+5D", "2P+6D")
ELASTIC = f"{RUTTER}_elastic"
"""The learned policy where prefill engines may serve whole requests."""
AGGREGATED = "always_local"
"""On as many engines without a prefill engine among them: what they do when they are not disaggregated."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    add = parser.add_argument
    add("--workloads", nargs="+", metavar="NAME", help="of the comparison; default: all of them")
    add("--topology", default=DEFAULT_TOPOLOGY, metavar="P+D", help="whose rates and policies these are (%(default)s)")
    add("--loads", nargs="+", type=float, default=LOADS, metavar="X", help=f"of the rate; default: {LOADS[0]} to 2.2")
    add("--engines-workload", default="mixed", metavar="NAME", help="judged on every number of engines (%(default)s)")
    add("--splits", action="store_true", help="also on every split of the topology's engines, with advice")
    add("--out", type=Path, default=DEFAULT_PATH, metavar="FILE", help="results (%(default)s)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="workloads at a time (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Judge, write every result, and show what each policy carries and needs."""
    topology_of(args.topology)
    loads = sorted(set(args.loads))
    if args.jobs < 1 or loads[0] <= 0.0 or len(loads) < 2:
        raise ConfigError("--loads must be two or more above 0, and --jobs at least 1")
    results = RowFile(args.out, FrontierRow, "frontiers")
    results.rows()
    run_ = run_from(args)
    names = list(dict.fromkeys(args.workloads or compared_workloads(run_, args.topology)))
    made = Parallel(n_jobs=min(args.jobs, len(names) + 1), return_as="generator")(
        [
            *(delayed(load_rows)(ComparedCell(run_, name, args.topology), loads) for name in names),
            delayed(engine_rows)(ComparedCell(run_, args.engines_workload, args.topology)),
        ]
    )
    for title, rows in zip([*names, None], made, strict=True):
        results.put(rows)
        lines = load_lines(rows) if title is not None else ["", *engine_lines(rows)]
        print("\n".join(lines), flush=True)
    if args.splits:
        judged = (delayed(split_part)(ComparedCell(run_, name, args.topology)) for name in names)
        for rows, lines in Parallel(n_jobs=min(args.jobs, len(names)), return_as="generator")(judged):
            results.put(rows)
            print("\n".join(lines), flush=True)
    print(f"results in {results.path}")
    return 0


def compared_workloads(run_: Run, topology: str) -> list[str]:
    """Those of the comparison's default workloads that Rutter was compared on; RunError where there is none."""
    found = [name for name in DEFAULT_WORKLOADS if run_.finished(f"cell-{name}-{topology}-{RUTTER}")]
    return found or [DEFAULT_WORKLOADS[0]]


def load_rows(cell: ComparedCell, loads: Sequence[float]) -> list[FrontierRow]:
    """The cell's policies at every load, on the held-out requests as they would come at that rate; the learned one also
    with elastic roles.
    """
    workload = cell.workload()
    rigid = workload.training.topology
    rivals = [(name, cell.rival(name, workload), rigid) for name in LOAD_POLICIES]
    rivals.append((ELASTIC, cell.rival(RUTTER, workload), replace(rigid, elastic=True)))
    rows = []
    for load in loads:
        traces = list(workload.requests.tests(load * workload.rate).values())
        for name, rival, topology in rivals:
            goodput = rival.goodput(traces, workload, topology)
            rows.append(row_of(LOAD, cell.name, workload, topology, name, load, goodput))
    return rows


def engine_rows(cell: ComparedCell) -> list[FrontierRow]:
    """Policies at the cell's rate on other numbers of engines, each as the nearest compared topology has it."""
    workload = cell.workload()
    traces = list(workload.requests.tests(workload.rate).values())
    compared = compared_topologies(cell.run, cell.name)
    rows = []
    for prefill, decode in map(topology_of, ENGINE_COUNTS):
        near = "{}P+{}D".format(*nearest(compared, prefill, decode))
        topology = replace(workload.training.topology, prefill_engines=prefill, decode_engines=decode)
        for name in ENGINE_POLICIES:
            rival = ComparedCell(cell.run, cell.name, near).rival(name, workload)
            goodput = rival.goodput(traces, workload, topology)
            rows.append(row_of(ENGINES, cell.name, workload, topology, name, 1.0, goodput))
        together = replace(topology, prefill_engines=0, decode_engines=prefill + decode)
        alone = Rival(AGGREGATED, policy(AGGREGATED), workload.training.lengths.predictor())
        goodput = alone.goodput(traces, workload, together)
        rows.append(row_of(ENGINES, cell.name, workload, together, AGGREGATED, 1.0, goodput))
    return rows


def split_part(cell: ComparedCell) -> tuple[list[FrontierRow], list[str]]:
    """The cell's learned policy, unchanged, on every split of as many engines at the cell's rate: rows and advice."""
    workload = cell.workload()
    rival = cell.rival(RUTTER, workload)
    bench = rival.bench(list(workload.requests.tests(workload.rate).values()), workload)
    splits = judged_splits(bench, rival.policy)
    rows = [
        row_of(SPLITS, cell.name, workload, split.topology, name, 1.0, split.goodput)
        for split in splits
        for name in (ELASTIC if split.topology.elastic else RUTTER,)
    ]
    return rows, [f"{cell.name}: {line}" for line in split_lines(splits, bench.topology)]


def row_of(
    part: str, name: str, workload: Workload, topology: Topology, policy_name: str, load: float, goodput: Floats
) -> FrontierRow:
    low, high = interval(goodput, resolution=1.0 / workload.requests.spec.n_requests)
    return FrontierRow(
        part=part,
        workload=name,
        prefill_engines=topology.prefill_engines,
        decode_engines=topology.decode_engines,
        policy=policy_name,
        load=load,
        requests_per_s=load * workload.rate,
        goodput=float(np.mean(goodput)),
        goodput_low=max(low, 0.0),
        goodput_high=min(high, 1.0),
        runs=len(goodput),
    )
