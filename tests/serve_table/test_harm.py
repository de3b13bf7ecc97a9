"""Harm to the residents: the sums of shares against the exact sum over residents."""

import math
import random
from dataclasses import astuple
from typing import NamedTuple

import pytest

from serve_table.harm import N_SHARE, RENEWED_AFTER_TOKENS, Resident, Residents, harm, remove_share, renew_share
from serve_table.price_params import PriceParams, expected_step_s, tpot_target_s
from serve_table.step_time import step_time_s

PARAMS = list(astuple(PriceParams()))
FLOOR_S = PriceParams().step_floor_s


def miss_probability(resident: Resident, step_s: float, stall_s: float) -> float:
    """As the module's first lines have it, for one resident alone."""
    params = PriceParams()
    done = max(resident.streamed_tokens - 1.0, 0.0)
    left = max(resident.predicted_tokens - 1.0 - done, params.remaining_floor * resident.predicted_tokens, 1.0)
    tpot_s = (resident.elapsed_s + left * step_s + stall_s) / (done + left)
    target_s = tpot_target_s(PARAMS, resident.slo_class)
    return 0.0 if resident.lost else 1.0 / (1.0 + math.exp(-(tpot_s / target_s - 1.0) / params.tpot_width))


class Streaming(NamedTuple):
    """A resident that began at a step of its engine, with its share."""

    resident: Resident
    began_step: int
    began_s: float
    share: list[float]


def busy_engine(seed: int, n: int) -> tuple[Residents, list[Resident], float]:
    """Residents after some hundreds of steps, their shares renewed as the router does; and the time of a step now."""
    rng = random.Random(seed)
    residents = Residents(0.0, [], [0.0] * (2 * N_SHARE))
    engine: list[Streaming] = []
    now_s = 0.0
    for step in range(400):
        if len(engine) < n and rng.random() < 0.3:
            new = Resident(rng.random() < 0.3, rng.randint(20, 1000), rng.randint(30, 900), 0.0, 0.0, False)
            engine.append(Streaming(new, step, now_s, [0.0] * N_SHARE))
            renew_share(PARAMS, residents, 1, float(len(engine)), new, engine[-1].share, 0)
        if engine and rng.random() < 0.05:
            gone = engine.pop(rng.randrange(len(engine)))
            remove_share(residents, 1, float(len(engine)), gone.share, 0)
        context = sum(one.resident.prompt_tokens + step - one.began_step for one in engine)
        now_s += step_time_s(PARAMS, float(len(engine)), context) * rng.uniform(0.9, 1.3)
        for one in engine:
            streamed = step + 1 - one.began_step
            if streamed % RENEWED_AFTER_TOKENS == 1:
                renew_share(PARAMS, residents, 1, float(len(engine)), at(one, streamed, now_s), one.share, 0)
    exact = [at(one, 400 - one.began_step, now_s) for one in engine]
    context = sum(one.prompt_tokens + one.streamed_tokens for one in exact)
    return residents, exact, expected_step_s(PARAMS, float(len(exact)), context)


def at(one: Streaming, streamed: int, now_s: float) -> Resident:
    first_s = one.began_s + FLOOR_S
    return one.resident._replace(streamed_tokens=float(streamed), elapsed_s=max(now_s - first_s, 0.0))


@pytest.mark.parametrize("n", [20, 60])
def test_the_sums_are_near_the_exact_harm(n: int) -> None:
    wrong, whole, n_cases = 0.0, 0.0, 0
    for seed in range(3):
        residents, exact, step_s = busy_engine(seed, n)
        for rise_s, pending_s, stall_s in ((0.0001, 0.0, 0.0), (0.0006, 0.0, 0.0), (0.0002, 0.03, 0.2)):
            found = harm(PARAMS, residents, 1, float(len(exact)), rise_s, pending_s, stall_s)
            expected = sum(
                miss_probability(one, step_s + rise_s, pending_s + stall_s) - miss_probability(one, step_s, pending_s)
                for one in exact
            )
            wrong += abs(found - expected)
            whole += expected
            n_cases += 1
    assert whole > 0.3
    assert wrong < 0.06 * whole + 0.05 * n_cases


def test_a_resident_that_lost_its_ttft_is_not_harmed_but_still_has_its_context() -> None:
    residents = Residents(0.0, [], [0.0] * N_SHARE)
    share = [0.0] * N_SHARE
    tight = Resident(1, 500.0, 200.0, 1.0, 0.0, False)
    renew_share(PARAMS, residents, 0, 150.0, tight, share, 0)
    before = harm(PARAMS, residents, 0, 60.0, 0.001, 0.0, 0.1)
    renew_share(PARAMS, residents, 0, 60.0, tight._replace(lost=True), share, 0)
    assert before > 0.01
    assert harm(PARAMS, residents, 0, 60.0, 0.001, 0.0, 0.1) == pytest.approx(0.0, abs=1e-12)
    assert residents.shares[-2] == pytest.approx(501.0)


def test_an_engine_without_residents_has_sums_of_exactly_0() -> None:
    rng = random.Random(4)
    residents = Residents(0.0, [], [0.0] * N_SHARE)
    shares = [[0.0] * N_SHARE for _ in range(50)]
    for k, share in enumerate(shares):
        for streamed in range(4):
            one = Resident(k % 2, rng.random() * 1e4, rng.random() * 1e3, float(streamed), rng.random(), False)
            renew_share(PARAMS, residents, 0, k + 1.0, one, share, 0)
    assert harm(PARAMS, residents, 0, 50.0, 0.001, 0.0, 0.0) > 0.0
    for k, share in enumerate(shares):
        remove_share(residents, 0, 49.0 - k, share, 0)
    assert residents.shares == [0.0] * N_SHARE


@pytest.mark.parametrize("stall_s", [0.0, 0.01, 0.02, 0.09, 1.0, 1e4])
def test_harm_grows_with_the_rise_and_the_stall(stall_s: float) -> None:
    residents, exact, _ = busy_engine(1, 30)
    n = float(len(exact))
    less = harm(PARAMS, residents, 1, n, 0.0002, 0.01, stall_s)
    assert 0.0 < less < harm(PARAMS, residents, 1, n, 0.0004, 0.01, stall_s)
    assert less <= harm(PARAMS, residents, 1, n, 0.0002, 0.01, stall_s + 0.01) + 0.05
