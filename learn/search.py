"""Search: points asked of a sampler, evaluated in threads, stored in order.

Every process asks an in-memory copy of the stored study and evaluates in threads (the compiled simulator runs
without the interpreter's lock). With one job and one process the result follows from the seed alone, also across
kills: the sampler is seeded anew for every batch from the seed and the number of trials before it. Processes that
share a study would so propose the same points; one that sees others store trials draws seeds of its own from then on.
"""

import math
import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np
import optuna
from joblib import Parallel, delayed
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState

from learn.study import Best, StoredStudy, best_of, count_complete, count_failed, count_tried, failure, spent_s
from learn.trials import Objective, Params, Space, evaluate, least_values, stored_trial
from serve_table.errors import SearchError

SAMPLER = "TPE, multivariate"
STARTUP_TRIALS = 24
MIN_FAILED = 20
MAX_FAILED_RATIO = 4
"""With more failures since its start than MIN_FAILED, and than so many for each trial that did not, it gives up."""


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
    limit_s: float = math.inf,
) -> Best:
    """Run until n_trials of the study's trials are complete or pruned, or its time is spent; returns its best.

    objective: higher is better; NaN, infinity or an exception fails the trial. One that gives its value in stages is
    stopped where a point is hopeless (`learn.trials`). warm_start: parameters tried first. on_trial: told the number of
    trials and the best value after each. limit_s: of the time of all trials, which the study keeps: a resumed search
    goes on with what is left, and several processes spend it together. With a limit the result depends on the machine.
    Raises SearchError where too much fails, and where the study holds trials of another space.
    """
    asking = _Asking(dict(space), seed, warm_start)
    before = len(stored.trials())
    while True:
        trials = stored.trials()
        asking.learn(trials)
        tried = count_tried(trials)
        if tried >= n_trials or (spent_s(trials) >= limit_s and count_complete(trials) > 0):
            return best_of(trials, n_trials)
        require_some_tried(trials[before:])
        begun_s = time.monotonic()
        points = asking.ask(min(max(jobs, 1), n_trials - tried))
        least = least_values(trials)
        outcomes = Parallel(n_jobs=jobs, prefer="threads")(
            delayed(evaluate)(objective, point, least) for point in points
        )
        took_s = (time.monotonic() - begun_s) / len(points)
        for point, outcome in zip(points, outcomes, strict=True):
            if not stored.add(stored_trial(space, point, outcome, took_s), n_trials, asking.known):
                continue
            asking.stored += 1
            if outcome.value is not None and on_trial is not None:
                trials = stored.trials()
                on_trial(count_tried(trials), best_of(trials).value)


def require_some_tried(trials: Sequence[FrozenTrial]) -> None:
    """SearchError where so many of these trials failed that more would be in vain."""
    failed = count_failed(trials)
    if failed > max(MIN_FAILED, MAX_FAILED_RATIO * count_tried(trials)):
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
