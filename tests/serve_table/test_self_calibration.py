"""Self-calibration: what is estimated from noisy gaps, how soon, and what must not spoil it."""

import random
from collections.abc import Sequence

import pytest

from serve_table.policy import policy
from serve_table.price_params import CONSTANT_NAMES, CONTEXT_TOKEN_S, FLOOR_S, PREFILL_TOKEN_S, TOKEN_S
from serve_table.self_calibration import (
    MAX_FACTOR,
    UNSEEN,
    Mark,
    SelfCalibration,
    new_self_calibration,
    observe_handoff,
    observe_prefill,
    observe_step,
    observe_window,
    prefill_returns,
    prefill_starts,
)
from serve_table.step_time import A40_3B, handoff_time_s, step_time_s

TRUE = A40_3B.step.as_list()
TRUE_HANDOFF = A40_3B.handoff.as_list()
STEP = CONSTANT_NAMES[:2] + CONSTANT_NAMES[3:5]


def calibration(factor: float, names: Sequence[str] = STEP, adapt: float = 1.0) -> SelfCalibration:
    """With an artifact whose constants of these names are so many times the true ones."""
    true = dict(zip(CONSTANT_NAMES, TRUE + TRUE_HANDOFF, strict=True))
    params = policy("price", {**{name: true[name] * factor for name in names}, "adapt": adapt}).params
    return new_self_calibration(params, 2, 3)


