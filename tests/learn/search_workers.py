"""A small search, and what the processes of its tests run."""

import math
import multiprocessing as mp
import time
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Barrier, Event
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial

from learn.search import search
from learn.study import StoredStudy, count_complete

SPACE: Mapping[str, BaseDistribution] = {
    "x": FloatDistribution(-1.0, 1.0),
    "y": IntDistribution(0, 9),
    "kind": CategoricalDistribution(("a", "b")),
}
NAME = "search"
START_TIMEOUT_S = 60.0


def objective(point: Mapping[str, Any]) -> float:
    """Best at x = 0.5, y = 3, kind b."""
    return -((point["x"] - 0.5) ** 2) - 0.01 * (point["y"] - 3) ** 2 + 0.1 * (point["kind"] == "b")


def searched(place: str | None, n_trials: int, *, seed: int = 7, jobs: int = 1, pause_s: float = 0.0) -> StoredStudy:
    """The study after a search; each trial takes pause_s and more."""

    def paused(point: Mapping[str, Any]) -> float:
        time.sleep(pause_s)
        return objective(point)

    stored = StoredStudy(place, NAME)
    search(stored, SPACE, paused, n_trials, seed=seed, jobs=jobs, warm_start=[{"x": 0.0, "y": 0, "kind": "a"}])
    return stored


def contents(trials: list[FrozenTrial]) -> list[tuple[dict[str, Any], float | None]]:
    """What makes two searches the same."""
    return [(trial.params, trial.value) for trial in trials]


def processes() -> ForkServerContext:
    """Processes that start at once, because a server has imported what they need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def work(place: str, n_trials: int, together: Barrier) -> None:
    """One of many searches on one study."""
    together.wait(START_TIMEOUT_S)
    stored = searched(place, n_trials, pause_s=0.002)
    if count_complete(stored.trials()) < n_trials:
        raise SystemExit(3)


def read(place: str, ended: Event) -> None:
    """A dashboard's part: read the study again and again, which must never fail."""
    stored = StoredStudy(place, NAME)
    while not ended.is_set():
        for trial in stored.trials():
            if trial.value is None or not math.isfinite(trial.value):
                raise SystemExit(4)
        time.sleep(0.01)


def search_alone(place: str, n_trials: int, pause_s: float) -> None:
    """A search that a test kills."""
    searched(place, n_trials, pause_s=pause_s)
