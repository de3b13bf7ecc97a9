"""One trial of a search: its point evaluated in stages, stopped early where it is hopeless, and what is stored of it.

Stages are cheap evidence first, a few traces before all of them. A point goes on from a stage while its value is among
the better half of all that earlier trials had there: successive halving that waits for no other trial (ASHA, Li et al.
2020, arXiv 1810.05934, in its stopping form). Values of one stage are of the same traces, so they compare.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from learn.study import first_line

Space = Mapping[str, BaseDistribution]
Params = Mapping[str, Any]

MIN_SEEN = 12
"""A stage stops none before so many trials have a value there."""
KEPT_SHARE = 0.5
"""Of the trials at a stage, those that go on."""


class Rating(NamedTuple):
    """A point's value, the higher the better, and what else is to be kept of it."""

    value: float
    figures: Mapping[str, float] = {}


Rated = float | Rating
Objective = Callable[[Params], Rated | Iterator[Rated]]
"""A point's value; or its estimates in stages of growing evidence, of which the last is the value."""


@dataclass(frozen=True)
class Outcome:
    """What became of a point. value: None where it failed, for `reason`; the last estimate where it was pruned.

    stages: the estimate after each stage but the final one, by number from 1.
    """

    value: float | None
    reason: str = ""
    pruned: bool = False
    stages: Mapping[int, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)


def least_values(trials: Sequence[FrozenTrial]) -> dict[int, float]:
    """By stage: what a point's value must reach there for it to go on."""
    seen: dict[int, list[float]] = {}
    for trial in trials:
        for stage, value in trial.intermediate_values.items():
            seen.setdefault(stage, []).append(value)
    return {
        stage: float(np.quantile(values, 1.0 - KEPT_SHARE)) for stage, values in seen.items() if len(values) >= MIN_SEEN
    }


def evaluate(objective: Objective, point: Params, least: Mapping[int, float]) -> Outcome:
    """Evaluate a point until it ends or is hopeless; a value that is not finite and an exception fail it."""
    stages: dict[int, float] = {}
    rating = Rating(math.nan)
    try:
        found = objective(point)
        ratings = found if isinstance(found, Iterator) else iter((found,))
        for stage, rated in enumerate(ratings, 1):
            rating = rated if isinstance(rated, Rating) else Rating(float(rated))
            stages[stage] = float(rating.value)
            if not math.isfinite(rating.value):
                break
            if rating.value < least.get(stage, -math.inf):
                return Outcome(float(rating.value), pruned=True, stages=stages, figures=rating.figures)
    except Exception as error:  # noqa: BLE001 - a trial that fails must not end the study
        return Outcome(None, first_line(error))
    if not math.isfinite(rating.value):
        return Outcome(None, f"the objective is {rating.value}")
    # The final value is no estimate, and no reason to stop anything.
    stages.popitem()
    return Outcome(float(rating.value), stages=stages, figures=rating.figures)


def stored_trial(space: Space, point: Params, outcome: Outcome, took_s: float) -> FrozenTrial:
    """The finished trial as a study keeps it; its duration is the time that it took."""
    given: dict[str, Any] = {"params": dict(point), "distributions": dict(space)}
    if outcome.value is None:
        trial = create_trial(state=TrialState.FAIL, user_attrs={"reason": outcome.reason}, **given)
    else:
        trial = create_trial(
            state=TrialState.PRUNED if outcome.pruned else TrialState.COMPLETE,
            value=outcome.value,
            intermediate_values=dict(outcome.stages),
            user_attrs=dict(outcome.figures),
            **given,
        )
    if trial.datetime_complete is not None:
        trial.datetime_start = trial.datetime_complete - timedelta(seconds=took_s)
    return trial
