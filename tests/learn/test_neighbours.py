"""Neighbours of a point: near it, inside the space, on its steps."""

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution

from learn.neighbours import CHANGED, moved_by, neighbour
from learn.policy_space import Space

SPACE: Space = {
    **{f"flat_{k}": FloatDistribution(0.0, 0.2) for k in range(6)},
    **{f"log_{k}": FloatDistribution(0.01, 1.0, log=True) for k in range(5)},
    "stepped": FloatDistribution(0.0, 0.05, step=0.0025),
    "mode": CategoricalDistribution(("a", "b")),
}
POINT = {name: "a" if name == "mode" else 0.02 for name in SPACE}


def test_neighbours_are_inside_the_space_and_change_a_few_numbers() -> None:
    rng = np.random.default_rng(0)
    points = [neighbour(SPACE, POINT, rng) for _ in range(300)]
    for point in points:
        assert point.keys() == SPACE.keys()
        for name, distribution in SPACE.items():
            assert distribution._contains(distribution.to_internal_repr(point[name]))
        assert point["mode"] == "a"
    changed = [sum(point[name] != POINT[name] for name in SPACE) for point in points]
    assert np.mean(changed) == pytest.approx(CHANGED, abs=1.0)
    assert any(point["stepped"] != POINT["stepped"] for point in points)


def test_steps_are_on_the_parameter_s_own_scale() -> None:
    assert moved_by(FloatDistribution(0.0, 0.2), 0.1, 0.25) == pytest.approx(0.15)
    assert moved_by(FloatDistribution(0.01, 1.0, log=True), 0.1, 0.25) == pytest.approx(0.1 * 100**0.25)
    assert moved_by(FloatDistribution(0.0, 0.05, step=0.0025), 0.0, 0.06) == pytest.approx(0.0025)
    assert moved_by(FloatDistribution(0.0, 0.2), 0.1, 3.0) == 0.2
    assert moved_by(FloatDistribution(0.0, 0.2), 0.1, -3.0) == 0.0


def test_equal_draws_give_equal_neighbours() -> None:
    first, again = (neighbour(SPACE, POINT, np.random.default_rng([3, 80])) for _ in range(2))
    assert first == again != POINT
