"""`rutter ablate`: the learned policy without its parts, with wrong lengths and wrong constants, in the simulator.

Takes the policy as `rutter compare --cluster simulated` learned it, from its run folder, and judges each change on the
same held-out requests at the same rate.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from joblib import Parallel, delayed

from learn.ablations import ABLATIONS, FULL
from learn.contenders import RUTTER
from learn.evaluate import interval
from pipelines.frontier import DEFAULT_TOPOLOGY, compared_workloads
from pipelines.grid_rivals import ComparedCell
from pipelines.results import RESULTS_FOLDER
from pipelines.row_file import KeyedRow, RowFile
from pipelines.simulated_compare import topology_of
from pipelines.stages import add_run_arguments, run_from
from pipelines.text_table import aligned
from serve_table.errors import ConfigError

DEFAULT_PATH = RESULTS_FOLDER / "ablate.csv"


class AblationRow(KeyedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mean goodput of a changed policy over `runs` held-out traces, and its difference to the unchanged one, paired
    by trace, with the 95 % interval.
    """

    workload: str
    prefill_engines: int
    decode_engines: int
    change: str
    requests_per_s: float
    goodput: float
    difference: float
    difference_low: float
    difference_high: float
    runs: int

    @property
    def key(self) -> tuple[str, int, int, str]:
        return self.workload, self.prefill_engines, self.decode_engines, self.change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    add = parser.add_argument
    add("--workloads", nargs="+", metavar="NAME", help="of the comparison; default: all of them")
    add("--topology", default=DEFAULT_TOPOLOGY, metavar="P+D", help="whose rates and policy these are (%(default)s)")
    add("--out", type=Path, default=DEFAULT_PATH, metavar="FILE", help="results (%(default)s)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="workloads at a time (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Judge every change on every workload, write the results, and show them."""
    topology_of(args.topology)
    if args.jobs < 1:
        raise ConfigError("--jobs must be at least 1")
    results = RowFile(args.out, AblationRow, "ablations")
    results.rows()
    run_ = run_from(args)
    names = list(dict.fromkeys(args.workloads or compared_workloads(run_, args.topology)))
    cells = [ComparedCell(run_, name, args.topology) for name in names]
    made = Parallel(n_jobs=min(args.jobs, len(cells)), return_as="generator")(delayed(rows_of)(cell) for cell in cells)
    rows: list[AblationRow] = []
    for of_cell in made:
        results.put(of_cell)
        rows += of_cell
        print(f"ablate: {of_cell[0].workload} is done", flush=True)
    print("\n".join([f"results in {results.path}", "", *report_lines(rows, args.topology)]))
    return 0


def rows_of(cell: ComparedCell) -> list[AblationRow]:
    """Every change of the learned policy on one workload."""
    workload = cell.workload()
    learned, artifact = cell.learned()
    traces = list(workload.requests.tests(workload.rate).values())
    bench = cell.rival(RUTTER, workload).bench(traces, workload)
    goodput = {ablation.name: ablation.goodput(learned.params, bench, artifact.table()) for ablation in ABLATIONS}
    rows = []
    for name, values in goodput.items():
        difference = values - goodput[FULL]
        resolution = 0.0 if name == FULL else 1.0 / workload.requests.spec.n_requests
        low, high = interval(difference, resolution=resolution)
        rows.append(
            AblationRow(
                workload=cell.name,
                prefill_engines=bench.topology.prefill_engines,
                decode_engines=bench.topology.decode_engines,
                change=name,
                requests_per_s=workload.rate,
                goodput=float(np.mean(values)),
                difference=float(np.mean(difference)),
                difference_low=low,
                difference_high=high,
                runs=len(values),
            )
        )
    return rows


def report_lines(rows: Sequence[AblationRow], topology: str) -> list[str]:
    """Changes as rows, workloads as columns: the learned policy's goodput, and what each change makes of it."""
    found = {(row.change, row.workload): row for row in rows}
    workloads = list(dict.fromkeys(row.workload for row in rows))
    changes = list(dict.fromkeys(row.change for row in rows))
    text = [(f"{topology}, goodput", *workloads)]
    for change in changes:
        of_change = [found[change, workload] for workload in workloads]
        cells = [f"{row.goodput:.3f}" if change == FULL else f"{row.difference:+.3f}" for row in of_change]
        text.append((change, *cells))
    return aligned(text)
