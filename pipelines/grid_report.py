"""A simulated comparison for people: goodput by policy and workload, and paired differences to the best baseline."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.comparison_report import TIMES, Difference, WorkloadScores, paired, scores_of
from pipelines.results import ResultRow
from pipelines.text_table import aligned

DYNAMO = "dynamo_style"
LEVEL = -0.005
"""A difference in goodput down to which a policy is no worse than another."""

Cells = dict[tuple[str, str], list[ResultRow]]


@dataclass(frozen=True)
class AgainstDynamo:
    """A learned policy against tuned Dynamo-style in a cell. ratios: of mean percentiles, by their title in TIMES."""

    goodput: Difference
    ratios: dict[str, float]

    def __str__(self) -> str:
        times = ", ".join(f"{title} {ratio:.2f} times" for title, ratio in self.ratios.items())
        return f"{self.goodput} over {DYNAMO}, {times}"


def cells_of(rows: Sequence[ResultRow]) -> list[tuple[WorkloadScores, AgainstDynamo | None]]:
    """The scores of every cell, in the order of the rows."""
    cells: Cells = {}
    for row in rows:
        cells.setdefault((topology_of(row), row.workload), []).append(row)
    return [(scores := scores_of(found), against_dynamo(scores, found)) for found in cells.values()]


def against_dynamo(cell: WorkloadScores, rows: Sequence[ResultRow]) -> AgainstDynamo | None:
    """None where one of the two is missing."""
    runs = {
        name: {row.seed: row for row in rows if row.policy == name and row.counted}
        for name in (cell.learned_policy, DYNAMO)
    }
    difference = paired(runs[cell.learned_policy], runs[DYNAMO], DYNAMO)
    times = {score.policy: score.times_s for score in cell.scores}
    if difference is None:
        return None
    pairs = zip(TIMES, times[cell.learned_policy], times[DYNAMO], strict=True)
    return AgainstDynamo(difference, {title: own / other for (title, _), own, other in pairs if own and other})


def topology_of(row: ResultRow) -> str:
    return f"{row.prefill_engines}P+{row.decode_engines}D"


def report_lines(rows: Sequence[ResultRow], markdown: bool = False) -> list[str]:
    """For each topology a table of mean goodput and how the learned policy did in each cell; in the end over all."""
    lines: list[str] = []
    for topology in dict.fromkeys(topology_of(row) for row in rows):
        found = cells_of([row for row in rows if topology_of(row) == topology])
        lines += [
            "",
            f"{topology}, mean goodput:",
            *([""] if markdown else []),
            *table_lines([cell for cell, _ in found], markdown),
            "",
        ]
        lines += [f"{'- ' if markdown else ''}{cell_line(*cell)}" for cell in found]
    total = total_lines(cells_of(rows))
    return [*lines, "", *total] if total else lines


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
    return aligned(text)


def cell_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def cell_line(cell: WorkloadScores, dynamo: AgainstDynamo | None) -> str:
    """The cell's rate, and the learned policy against its best baseline and against tuned Dynamo-style."""
    text = f"{cell.workload} at {cell.requests_per_s:g} requests/s"
    if cell.learned is None or cell.learned.difference is None:
        return f"{text}: best is {cell.scores[0].policy}, {cell.scores[0].goodput:.3f}"
    difference = cell.learned.difference
    seeds = f"{difference.n_seeds} seed{'s' if difference.n_seeds > 1 else ''}"
    learned = f"{cell.learned_policy} is {difference.verdict} {difference.against}, {difference}, paired over {seeds}"
    return f"{text}: {learned}{'' if dynamo is None else f'; {dynamo}'}"


def total_lines(found: Sequence[tuple[WorkloadScores, AgainstDynamo | None]]) -> list[str]:
    """The learned policy over all cells; none where it or every baseline is missing."""
    cells = [(cell, cell.learned.difference) for cell, _ in found if cell.learned and cell.learned.difference]
    if not cells:
        return []
    learned = cells[0][0].learned_policy
    verdicts = [difference.verdict for _, difference in cells]
    better, worse = verdicts.count("better than"), verdicts.count("worse than")
    means = [difference.mean for _, difference in cells]
    level = sum(mean >= LEVEL for mean in means)
    lines = [
        f"{learned} against the best baseline of each of {len(cells)} cells: mean {np.mean(means):+.3f}, least "
        f"{min(means):+.3f}, at least {LEVEL:+.3f} in {level}; better in {better}, worse in {worse}, not to be told "
        f"apart in {len(cells) - better - worse}"
    ]
    against = [dynamo for _, dynamo in found if dynamo is not None]
    if against:
        ratios = {title: [dynamo.ratios[title] for dynamo in against if title in dynamo.ratios] for title, _ in TIMES}
        times = ", ".join(
            f"{title} {np.mean(values):.2f} times (largest {max(values):.2f})"
            for title, values in ratios.items()
            if values
        )
        goodput = [dynamo.goodput.mean for dynamo in against]
        lines.append(
            f"{learned} against tuned {DYNAMO} in {len(against)} cells: goodput {np.mean(goodput):+.3f}, least "
            f"{min(goodput):+.3f}; {times}"
        )
    return lines
