"""The load at which goodput falls through a level."""

import pytest

from learn.carried_load import carried_load

LOADS = [0.8, 1.0, 1.2, 1.4]


def test_between_two_loads_it_is_linear() -> None:
    assert carried_load(LOADS, [0.99, 0.95, 0.85, 0.60]) == pytest.approx(1.1)
    assert carried_load(LOADS, [0.99, 0.96, 0.93, 0.88], level=0.9) == pytest.approx(1.32)


def test_the_first_fall_counts() -> None:
    assert carried_load(LOADS, [0.95, 0.85, 0.95, 0.85]) == pytest.approx(0.9)


@pytest.mark.parametrize("goodput", [[0.99, 0.98, 0.97, 0.96], [0.89, 0.8, 0.7, 0.6]])
def test_beyond_the_loads_it_is_not_known(goodput: list[float]) -> None:
    assert carried_load(LOADS, goodput) is None
