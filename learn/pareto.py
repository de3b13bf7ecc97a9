"""The points of a search that no other one beats in every respect: goodput, latency profile and tail."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState


@dataclass(frozen=True)
class FrontPoint:
    """A point of the price. value: of the search's objective; goodput: mean over the training traces. latency_gain and
    the ratios of percentiles: against tuned Dynamo-style routing.
    """

    params: Mapping[str, float]
    value: float
    goodput: float
    latency_gain: float
    ttft_p90_ratio: float
    ttft_p99_ratio: float
    tpot_p90_ratio: float

    @property
    def worths(self) -> tuple[float, float, float]:
        """Goodput, latency profile and tail, the higher the better."""
        return self.goodput, self.latency_gain, -self.ttft_p99_ratio


def front_of(trials: Sequence[FrozenTrial], n_trials: int | None = None) -> list[FrontPoint]:
    """The undominated points among the first n_trials, the highest goodput first.

    Of complete trials alone: pruned ones were judged on fewer traces. Equal points are one.
    """
    points = [_point(trial) for trial in trials[:n_trials] if trial.state == TrialState.COMPLETE]
    front: list[FrontPoint] = []
    for point in points:
        if any(all(a >= b for a, b in zip(other.worths, point.worths, strict=True)) for other in front):
            continue
        front = [other for other in front if any(a > b for a, b in zip(other.worths, point.worths, strict=True))]
        front.append(point)
    return sorted(front, key=lambda point: point.worths, reverse=True)


def _point(trial: FrozenTrial) -> FrontPoint:
    figures: dict[str, Any] = trial.user_attrs
    names = ("goodput", "latency_gain", "ttft_p90_ratio", "ttft_p99_ratio", "tpot_p90_ratio")
    return FrontPoint(dict(trial.params), float(trial.value or 0.0), *(float(figures[name]) for name in names))
