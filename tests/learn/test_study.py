"""Stored studies and the search on them: shared, repeated, interrupted, killed, failing, damaged."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import create_trial
from search_workers import NAME, SPACE, contents, objective, processes, read, search_alone, searched, work

from learn.search import MIN_FAILED, search
from learn.study import StoredStudy, best_of, count_complete
from serve_table.errors import SearchError

JOIN_S = 30.0


def run_workers(place: str, n_workers: int, n_trials: int) -> None:
    """So many searches started at once while another process reads; all must end well."""
    context = processes()
    together, ended = context.Barrier(n_workers), context.Event()
    reader = context.Process(target=read, args=(place, ended))
    workers = [context.Process(target=work, args=(place, n_trials, together)) for _ in range(n_workers)]
    for process in (reader, *workers):
        process.start()
    for process in workers:
        process.join(JOIN_S)
    ended.set()
    reader.join(JOIN_S)
    statuses = [process.exitcode for process in (*workers, reader)]
    for process in (reader, *workers):
        process.kill()
    assert statuses == [0] * (n_workers + 1)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_f20_sixteen_workers_started_at_once_end_with_exactly_the_budget(tmp_path: Path, attempt: int) -> None:
    place = str(tmp_path / "study.log")
    run_workers(place, 16, 60)
    trials = StoredStudy(place, NAME).trials()
    assert count_complete(trials) == len(trials) == 60
    # Sharing is of use: the same point is never paid for twice.
    assert len({tuple(sorted(trial.params.items())) for trial in trials}) == 60


@pytest.mark.slow
def test_f20_workers_share_an_sqlite_database_that_none_has_made_before(tmp_path: Path) -> None:
    place = f"sqlite:///{tmp_path / 'study.db'}"
    run_workers(place, 4, 20)
    trials = StoredStudy(place, NAME).trials()
    assert count_complete(trials) == len(trials) == 20


def test_f20_the_same_seed_gives_the_same_trials_and_another_seed_others(tmp_path: Path) -> None:
    first, second, other = (
        contents(searched(str(tmp_path / f"{i}.log"), 45, seed=seed).trials()) for i, seed in enumerate((7, 7, 8))
    )
    assert first == second
    assert first[0] == other[0] == ({"x": 0.0, "y": 0, "kind": "a"}, objective({"x": 0.0, "y": 0, "kind": "a"}))
    assert first[1:] != other[1:]
    # On a file, in a database or in memory: the same search.
    assert contents(searched(None, 45).trials()) == first
    assert contents(searched(f"sqlite:///{tmp_path / 'study.db'}", 45).trials()) == first


def test_f20_several_jobs_end_with_exactly_the_budget() -> None:
    trials = searched(None, 31, jobs=4).trials()
    assert count_complete(trials) == len(trials) == 31


@pytest.mark.parametrize("seed", [0, 2**31, 10**12])
def test_any_seed_that_can_be_given_is_taken(seed: int) -> None:
    assert len(searched(None, 3, seed=seed).trials()) == 3


@pytest.mark.parametrize("after", [1, 7, 30])
def test_f35_interrupted_and_resumed_is_as_uninterrupted(tmp_path: Path, after: int) -> None:
    place = tmp_path / "study.log"
    told: list[int] = []

    def interrupted(point: Mapping[str, Any]) -> float:
        if len(told) == after:
            raise KeyboardInterrupt
        return objective(point)

    with pytest.raises(KeyboardInterrupt):
        search(
            StoredStudy(place, NAME),
            SPACE,
            interrupted,
            40,
            seed=7,
            warm_start=[{"x": 0.0, "y": 0, "kind": "a"}],
            on_trial=lambda complete, _best: told.append(complete),
        )
    assert told == list(range(1, after + 1))
    resumed = searched(str(place), 40)
    assert contents(resumed.trials()) == contents(searched(None, 40).trials())


@pytest.mark.slow
def test_f35_killed_ten_times_at_random_moments_and_resumed(tmp_path: Path) -> None:
    place = str(tmp_path / "study.log")
    n_trials = 240
    rng = np.random.default_rng(0)
    context = processes()
    seen = 0
    for _ in range(10):
        process = context.Process(target=search_alone, args=(place, n_trials, 0.002))
        process.start()
        deadline_s = time.monotonic() + JOIN_S
        while not Path(place).exists() or count_complete(StoredStudy(place, NAME).trials()) <= seen:
            assert time.monotonic() < deadline_s
            assert process.is_alive()
            time.sleep(0.005)
        time.sleep(float(rng.uniform(0.0, 0.2)))
        process.kill()
        process.join(JOIN_S)
        seen = count_complete(StoredStudy(place, NAME).trials())
    assert 10 <= seen < n_trials
    last = context.Process(target=search_alone, args=(place, n_trials, 0.0))
    last.start()
    last.join(JOIN_S)
    assert last.exitcode == 0
    trials = StoredStudy(place, NAME).trials()
    assert count_complete(trials) == len(trials) == n_trials
    assert contents(trials) == contents(searched(None, n_trials).trials())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_f35_an_objective_that_is_never_finite_ends_with_the_reason(tmp_path: Path, value: float) -> None:
    with pytest.raises(SearchError, match=f"21 of 21 trials failed, the last: the objective is {value}"):
        search(StoredStudy(tmp_path / "study.log", NAME), SPACE, lambda _point: value, 10, seed=1)


def test_f35_an_objective_that_raises_ends_with_the_reason_and_a_cured_one_goes_on(tmp_path: Path) -> None:
    stored = StoredStudy(tmp_path / "study.log", NAME)

    def broken(point: Mapping[str, Any]) -> float:
        raise ZeroDivisionError("of a kind\nsecond line")

    for _ in range(2):
        with pytest.raises(SearchError, match=r"21 of 21 trials failed, the last: ZeroDivisionError: of a kind$"):
            search(stored, SPACE, broken, 10, seed=1)
    best = search(stored, SPACE, objective, 10, seed=1)
    assert (best.complete, best.failed) == (10, 2 * (MIN_FAILED + 1))


def test_f35_failed_trials_do_not_count_towards_the_budget() -> None:
    def sometimes(point: Mapping[str, Any]) -> float:
        return math.nan if point["kind"] == "a" else objective(point)

    stored = StoredStudy(None, NAME)
    best = search(stored, SPACE, sometimes, 60, seed=3)
    assert best.complete == 60
    assert best.failed > 0
    assert best.params["kind"] == "b"
    reasons = {trial.user_attrs["reason"] for trial in stored.trials() if trial.value is None}
    assert reasons == {"the objective is nan"}


def test_f35_a_torn_last_line_is_cut_off_and_the_search_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "study.log"
    whole = contents(searched(None, 20).trials())
    searched(str(place), 10)
    good = place.read_bytes()
    for torn in (b'{"op_code": 4, "work', good.splitlines()[-1][:-1], b"\x00" * 4096):
        place.write_bytes(good + torn)
        assert contents(StoredStudy(place, NAME).trials()) == whole[:10]
        assert place.read_bytes() == good
    place.write_bytes(good + b"{")
    assert contents(searched(str(place), 20).trials()) == whole


def test_f35_a_line_torn_by_another_process_does_not_spoil_the_file(tmp_path: Path) -> None:
    place = tmp_path / "study.log"
    stored = searched(str(place), 5)
    with open(place, "ab") as file:
        file.write(b'{"op_code": 4, "work')
    search(stored, SPACE, objective, 8, seed=9)
    assert count_complete(StoredStudy(place, NAME).trials()) == 8


def test_a_search_finds_better_points_than_chance() -> None:
    best = best_of(searched(None, 80).trials())
    assert best.value > 0.095
    assert best.params["kind"] == "b"
    assert abs(best.params["x"] - 0.5) < 0.05


def test_a_point_that_another_process_has_stored_meanwhile_is_not_stored_again() -> None:
    stored = StoredStudy(None, NAME)
    point = {"x": 0.1, "y": 2, "kind": "a"}
    trial = create_trial(params=point, distributions=dict(SPACE), value=1.0)
    assert stored.add(trial, budget=3, known=0)
    assert not stored.add(trial, budget=3, known=0)
    assert stored.add(trial, budget=3, known=1)
    other = create_trial(params={**point, "y": 5}, distributions=dict(SPACE), value=2.0)
    assert not stored.add(other, budget=2, known=2)
    assert count_complete(stored.trials()) == 2


def test_trials_beyond_the_budget_are_left_out_and_the_first_of_equals_is_best() -> None:
    trials = [
        create_trial(params={"x": x}, distributions={"x": FloatDistribution(0.0, 9.0)}, value=value)
        for x, value in ((1.0, 0.5), (2.0, 0.7), (3.0, 0.7), (4.0, 0.9))
    ]
    best = best_of(trials, 3)
    assert (best.params, best.value, best.complete, best.failed) == ({"x": 2.0}, 0.7, 3, 0)
    with pytest.raises(SearchError, match="no trial was completed, 0 failed, the last: none was tried"):
        best_of([])


def test_a_study_of_another_space_is_refused(tmp_path: Path) -> None:
    stored = searched(str(tmp_path / "study.log"), 3)
    with pytest.raises(SearchError, match="trials of another search space"):
        search(stored, {"x": FloatDistribution(-1.0, 2.0)}, objective, 10, seed=1)


def test_places_that_cannot_hold_a_study_are_named_in_one_line(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.log"
    foreign.write_text("to whom it may concern")
    damaged = tmp_path / "damaged.log"
    damaged.write_text('{"op_code": 0\n{}\n')
    for place in (foreign, damaged, foreign / "study.log", tmp_path, "sqlite:////proc/none/study.db", "nosuchdb://x/y"):
        with pytest.raises(SearchError, match=r"cannot open the study in|is no Optuna journal") as error:
            StoredStudy(place, NAME)
        assert str(place) in str(error.value)
        assert "\n" not in str(error.value)
    assert foreign.read_text() == "to whom it may concern"
