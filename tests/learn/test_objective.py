"""Objectives of the learned policies: paired by trace, with what a spread, a long tail and lost goodput cost."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from learn.objective import (
    GOODPUT_WORTH,
    LESSER_WEIGHT,
    OBJECTIVES,
    SPREAD_WEIGHT,
    TAIL_LIMIT,
    TAIL_WEIGHT,
    TPOT_AIM,
    TTFT_AIM,
    goodput_difference,
    latency_gain,
    tail_gain,
)


@dataclass(frozen=True)
class Fixed:
    """A run whose requests all took the same."""

    goodput: float
    ttft: float = 1.0
    tpot: float = 1.0

    @property
    def ttft_s(self) -> npt.NDArray[np.float64]:
        return np.full(4, self.ttft)

    @property
    def tpot_s(self) -> npt.NDArray[np.float64]:
        return np.full(4, self.tpot)

    def percentile(self, column: str, q: float) -> float:
        return float(np.nanpercentile(getattr(self, column), q))


REFERENCE = [Fixed(0.8), Fixed(0.6)]


def test_traces_that_are_hard_for_all_say_nothing_and_luck_on_one_costs() -> None:
    even, lucky = [Fixed(0.85), Fixed(0.65)], [Fixed(0.9), Fixed(0.6)]
    assert goodput_difference(REFERENCE, REFERENCE) == 0.0
    assert goodput_difference(even, REFERENCE) == pytest.approx(0.05)
    assert goodput_difference(lucky, REFERENCE) == pytest.approx(0.05 - SPREAD_WEIGHT * 0.1 / math.sqrt(2.0))


def test_a_tail_costs_beyond_its_cap_alone() -> None:
    def with_tail(factor: float) -> list[Fixed]:
        return [Fixed(run.goodput, ttft=factor) for run in REFERENCE]

    assert goodput_difference(with_tail(TAIL_LIMIT), REFERENCE) == pytest.approx(0.0)
    assert goodput_difference(with_tail(2.0 * TAIL_LIMIT), REFERENCE) == pytest.approx(-TAIL_WEIGHT)
    assert tail_gain(with_tail(0.5), REFERENCE) == pytest.approx(math.log(2.0))


def test_latency_counts_both_times_and_is_not_bought_with_goodput() -> None:
    faster = [Fixed(run.goodput, ttft=0.9, tpot=0.95) for run in REFERENCE]
    ttft, tpot = -math.log(0.9) / TTFT_AIM, -math.log(0.95) / TPOT_AIM
    assert ttft < tpot
    lesser = LESSER_WEIGHT * ttft + (1.0 - LESSER_WEIGHT) * 0.5 * (ttft + tpot)
    assert latency_gain(faster, REFERENCE) == pytest.approx(lesser)
    worse = [Fixed(run.goodput - 0.02, ttft=0.9, tpot=0.95) for run in REFERENCE]
    assert latency_gain(worse, REFERENCE) == pytest.approx(lesser - 0.02 * GOODPUT_WORTH / TTFT_AIM)
    assert tail_gain(worse, REFERENCE) == pytest.approx(-math.log(0.9) - 0.02 * GOODPUT_WORTH)
    better = [Fixed(run.goodput + 0.02) for run in REFERENCE]
    assert latency_gain(better, REFERENCE) == 0.0


def test_each_objective_has_a_name() -> None:
    assert dict(OBJECTIVES) == {"goodput": goodput_difference, "latency": latency_gain, "tail": tail_gain}
