"""Trials in stages: which points are stopped early, what is kept of them, and that a search with them repeats."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial
from search_workers import NAME, SPACE, objective

from learn.search import search
from learn.study import StoredStudy, count_complete, count_tried, spent_s
from learn.trials import MIN_SEEN, Outcome, Rating, evaluate, least_values, stored_trial
from serve_table.errors import SearchError

N_TRIALS = 60


class Staged:
    """The search's objective in three stages, the first two off by less and less; counts the stages paid for."""

    def __init__(self, dies_in: int | None = None) -> None:
        self.paid = 0
        self.dies_in = dies_in

    def __call__(self, point: Mapping[str, Any]) -> Iterator[Rating]:
        for error in (0.02, 0.01, 0.0):
            if self.paid == self.dies_in:
                raise KeyboardInterrupt
            self.paid += 1
            value = objective(point) + error * math.sin(50.0 * point["x"])
            yield Rating(value, {"goodput": value} if error == 0.0 else {})


def run_search(stored: StoredStudy, staged: Staged, *, jobs: int = 1, n_trials: int = N_TRIALS) -> None:
    search(stored, SPACE, staged, n_trials, seed=7, jobs=jobs)


def contents(stored: StoredStudy) -> list[tuple[Any, ...]]:
    return [
        (trial.params, trial.value, trial.state, trial.intermediate_values, trial.user_attrs)
        for trial in stored.trials()
    ]


def of_values(*values: float) -> list[FrozenTrial]:
    """Complete trials with these values at stage 1."""
    return [create_trial(value=value, intermediate_values={1: value}) for value in values]


def test_a_point_goes_on_among_the_better_half_once_enough_were_seen() -> None:
    few = of_values(*range(MIN_SEEN - 1))
    assert least_values(few) == {}
    assert least_values([*few, *of_values(MIN_SEEN - 1)]) == {1: (MIN_SEEN - 1) / 2}
    staged = [0.5, 0.4, 0.3]
    least = {1: 0.45, 2: 0.45}
    assert evaluate(lambda _: iter(staged), {}, {}) == Outcome(0.3, stages={1: 0.5, 2: 0.4})
    assert evaluate(lambda _: iter(staged), {}, least) == Outcome(0.4, pruned=True, stages={1: 0.5, 2: 0.4})
    # A value that is no estimate stops nothing.
    assert evaluate(lambda _: 0.1, {}, least | {1: 0.0}) == Outcome(0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_stage_that_is_no_number_fails_the_trial(bad: float) -> None:
    outcome = evaluate(lambda _: iter([0.5, bad, 0.5]), {}, {})
    assert (outcome.value, outcome.reason) == (None, f"the objective is {bad}")


def test_an_objective_that_breaks_in_a_later_stage_or_has_none_fails_the_trial() -> None:
    def broken(_: Mapping[str, Any]) -> Iterator[float]:
        yield 0.5
        raise ZeroDivisionError("of a kind")

    assert evaluate(broken, {}, {}) == Outcome(None, "ZeroDivisionError: of a kind")
    assert evaluate(lambda _: iter(()), {}, {}).value is None


def test_hopeless_points_are_stopped_kept_and_counted_and_the_best_is_none_of_them() -> None:
    stored, staged = StoredStudy(None, NAME), Staged()
    told: list[int] = []
    best = search(stored, SPACE, staged, N_TRIALS, seed=7, on_trial=lambda tried, _: told.append(tried), warm_start=[])
    trials = stored.trials()
    pruned = [trial for trial in trials if trial.state == TrialState.PRUNED]
    assert len(pruned) > N_TRIALS / 6
    assert (best.pruned, best.complete, best.tried) == (len(pruned), N_TRIALS - len(pruned), N_TRIALS)
    assert told == list(range(1, N_TRIALS + 1))
    assert staged.paid == sum(len(trial.intermediate_values) for trial in trials) + best.complete
    assert all(trial.intermediate_values.keys() <= {1, 2} for trial in trials)
    assert best.value == max(trial.value or -math.inf for trial in trials if trial.state == TrialState.COMPLETE)
    assert best.figures == {"goodput": best.value}
    assert not any(trial.user_attrs for trial in pruned)


def test_a_search_with_stops_still_finds_the_best_and_pays_for_fewer_stages() -> None:
    stored, staged = StoredStudy(None, NAME), Staged()
    best = search(stored, SPACE, staged, 100, seed=7)
    assert best.value > 0.095
    assert staged.paid < 0.85 * 3 * 100


@pytest.mark.parametrize("after", [10, 60, 100])
def test_f35_killed_and_resumed_stops_the_same_points(tmp_path: Path, after: int) -> None:
    place = tmp_path / "study.log"
    with pytest.raises(KeyboardInterrupt):
        run_search(StoredStudy(place, NAME), Staged(dies_in=after))
    resumed, whole = StoredStudy(place, NAME), StoredStudy(None, NAME)
    assert 0 < len(resumed.trials()) < N_TRIALS
    run_search(resumed, Staged())
    run_search(whole, Staged())
    assert contents(resumed) == contents(whole)


def test_several_jobs_end_with_exactly_the_budget() -> None:
    stored = StoredStudy(None, NAME)
    run_search(stored, Staged(), jobs=4)
    assert count_tried(stored.trials()) == len(stored.trials()) == N_TRIALS


def test_a_database_keeps_stops_and_durations(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    run_search(StoredStudy(url, NAME), Staged(), n_trials=30)
    again, memory = StoredStudy(url, NAME), StoredStudy(None, NAME)
    run_search(memory, Staged(), n_trials=30)
    assert contents(again) == contents(memory)
    assert spent_s(again.trials()) > 0.0


def test_time_that_is_spent_ends_a_search_and_is_kept_for_the_next_call() -> None:
    stored = StoredStudy(None, NAME)
    # However little it is, there is a result.
    assert search(stored, SPACE, objective, 10, seed=1, limit_s=0.0).complete == 1
    assert search(stored, SPACE, objective, 10, seed=1, limit_s=0.0).complete == 1
    stored.add(stored_trial(SPACE, {"x": 0.5, "y": 3, "kind": "b"}, Outcome(0.1), took_s=90.0), 10, 1)
    assert spent_s(stored.trials()) == pytest.approx(90.0, abs=5.0)
    assert search(stored, SPACE, objective, 10, seed=1, limit_s=80.0).complete == 2
    assert search(stored, SPACE, objective, 5, seed=1, limit_s=1000.0).complete == 5


def test_points_that_were_stopped_are_no_failures() -> None:
    def sometimes(point: Mapping[str, Any]) -> Iterator[float]:
        yield objective(point)
        yield math.nan if point["y"] > 7 else objective(point)

    stored = StoredStudy(None, NAME)
    best = search(stored, SPACE, sometimes, 40, seed=3)
    assert best.tried == 40
    assert best.failed == len(stored.trials()) - 40
    assert count_complete(stored.trials()) == best.complete
    with pytest.raises(SearchError, match=r"21 of 21 trials failed"):
        search(StoredStudy(None, NAME), SPACE, lambda _: iter([math.nan]), 10, seed=3)
