"""The price's search space and what is tried first in it."""

import pytest
from trace_cases import SMALL_SLO, SMALL_TOPOLOGY

from learn.objective import OBJECTIVES
from learn.price_space import price_policy, price_space, price_start


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_start_of_the_search_is_a_point_of_the_space_and_another_policy(objective: str, wide: bool) -> None:
    space, starts = price_space(objective, wide), price_start(objective, wide)
    for start in starts:
        assert set(start) == set(space)
        assert all(space[name]._contains(value) for name, value in start.items())
    assert len({price_policy(start, SMALL_TOPOLOGY, SMALL_SLO).digest for start in starts}) == len(starts)
