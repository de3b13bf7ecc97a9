import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learn.regimes import Regimes, cell_counts, fit_regimes, pressure_edges
from serve_table.artifact import empty_table
from serve_table.lookup import regime_of
from serve_table.situation import Features

PRESSURE = st.one_of(st.floats(-10.0, 1e12), st.sampled_from([0.0, 1.0, 2.0, 5.0, float("nan"), float("inf")]))


def test_thirds_of_an_even_pressure_are_recovered() -> None:
    edges = pressure_edges(np.arange(1.0, 9001.0), 3)
    assert edges == pytest.approx((3000.0, 6000.0), rel=0.001)


def test_a_common_idle_pressure_is_a_regime_of_its_own() -> None:
    pressure = np.concatenate([np.zeros(700), np.arange(1.0, 301.0)])
    assert pressure_edges(pressure, 3) == (1.0, 151.0)
    regimes = Regimes(pressure_edges(pressure, 3), ())
    found = regimes.of(np.column_stack([pressure, np.zeros(1000)]))
    assert np.bincount(found).tolist() == [700, 150, 150]


@pytest.mark.parametrize(
    ("pressure", "expected"),
    [
        (np.empty(0), ()),
        (np.zeros(50), ()),
        (np.full(50, 7.0), ()),
        (np.full(50, np.nan), ()),
        (np.array([0.0, 4.0]), (4.0,)),
        (np.repeat([0.0, 1.0, 2.0], 10), (1.0, 2.0)),
    ],
)
def test_f32_few_distinct_pressures_give_fewer_regimes(pressure: np.ndarray, expected: tuple[float, ...]) -> None:
    assert pressure_edges(pressure, 3) == expected
    assert pressure_edges(pressure, 1) == ()


@given(st.lists(st.floats(0.0, 1e12), max_size=60), st.integers(1, 5))
def test_edges_are_positive_ascending_and_every_regime_has_rows(values: list[float], n_regimes: int) -> None:
    pressure = np.array(values)
    edges = pressure_edges(pressure, n_regimes)
    assert len(edges) <= n_regimes - 1 or not edges
    assert all(edge > 0 for edge in edges)
    assert list(edges) == sorted(set(edges))
    if len(values):
        found = Regimes(edges, ()).of(np.column_stack([pressure, pressure]))
        assert np.bincount(found, minlength=len(edges) + 1).min() > 0


@given(st.lists(st.tuples(PRESSURE, PRESSURE), min_size=1, max_size=20))
def test_regimes_are_those_of_the_router(pressures: list[tuple[float, float]]) -> None:
    regimes = Regimes((1.0, 5.0), (2.0, 1e6))
    table = empty_table()._replace(prefill_edges_tokens=(1.0, 5.0), decode_edges_requests=(2.0, 1e6))
    expected = [regime_of(table, Features(1.0, 1.0, 1.0, 1.0, 0, prefill, decode)) for prefill, decode in pressures]
    assert regimes.of(np.array(pressures)).tolist() == expected


def test_shape_of_both_pools() -> None:
    rng = np.random.default_rng(0)
    regimes = fit_regimes(np.column_stack([rng.random(300), np.zeros(300)]), (4, 3))
    assert (len(regimes.prefill_edges_tokens), len(regimes.decode_edges_requests), len(regimes)) == (3, 0, 4)


def test_rows_are_counted_by_cell() -> None:
    counts = cell_counts(np.array([0, 0, 1, 1]), np.array([0, 2, 1, 1]), 2, 3)
    assert counts.tolist() == [1, 0, 1, 0, 2, 0]
