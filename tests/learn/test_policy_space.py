"""Search spaces: what is in them, and that a point decides as the artifact made of it."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution
from optuna.samplers import RandomSampler
from optuna.study import create_study
from synthetic_rows import varied_rows

from learn.clusters import fit_clusters
from learn.frame import CleanFrame, clean
from learn.lengths import fit_lengths
from learn.policy_space import (
    TablePoint,
    baseline_policy,
    baseline_space,
    baseline_start,
    table_point,
    table_policy,
    table_space,
    table_warm_start,
)
from learn.regimes import Regimes
from learn.table import CompiledTable, Costs, SearchRecord, build_artifact, compile_table, with_regimes
from learn.training import BASELINES
from serve_table.artifact import Artifact, parse
from serve_table.policy import DYNAMO_POLICIES, LEARNED_POLICIES, POLICIES, policy
from serve_table.situation import LOCAL, REMOTE, Draws, Fleet, Request
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

COSTS = Costs(A40_3B.step, A40_3B.handoff, 0.002)
GREEDY = Draws(1.0, 0.5, 0.5, 0.5)
TOKENS = st.integers(0, 40_000).map(float)
REQUESTS = st.integers(0, 200).map(float)


@cache
def compiled_rows() -> tuple[CleanFrame, CompiledTable]:
    frame = clean(varied_rows(1500))
    clusters = fit_clusters(frame.features(), seed=1)
    return frame, compile_table(frame.features(), frame.pressures(), clusters, seed=1)


def random_points(space: dict[str, BaseDistribution], n_points: int) -> list[dict[str, Any]]:
    study = create_study(sampler=RandomSampler(seed=5))
    return [study.ask(space).params for _ in range(n_points)]


def exported(point: TablePoint) -> Artifact:
    """The artifact that `rutter train` makes of a point, read back from its bytes."""
    frame, compiled = compiled_rows()
    artifact = build_artifact(
        frame,
        with_regimes(compiled, point.regimes, frame.pressures()),
        point.actions,
        point.placement,
        fit_lengths(frame.outcome("usage_prompt_tokens"), frame.outcome("output_tokens")),
        COSTS,
        targets_from_profile(A40_3B),
        SearchRecord(seed=7, sampler="tpe", search_jobs=1, trials=3, study="study", held_out=()),
        form="table",
        price={},
        profile=A40_3B,
        workload="mixed",
        prefill_engines=2,
        decode_engines=4,
    )
    return parse(artifact.to_bytes())


@st.composite
def situations(draw: st.DrawFn) -> tuple[Request, Fleet]:
    n_prefill, n_decode = draw(st.integers(1, 3)), draw(st.integers(1, 4))

    def column(n: int, values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=n, max_size=n))

    wanted = Request(
        prompt_tokens=draw(st.integers(1, 16_000).map(float)),
        predicted_output_tokens=draw(st.integers(1, 4000).map(float)),
        slo_class=draw(st.integers(0, 1)),
        prefill_cached_tokens=column(n_prefill, st.sampled_from([0.0, 64.0, 1024.0])),
        decode_cached_tokens=column(n_decode, st.sampled_from([0.0, 64.0, 1024.0])),
        remote_allowed=True,
    )
    fleet = Fleet(
        column(n_prefill, REQUESTS),
        column(n_prefill, TOKENS),
        [1.0] * n_prefill,
        column(n_decode, REQUESTS),
        column(n_decode, TOKENS),
        column(n_decode, TOKENS),
        [1.0] * n_decode,
    )
    return wanted, fleet


@settings(deadline=None)
@given(situations(), st.integers(0, 11), st.integers(0, 50))
def test_a_point_decides_as_the_artifact_that_is_exported_of_it(
    situation: tuple[Request, Fleet], number: int, rotation: int
) -> None:
    point, artifact = searched_and_exported(number)
    searched = table_policy(compiled_rows()[1], point)
    served = policy("table", artifact=artifact)
    wanted, fleet = situation
    assert searched.decide(wanted, fleet, rotation, 0.0, GREEDY) == served.decide(wanted, fleet, rotation, 0.0, GREEDY)


@cache
def searched_and_exported(number: int) -> tuple[TablePoint, Artifact]:
    compiled = compiled_rows()[1]
    params = [*table_warm_start(compiled), *random_points(table_space(compiled), 12)][-12:][number]
    point = table_point(compiled, params)
    return point, exported(point)


def test_all_remote_and_all_local_are_points_and_are_tried_first() -> None:
    compiled = compiled_rows()[1]
    start = [table_point(compiled, params) for params in table_warm_start(compiled)]
    assert (start[0].actions == REMOTE).all()
    assert (start[1].actions == LOCAL).all()
    assert start[0].regimes == start[1].regimes == compiled.regimes
    assert len({point.actions.tobytes() for point in start}) >= 4


def test_a_length_threshold_is_a_point() -> None:
    compiled = compiled_rows()[1]
    uncached = compiled.clusters.centres_tokens[:, 2]
    n_regimes = len(compiled.regimes)
    for threshold in uncached:
        wanted = np.repeat(np.where(uncached <= threshold, LOCAL, REMOTE), n_regimes).tolist()
        found = [table_point(compiled, params).actions.tolist() for params in table_warm_start(compiled)]
        assert wanted in found


def test_local_needs_pressed_prefill_engines_and_decode_engines_that_are_not() -> None:
    compiled = compiled_rows()[1]
    n_prefill = len(compiled.regimes.prefill_edges_tokens) + 1
    n_decode = len(compiled.regimes.decode_edges_requests) + 1
    assert (n_prefill, n_decode) == (3, 3)
    params = {**table_warm_start(compiled)[0], "local_from_0": 1, "local_below_0": 2}
    cells = table_point(compiled, params).actions.reshape(len(compiled.clusters), n_prefill, n_decode)
    # Rows: prefill pressure; columns: decode pressure.
    assert cells[0].tolist() == [[REMOTE] * 3, [LOCAL, LOCAL, REMOTE], [LOCAL, LOCAL, REMOTE]]
    assert (cells[1:] == REMOTE).all()


def test_scales_move_the_regimes_borders() -> None:
    compiled = compiled_rows()[1]
    params = {**table_warm_start(compiled)[0], "prefill_edge_scale": 2.0, "decode_edge_scale": 0.5}
    regimes = table_point(compiled, params).regimes
    assert regimes == Regimes(
        tuple(2.0 * edge for edge in compiled.regimes.prefill_edges_tokens),
        tuple(0.5 * edge for edge in compiled.regimes.decode_edges_requests),
    )


def test_a_journal_without_pressure_has_one_regime_and_still_a_space() -> None:
    frame = clean(varied_rows(60))
    clusters = fit_clusters(frame.features(), seed=1)
    compiled = compile_table(frame.features(), np.zeros((60, 2)), clusters, seed=1)
    assert len(compiled.regimes) == 1
    for params in [*table_warm_start(compiled), *random_points(table_space(compiled), 20)]:
        assert len(table_point(compiled, params).actions) == len(clusters)
    found = {table_point(compiled, params).actions.tobytes() for params in table_warm_start(compiled)}
    assert {bytes([LOCAL] * len(clusters)), bytes([REMOTE] * len(clusters))} <= found


def require_inside(space: dict[str, BaseDistribution], params: dict[str, Any]) -> None:
    assert params.keys() == space.keys()
    for name, distribution in space.items():
        assert distribution._contains(distribution.to_internal_repr(params[name])), (name, params[name])


def test_warm_starts_lie_in_their_spaces() -> None:
    compiled = compiled_rows()[1]
    for params in table_warm_start(compiled):
        require_inside(table_space(compiled), params)
    for name in BASELINES:
        assert bool(baseline_space(name)) == bool(baseline_start(name))
        for params in baseline_start(name):
            require_inside(baseline_space(name), params)


@pytest.mark.parametrize("name", BASELINES)
def test_every_point_of_a_baseline_is_a_policy(name: str) -> None:
    assert set(BASELINES) == set(POLICIES) - set(LEARNED_POLICIES)
    points = [*baseline_start(name), *(random_points(baseline_space(name), 30) if baseline_space(name) else [{}])]
    for params in points:
        chosen = baseline_policy(name, params, COSTS, A40_3B.kv_tokens)
        assert chosen.name == name
        assert np.isfinite(chosen.params).all()


def test_published_defaults_are_what_is_tried_first_of_a_baseline() -> None:
    dynamo = [baseline_policy("dynamo_style", params, COSTS, 60_000) for params in baseline_start("dynamo_style")]
    assert {chosen.params[0] for chosen in dynamo} == set(range(len(DYNAMO_POLICIES)))
    threshold = baseline_policy("length_threshold", baseline_start("length_threshold")[0], COSTS, 60_000)
    assert threshold == policy("length_threshold")


def test_the_marginal_cost_router_gets_the_fitted_constants() -> None:
    given = policy("marginal_cost", {"kv_pressure_s": 0.5, "tight_multiplier": 2.0})
    found = baseline_policy("marginal_cost", {"kv_pressure_s": 0.5, "tight_multiplier": 2.0}, COSTS, 50_000)
    assert found.params == [0.00005, 0.000025, 50_000.0, 0.5, 2.0]
    assert found.params[:2] == given.params[:2]
