"""A simulated comparison for people: goodput by policy and workload, and paired differences to the best baseline."""

from collections.abc import Sequence

import numpy as np

from learn.contenders import RUTTER
from pipelines.comparison_report import WorkloadScores, scores_of
from pipelines.results import ResultRow


def cells_of(rows: Sequence[ResultRow]) -> list[WorkloadScores]:
    """The scores of every cell, in the order of the rows."""
    cells: dict[tuple[str, str], list[ResultRow]] = {}
    for row in rows:
        cells.setdefault((topology_of(row), row.workload), []).append(row)
    return [scores_of(found) for found in cells.values()]


def topology_of(row: ResultRow) -> str:
    return f"{row.prefill_engines}P+{row.decode_engines}D"


def report_lines(rows: Sequence[ResultRow], markdown: bool = False) -> list[str]:
    """For each topology a table of mean goodput and how rutter did in each cell; in the end how it did over all."""
    lines: list[str] = []
    for topology in dict.fromkeys(topology_of(row) for row in rows):
        found = cells_of([row for row in rows if topology_of(row) == topology])
        lines += ["", f"{topology}, mean goodput:", *([""] if markdown else []), *table_lines(found, markdown), ""]
        lines += [f"{'- ' if markdown else ''}{cell_line(cell)}" for cell in found]
    total = total_line(cells_of(rows))
    return [*lines, "", total] if total else lines


def table_lines(cells: Sequence[WorkloadScores], markdown: bool) -> list[str]:
    """Policies as rows, workloads as columns, best mean first."""
    goodput = {cell.workload: {score.policy: score.goodput for score in cell.scores} for cell in cells}
    policies = dict.fromkeys(score.policy for cell in cells for score in cell.scores)
    values = {name: [of_cell.get(name) for of_cell in goodput.values()] for name in policies}
    means = {name: float(np.mean([value for value in found if value is not None])) for name, found in values.items()}
    best_first = sorted(policies, key=lambda name: -means[name])
    header = ("policy", *goodput, "mean")
    text = [header, *((name, *map(cell_text, [*values[name], means[name]])) for name in best_first)]
    if markdown:
        return [f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *text[1:])]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    return [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in text
    ]


def cell_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def cell_line(cell: WorkloadScores) -> str:
    """The cell's rate, and rutter against its best baseline."""
    text = f"{cell.workload} at {cell.requests_per_s:g} requests/s"
    if cell.learned is None or cell.learned.difference is None:
        return f"{text}: best is {cell.scores[0].policy}, {cell.scores[0].goodput:.3f}"
    difference = cell.learned.difference
    seeds = f"{difference.n_seeds} seed{'s' if difference.n_seeds > 1 else ''}"
    return f"{text}: {RUTTER} is {difference.verdict} {difference.against}, {difference}, paired over {seeds}"


def total_line(cells: Sequence[WorkloadScores]) -> str | None:
    """Rutter over all cells; None where it or every baseline is missing."""
    found = [cell.learned.difference for cell in cells if cell.learned is not None and cell.learned.difference]
    if not found:
        return None
    verdicts = [difference.verdict for difference in found]
    better, worse = verdicts.count("better than"), verdicts.count("worse than")
    mean = float(np.mean([difference.mean for difference in found]))
    least = min(difference.mean for difference in found)
    return (
        f"{RUTTER} against the best baseline of each of {len(found)} cells: mean {mean:+.3f}, least {least:+.3f}; "
        f"better in {better}, worse in {worse}, not to be told apart in {len(found) - better - worse}"
    )