def feed(found: SelfCalibration, n_samples: int, outliers: float = 0.0, noise: float = 0.04, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(n_samples):
        requests = rng.randrange(2, 60)
        context = requests * rng.uniform(200.0, 900.0)
        step_s = step_time_s(TRUE, requests, context) * (1.0 + rng.gauss(0.0, noise))
        if rng.random() < outliers:
            step_s *= rng.uniform(2.0, 20.0)
        observe_step(found, requests, context, step_s)


@pytest.mark.parametrize("names", [STEP, ("step_per_token_s",), ("step_per_context_token_s",), ("step_floor_s",)])
@pytest.mark.parametrize("factor", [1 / 7.4, 0.7, 1.0, 1.3, 7.4])
def test_the_constants_are_found_in_noisy_gaps(factor: float, names: Sequence[str]) -> None:
    found = calibration(factor, names)
    feed(found, 1500)
    assert found.live[FLOOR_S] == pytest.approx(TRUE[FLOOR_S], rel=0.03)
    assert found.live[CONTEXT_TOKEN_S] == pytest.approx(TRUE[CONTEXT_TOKEN_S], rel=0.1)
    assert found.live[TOKEN_S] == pytest.approx(TRUE[TOKEN_S], rel=0.35)
    for requests in (5, 30, 60):
        step_s = step_time_s(TRUE, requests, requests * 500.0)
        assert step_time_s(found.live, requests, requests * 500.0) == pytest.approx(step_s, rel=0.015)


@pytest.mark.parametrize("factor", [1 / 7.4, 7.4])
def test_a_few_dozen_gaps_tell_how_far_all_are_off(factor: float) -> None:
    found = calibration(factor)
    feed(found, 40)
    assert step_time_s(found.live, 20, 10_000.0) == pytest.approx(step_time_s(TRUE, 20, 10_000.0), rel=0.05)


def test_a_first_wild_gap_is_soon_made_up_for() -> None:
    found = calibration(1.0)
    observe_step(found, 20, 10_000.0, 10.0 * step_time_s(TRUE, 20, 10_000.0))
    assert step_time_s(found.live, 20, 10_000.0) < 3.01 * step_time_s(TRUE, 20, 10_000.0)
    feed(found, 40)
    assert step_time_s(found.live, 20, 10_000.0) == pytest.approx(step_time_s(TRUE, 20, 10_000.0), rel=0.05)


def test_outliers_pull_no_harder_than_others() -> None:
    found = calibration(1.3)
    feed(found, 1500, outliers=0.05)
    assert step_time_s(found.live, 20, 10_000.0) == pytest.approx(step_time_s(TRUE, 20, 10_000.0), rel=0.03)


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_estimates_stay_near_the_artifacts_whatever_is_seen(factor: float) -> None:
    found = calibration(1.0)
    for k in range(300):
        observe_step(found, 1 + k % 50, 400.0 * (k % 50), factor * TRUE[FLOOR_S] * (1 + k % 7))
        observe_prefill(found, 1000.0, factor)
        observe_handoff(found, 1000.0, factor, 0.03)
    factors = [live / known for live, known in zip(found.live, found.known, strict=False)]
    assert all(0.999 / MAX_FACTOR <= value <= MAX_FACTOR * 1.001 for value in factors)
    observe_step(found, 0, 0.0, 0.01)
    observe_step(found, 5, 100.0, -1.0)
    assert all(value == value for value in found.live + found.sums)


def test_engines_that_change_are_followed() -> None:
    found = calibration(2.0)
    feed(found, 3000)
    for k in range(3000):
        requests = 2 + k % 50
        observe_step(found, requests, 400.0 * requests, 1.5 * step_time_s(TRUE, requests, 400.0 * requests))
    assert step_time_s(found.live, 20, 8000.0) == pytest.approx(1.5 * step_time_s(TRUE, 20, 8000.0), rel=0.05)


def test_nothing_moves_where_it_is_not_wanted() -> None:
    found = calibration(7.4, adapt=0.0)
    before = list(found.live)
    mark = Mark(1.0, 1.0, 20.0, 10_000.0, 0.0)
    observe_window(found, 0, mark, mark._replace(time_s=1.2, tokens=17.0))
    observe_prefill(found, 1000.0, 0.1)
    observe_handoff(found, 1000.0, 0.1, 0.03)
    assert found.live == before


def test_a_window_counts_where_no_prefill_stretched_it_and_it_overlaps_none_before() -> None:
    found = calibration(1.0)
    begin = Mark(1.0, 1.0, 20.0, 10_000.0, 500.0)
    end = Mark(1.3, 17.0, 22.0, 10_400.0, 500.0)

    def moved(engine: int, begin: Mark, end: Mark) -> bool:
        before = found.sums[:]
        observe_window(found, engine, begin, end)
        return found.sums != before

    assert not moved(0, begin._replace(local_tokens=UNSEEN), end)
    assert not moved(0, begin, end._replace(local_tokens=UNSEEN))
    assert not moved(0, begin._replace(local_tokens=300.0), end)
    assert not moved(0, begin, end._replace(tokens=3.0))
    assert moved(0, begin, end)
    assert not moved(0, begin._replace(time_s=1.1), end._replace(time_s=1.4))
    assert moved(1, begin, end)
    assert moved(0, begin._replace(time_s=1.3), end._replace(time_s=1.6))


@pytest.mark.parametrize("factor", [1 / 7.4, 0.7, 7.4])
def test_prefill_has_a_ratio_of_its_own(factor: float) -> None:
    found = calibration(factor, ("step_per_token_beyond_s",))
    rng = random.Random(2)
    now_s = 5.0
    prefill_starts(found, 1, now_s)
    for _ in range(300):
        # Two legs of one step come back together.
        legs = [float(rng.randrange(300, 1000)) for _ in range(2)]
        now_s += step_time_s(TRUE, sum(legs), 0.0) * (1.0 + rng.gauss(0.0, 0.05))
        for tokens in legs:
            prefill_returns(found, 1, tokens, now_s)
    assert found.live[PREFILL_TOKEN_S] == pytest.approx(TRUE[PREFILL_TOKEN_S], rel=0.05)
    assert found.live[FLOOR_S] == TRUE[FLOOR_S]


def test_without_prefill_engines_prefill_is_as_far_off_as_steps_are() -> None:
    found = calibration(7.4)
    feed(found, 500)
    assert found.live[PREFILL_TOKEN_S] == pytest.approx(TRUE[PREFILL_TOKEN_S], rel=0.1)


@pytest.mark.parametrize("factor", [1 / 7.4, 7.4])
def test_hand_offs_have_a_ratio_of_their_own(factor: float) -> None:
    found = calibration(factor, CONSTANT_NAMES[5:])
    rng = random.Random(3)
    for _ in range(600):
        tokens = rng.uniform(100.0, 3000.0)
        # The wait for whole steps hides it.
        waited_s = handoff_time_s(TRUE_HANDOFF, tokens) + rng.uniform(-0.012, 0.012)
        observe_handoff(found, tokens, waited_s, 0.036)
    assert found.live[5:7] == pytest.approx(TRUE_HANDOFF, rel=0.1)
