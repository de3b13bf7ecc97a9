"""A comparison for people: each policy's scores, and the paired differences to the best baseline."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learn.contenders import JOINT
from learn.evaluate import interval
from pipelines.results import ResultRow
from pipelines.text_table import aligned
from serve_table.policy import LEARNED_POLICIES

DEFAULT_LEARNED = "table"
LEARNED = (*JOINT.values(), *(name for name in LEARNED_POLICIES if name not in JOINT.values()))
"""Policies that are no baselines, the first ones first to be held against them."""
TIMES = (("P90 TTFT", "ttft_p90_s"), ("P99 TTFT", "ttft_p99_s"), ("P90 TPOT", "tpot_p90_s"))


@dataclass(frozen=True)
class Difference:
    """Goodput minus another policy's, paired by arrival seed. low, high: 95 % t interval, None from one seed alone."""

    against: str
    mean: float
    low: float | None
    high: float | None
    n_seeds: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+.3f}"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    @property
    def verdict(self) -> str:
        if self.low is None or self.high is None:
            return "not to be told from"
        return "better than" if self.low > 0 else "worse than" if self.high < 0 else "level with"


@dataclass(frozen=True)
class PolicyScore:
    """A policy on one workload over the runs that count. spread: standard deviation between seeds, None from one.

    times_s: means of the runs' percentiles in the order of TIMES, None where no run has that time.
    """

    policy: str
    goodput: float
    spread: float | None
    times_s: tuple[float | None, ...]
    seeds: tuple[int, ...]
    failed: int
    difference: Difference | None


@dataclass(frozen=True)
class WorkloadScores:
    """One workload, best policy first. learned_policy: what is held against the best of the others; learned: its score,
    None where it did not run. spoilt: runs that do not count.
    """

    workload: str
    requests_per_s: float
    requests: int
    scores: tuple[PolicyScore, ...]
    best_baseline: str | None
    spoilt: tuple[ResultRow, ...]
    learned_policy: str

    @property
    def learned(self) -> PolicyScore | None:
        return next((score for score in self.scores if score.policy == self.learned_policy), None)


def scores_of(rows: Sequence[ResultRow]) -> WorkloadScores:
    """Scores of the rows of one workload on one cluster, at one rate.

    Of the learned policies the first of LEARNED is held against the best of all others.
    """
    counted: dict[str, dict[int, ResultRow]] = {}
    for row in rows:
        if row.counted:
            counted.setdefault(row.policy, {})[row.seed] = row
    goodput = {name: float(np.mean([row.goodput for row in runs.values()])) for name, runs in counted.items()}
    learned = next((name for name in LEARNED if name in counted), DEFAULT_LEARNED)
    baselines = [name for name in counted if name not in LEARNED]
    best = max(baselines, key=lambda name: goodput[name]) if baselines else None
    scores = [
        _score(name, runs, None if best is None or name == best else paired(runs, counted[best], best))
        for name, runs in counted.items()
    ]
    first = rows[0]
    return WorkloadScores(
        workload=first.workload,
        requests_per_s=first.requests_per_s,
        requests=first.requests,
        scores=tuple(sorted(scores, key=lambda score: -score.goodput)),
        best_baseline=best,
        spoilt=tuple(row for row in rows if not row.counted),
        learned_policy=learned,
    )


def paired(runs: dict[int, ResultRow], others: dict[int, ResultRow], against: str) -> Difference | None:
    """Of the seeds that count for both; None where there is none."""
    seeds = sorted(runs.keys() & others.keys())
    if not seeds:
        return None
    values = np.array([runs[seed].goodput - others[seed].goodput for seed in seeds])
    # One request more or less is the least difference that a run can show.
    resolution = 1.0 / next(iter(runs.values())).requests
    low, high = interval(values, resolution=resolution) if len(seeds) > 1 else (None, None)
    return Difference(against, float(values.mean()), low, high, len(seeds))


def _score(name: str, runs: dict[int, ResultRow], difference: Difference | None) -> PolicyScore:
    goodput = np.array([row.goodput for row in runs.values()])
    times: list[float | None] = []
    for _, column in TIMES:
        found = [value for row in runs.values() if (value := getattr(row, column)) is not None]
        times.append(float(np.mean(found)) if found else None)
    return PolicyScore(
        policy=name,
        goodput=float(goodput.mean()),
        spread=float(goodput.std(ddof=1)) if len(goodput) > 1 else None,
        times_s=tuple(times),
        seeds=tuple(sorted(runs)),
        failed=sum(row.failed for row in runs.values()),
        difference=difference,
    )


HEADER = ("policy", "goodput", "spread", *(title for title, _ in TIMES), "to the best baseline", "failed", "seeds")


def cells(score: PolicyScore, found: WorkloadScores) -> tuple[str, ...]:
    """A score's cells in the order of HEADER."""
    if score.policy == found.best_baseline:
        difference = "the best baseline"
    else:
        difference = "-" if score.difference is None else str(score.difference)
    return (
        score.policy,
        f"{score.goodput:.3f}",
        "-" if score.spread is None else f"{score.spread:.3f}",
        *(milliseconds(value) for value in score.times_s),
        difference,
        str(score.failed),
        str(len(score.seeds)),
    )


def text_lines(found: WorkloadScores) -> list[str]:
    """One workload's table and verdict in plain text."""
    table = [HEADER, *(cells(score, found) for score in found.scores)]
    return ["", title(found), *aligned(table), *verdict_lines(found)]


def markdown_lines(found: WorkloadScores) -> list[str]:
    """The same as a Markdown table."""
    lines = ["", f"{title(found)}:", "", f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    for score in found.scores:
        row = list(cells(score, found))
        if score.policy == found.learned_policy:
            row[0], row[1] = f"**{row[0]}**", f"**{row[1]}**"
        lines.append(f"| {' | '.join(row)} |")
    verdicts = verdict_lines(found)
    return [*lines, "", *verdicts] if verdicts else lines


def title(found: WorkloadScores) -> str:
    return f"{found.workload} at {found.requests_per_s:g} requests/s, {found.requests} requests a run"


def verdict_lines(found: WorkloadScores) -> list[str]:
    """How the table did against the best baseline, and what does not count."""
    lines = []
    learned = found.learned
    if learned is not None and learned.difference is not None:
        difference = learned.difference
        lines.append(
            f"Policy {found.learned_policy} is {difference.verdict} the best baseline, {difference.against}: goodput "
            f"{difference}, paired over {difference.n_seeds} seed{'s' if difference.n_seeds > 1 else ''}."
        )
    if len({score.seeds for score in found.scores}) > 1:
        lines.append(
            "Not all policies have the same seeds: their means are of different arrivals, differences are not."
        )
    for row in found.spoilt:
        why = "the engines were late" if row.kept_pace is False else "the load was late"
        why = why if not (row.kept_schedule and row.kept_pace is not False) else "its gates are not on record"
        lines.append(f"{row.policy}, seed {row.seed}, does not count: {why}.")
    return lines


def milliseconds(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:,.1f} ms"
