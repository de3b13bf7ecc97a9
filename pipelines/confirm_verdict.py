"""The verdict of a live confirmation: which learned policy beats what is there already, beyond the interval."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from learn.evaluate import Measured, interval, mean_percentile
from learn.objective import OBJECTIVES

Runs = Sequence[Measured | None]
"""One a seed; None where the run does not count."""


class Gain(msgspec.Struct, frozen=True):
    """A learned policy against its opponent: mean over the seeds that count for both, 95 % interval.

    gain: difference in goodput, else the objective's gain. low, high: equal to it where fewer than two seeds count.
    """

    name: str
    opponent: str
    seeds: int
    gain: float
    low: float
    high: float

    @property
    def confirmed(self) -> bool:
        return self.seeds >= 2 and self.low > 0.0


class Verdict(msgspec.Struct, frozen=True):
    """objective: what gains are measured in. chosen: of the confirmed policies the best; None: keep what you have."""

    objective: str
    opponent: str
    gains: tuple[Gain, ...]
    chosen: str | None


def verdict_of(
    runs: Mapping[str, Runs], learned: Sequence[str], opponents: Sequence[str], objective: str, n_requests: int
) -> Verdict:
    """Hold the learned policies against the best of the opponents.

    runs: by policy, in the order of the seeds. opponents: what could serve without them, the exported artifact or a
    baseline. n_requests: of each run.
    """
    first, *others = opponents
    opponent = first
    for other in others:
        if gain_of(other, opponent, runs, objective, n_requests).gain > 0.0:
            opponent = other
    gains = tuple(gain_of(name, opponent, runs, objective, n_requests) for name in learned)
    confirmed = [gain for gain in gains if gain.confirmed]
    chosen = max(confirmed, key=lambda gain: gain.gain).name if confirmed else None
    return Verdict(objective, opponent, gains, chosen)


def gain_of(name: str, opponent: str, runs: Mapping[str, Runs], objective: str, n_requests: int) -> Gain:
    """Paired by seed; 0 where no seed counts for both."""
    pairs = zip(runs[name], runs[opponent], strict=True)
    paired = np.array([gain(own, other, objective) for own, other in pairs if own is not None and other is not None])
    if len(paired) == 0:
        return Gain(name, opponent, 0, 0.0, 0.0, 0.0)
    low, high = interval(paired, resolution=1.0 / n_requests)
    return Gain(name, opponent, len(paired), float(paired.mean()), low, high)


def gain(own: Measured, other: Measured, objective: str) -> float:
    """Of two runs on the same requests."""
    if objective == "goodput":
        return own.goodput - other.goodput
    return OBJECTIVES[objective]([own], [other])


def run_lines(runs: Mapping[str, Runs]) -> list[str]:
    """Every policy's means over the seeds that count for it."""
    width = max(len(name) for name in runs) + 2
    return [f"  {name:<{width}}{figures([run for run in found if run is not None])}" for name, found in runs.items()]


def figures(runs: Sequence[Measured]) -> str:
    if not runs:
        return "no run counts"
    goodput = float(np.mean([run.goodput for run in runs]))
    times = {
        "P90 TTFT": mean_percentile(runs, "ttft_s", 90),
        "P99 TTFT": mean_percentile(runs, "ttft_s", 99),
        "P90 TPOT": mean_percentile(runs, "tpot_s", 90),
    }
    parts = [f"{what} {value * 1e3:.1f} ms" for what, value in times.items() if value is not None]
    return f"{', '.join([f'goodput {goodput:.3f}', *parts])}; {len(runs)} seeds"


def verdict_lines(verdict: Verdict) -> list[str]:
    """Each gain, and what follows of them."""
    what = "goodput" if verdict.objective == "goodput" else f"{verdict.objective} gain"
    lines = [
        f"{gain.name} against {gain.opponent}: {what} {gain.gain:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}], paired"
        f" over {gain.seeds} seeds"
        for gain in verdict.gains
    ]
    if not any(gain.seeds >= 2 for gain in verdict.gains):
        why = "too few runs count to confirm anything" if verdict.gains else "there is nothing new to confirm"
        return [*lines, f"keep what you have: {why}"]
    if verdict.chosen is None:
        return [*lines, f"keep what you have: nothing is better than {verdict.opponent} beyond the interval"]
    return [*lines, f"confirmed: {verdict.chosen}"]
