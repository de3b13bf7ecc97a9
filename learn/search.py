"""Search: points asked of a sampler, evaluated in threads, stored in order.

Every process asks an in-memory copy of the stored study and evaluates in threads (the compiled simulator runs
without the interpreter's lock). With one job and one process the result follows from the seed alone, also across
kills: the sampler is seeded anew for every batch from the seed and the number of trials before it. Processes that
share a study would so propose the same points; one that sees others store trials draws seeds of its own from then on.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from joblib import Parallel, delayed
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from learn.study import Best, StoredStudy, best_of, count_complete, failure, first_line
from serve_table.errors import SearchError

Space = Mapping[str, BaseDistribution]
Params = Mapping[str, Any]
Objective = Callable[[Params], float]

SAMPLER = "TPE, multivariate"
STARTUP_TRIALS = 24
MIN_FAILED = 20
MAX_FAILED_RATIO = 4
"""With more failures since its start than MIN_FAILED, and than so many for each complete trial, a search gives up."""


def search(
    stored: StoredStudy,
    space: Space,
    objective: Objective,
    n_trials: int,
    *,
    seed: int,
    jobs: int = 1,
    warm_start: Sequence[Params] = (),
    on_trial: Callable[[int, float], None] | None = None,
) -> Best:
    """Run until the study has n_trials complete trials; returns its best.

    objective: higher is better; NaN, infinity or an exception fails the trial. warm_start: parameters tried first.
    on_trial: told the number of complete trials and the best value after each. Raises SearchError where too much
    fails, and where the study holds trials of another space.
    """
    asking = _Asking(dict(space), seed, warm_start)
    before = len(stored.trials())
    while True:
        trials = stored.trials()
        asking.learn(trials)
        complete = count_complete(trials)
        if complete >= n_trials:
            return best_of(trials, n_trials)
        require_some_complete(trials[before:])
        points = asking.ask(min(max(jobs, 1), n_trials - complete))
        values = Parallel(n_jobs=jobs, prefer="threads")(delayed(_evaluate)(objective, point) for point in points)
        for point, (value, reason) in zip(points, values, strict=True):
            if not stored.add(_finished(space, point, value, reason), n_trials, asking.known):
                continue
            asking.stored += 1
            if value is not None and on_trial is not None:
                trials = stored.trials()
                on_trial(count_complete(trials), best_of(trials).value)


def require_some_complete(trials: Sequence[FrozenTrial]) -> None:
    """SearchError where so many of these trials failed that more would be in vain."""
    complete = count_complete(trials)
    failed = len(trials) - complete
    if failed > max(MIN_FAILED, MAX_FAILED_RATIO * complete):
        raise SearchError(f"{failed} of {len(trials)} trials failed, the last: {failure(trials)}")


class _Asking:
    """Which points to try next. known: trials learnt of; stored: own ones stored since."""

    def __init__(self, space: dict[str, BaseDistribution], seed: int, warm_start: Sequence[Params]) -> None:
        self.known = 0
        self.stored = 0
        self._space = space
        self._seed = seed
        self._start = [dict(point) for point in warm_start]
        self._memory = optuna.create_study(direction="maximize")
        self._salt: int | None = None
        self._begun = False

    def learn(self, trials: Sequence[FrozenTrial]) -> None:
        """Take in the trials stored since the last time; those before are the same."""
        new = trials[self.known :]
        if any(trial.distributions != self._space for trial in new):
            raise SearchError(
                "the stored study holds trials of another search space: use another run or storage, or remove it"
            )
        if self._begun and len(new) > self.stored and self._salt is None:
            self._salt = secrets.randbits(32)
        self._memory.add_trials(new)
        tried = [trial.params for trial in new]
        self._start = [point for point in self._start if point not in tried]
        self.known, self.stored, self._begun = len(trials), 0, True

    def ask(self, n_points: int) -> list[Params]:
        """Warm starts in their order, then the sampler's points."""
        first = 0 if self._salt is None else self._salt % max(len(self._start), 1)
        start = [*self._start[first:], *self._start[:first]]
        points: list[Params] = list(start[:n_points])
        if len(points) < n_points:
            # constant_liar keeps the points of one batch apart.
            self._memory.sampler = TPESampler(
                seed=self._sampler_seed(),
                multivariate=True,
                n_startup_trials=STARTUP_TRIALS,
                constant_liar=n_points > 1,
            )
            asked = [self._memory.ask(self._space) for _ in range(n_points - len(points))]
            points.extend(trial.params for trial in asked)
            for trial in asked:
                # The copy keeps none of its own: finished trials come back from the store.
                self._memory.tell(trial, state=TrialState.FAIL)
        return points

    def _sampler_seed(self) -> int:
        entropy = [self._seed, self.known] if self._salt is None else [self._seed, self.known, self._salt]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def _evaluate(objective: Objective, point: Params) -> tuple[float | None, str]:
    try:
        value = float(objective(point))
    except Exception as error:  # noqa: BLE001 - a trial that fails must not end the study
        return None, first_line(error)
    return (value, "") if math.isfinite(value) else (None, f"the objective is {value}")


def _finished(space: Space, point: Params, value: float | None, reason: str) -> FrozenTrial:
    if value is None:
        return create_trial(
            state=TrialState.FAIL, params=dict(point), distributions=dict(space), user_attrs={"reason": reason}
        )
    return create_trial(params=dict(point), distributions=dict(space), value=value)
