"""The search for policies: baselines first, then table and price against the best of them."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from simulated_journals import profile_times, rows_of

from learn.evaluate import Bench
from learn.frame import CleanFrame, clean
from learn.journal_trace import JournalTrace, journal_trace
from learn.objective import goodput_difference, latency_gain
from learn.policy_search import LATENCY_REFERENCE, Searched, SearchPlan, search_policies
from learn.policy_space import baseline_policy, table_policy, table_space, table_start_of
from learn.price_space import price_policy, price_space, price_start, price_start_of
from learn.rating import stage_sizes
from learn.simulation import Simulated, Topology
from learn.study import StoredStudy
from learn.table import SearchRecord, build_artifact, with_price, with_regimes
from learn.training import BASELINES, Learned, learn_from, training_bench
from pipelines.workloads import make_workload
from serve_table.artifact import Artifact
from serve_table.policy import PlacementParams, policy
from serve_table.price_params import LEARNED_FIELDS
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

SLO = targets_from_profile(A40_3B)
TOPOLOGY = Topology(2, 4, profile_times(1.3, 0.7, 1.0), 0.002)
PLAN = SearchPlan(trials=12, seed=3)


@cache
def journaled() -> tuple[CleanFrame, tuple[JournalTrace, ...]]:
    rows = rows_of(make_workload("mixed", 200, 0, 9.0), TOPOLOGY)
    return clean(rows), (journal_trace(rows),)


@cache
def learned() -> Learned:
    frame, runs = journaled()
    return learn_from(frame, runs, A40_3B, SLO, seed=3)


@cache
def bench() -> Bench:
    whole = training_bench([run.trace for run in journaled()[1]], learned(), SLO, seed=3)
    return replace(whole, traces=whole.traces[:4], predicted=whole.predicted[:4])


def nothing_told(what: str, trials: int) -> Callable[[int, float], None]:
    return lambda _tried, _best: None


def searched(
    plan: SearchPlan = PLAN,
    studies: dict[str, StoredStudy] | None = None,
    step: Callable[[str, int], Callable[[int, float], None]] = nothing_told,
) -> Searched:
    made = {} if studies is None else studies

    def study(name: str) -> StoredStudy:
        return made.setdefault(name, StoredStudy(None, name))

    return search_policies(bench(), learned(), study, plan, step)


@cache
def found_once() -> Searched:
    return searched()


def baseline_runs(found: Searched, name: str) -> list[Simulated]:
    return bench().runs(baseline_policy(name, found.baselines[name], learned().cost_fit.costs, A40_3B.kv_tokens))


def price_runs(found: Searched) -> list[Simulated]:
    table = table_policy(learned().compiled, found.table).table
    return bench().runs(price_policy(found.price, bench().topology, SLO, table))


def test_baselines_are_tuned_for_goodput_and_learned_policies_paired_with_the_best_of_them() -> None:
    steps: dict[str, list[int]] = {}

    def step(what: str, trials: int) -> Callable[[int, float], None]:
        assert trials == PLAN.trials
        told = steps.setdefault(what, [])
        return lambda tried, _best: told.append(tried)

    found = searched(step=step)
    tuned = ("length_threshold", "dynamo_style", "class_aware", "marginal_cost")
    assert list(steps) == [*(f"tune {name}" for name in tuned), "search the table", "search the price"]
    assert all(told == list(range(1, PLAN.trials + 1)) for told in steps.values())
    assert set(found.baselines) == set(BASELINES)
    assert found.baselines["round_robin"] == {}
    for name in BASELINES:
        goodput = np.mean([run.goodput for run in baseline_runs(found, name)])
        assert found.training_goodput[name] == pytest.approx(float(goodput))
    assert found.reference == max(BASELINES, key=lambda name: found.training_goodput[name])
    reference = baseline_runs(found, found.reference)
    table_runs = bench().runs(table_policy(learned().compiled, found.table))
    assert found.table_best.value == pytest.approx(goodput_difference(table_runs, reference))
    assert found.price_best.value == pytest.approx(goodput_difference(price_runs(found), reference))
    for name, runs in (("table", table_runs), ("price", price_runs(found))):
        assert found.training_goodput[name] == pytest.approx(float(np.mean([run.goodput for run in runs])))
    assert found.form == ("price" if found.price_best.value > found.table_best.value else "table")
    assert isinstance(found.table.placement, PlacementParams)


def test_the_front_has_the_figures_of_its_points_against_dynamo_style() -> None:
    found = found_once()
    own = next(point for point in found.front if point.value == found.price_best.value)
    assert own.params == found.price
    runs, reference = price_runs(found), baseline_runs(found, LATENCY_REFERENCE)
    assert own.latency_gain == pytest.approx(latency_gain(runs, reference))
    assert own.goodput == pytest.approx(found.training_goodput["price"])
    assert 0.0 < own.ttft_p99_ratio < 10.0


@pytest.mark.parametrize("objective", ["latency", "tail"])
def test_another_objective_finds_what_is_best_in_it(objective: str) -> None:
    studies: dict[str, StoredStudy] = {}
    found = searched(replace(PLAN, objective=objective), studies)
    reference = baseline_runs(found, LATENCY_REFERENCE)
    if objective == "latency":
        assert found.price_best.value == pytest.approx(latency_gain(price_runs(found), reference))
        assert found.price_best.value == max(point.value for point in found.front)
    # The baselines are the same for every objective, the learned policies' studies are not to be mixed.
    assert found.baselines == found_once().baselines
    before = set(studies)
    searched(PLAN, studies)
    assert {name.partition(" ")[0] for name in set(studies) - before} == {"table", "price"}


def test_f20_the_same_seed_finds_the_same() -> None:
    first, second = found_once(), searched()
    assert np.array_equal(first.table.actions, second.table.actions)
    assert (first.table.placement, first.table.regimes) == (second.table.placement, second.table.regimes)
    assert (first.baselines, first.training_goodput) == (second.baselines, second.training_goodput)
    assert (first.price, first.front) == (second.price, second.front)


def test_a_search_that_is_out_of_time_still_has_every_policy_and_goes_on_with_more() -> None:
    studies: dict[str, StoredStudy] = {}
    hurried = searched(replace(PLAN, limit_s=1e-9), studies)
    assert {len(study.trials()) for study in studies.values()} == {1}
    assert (hurried.table_best.tried, hurried.price_best.tried) == (1, 1)
    assert set(hurried.training_goodput) == {"table", "price", *BASELINES}
    assert searched(PLAN, studies).training_goodput == found_once().training_goodput


def exported(found: Searched) -> Artifact:
    frame = journaled()[0]
    return build_artifact(
        frame,
        with_regimes(learned().compiled, found.table.regimes, frame.pressures()),
        found.table.actions,
        PlacementParams(0.2, 2.0, 1.5, 0.5, 0.25, 1.0, 0.125),
        learned().lengths,
        learned().cost_fit.costs,
        SLO,
        SearchRecord(seed=3, sampler="tpe", search_jobs=1, trials=12, study="price", held_out=()),
        form="price",
        price={**found.price, "harm_weight": 99.0, "hold_s": 0.0112, "table_weight": 0.123},
        profile=A40_3B,
        workload="mixed",
        prefill_engines=2,
        decode_engines=4,
    )


def test_an_artifact_s_price_and_placement_are_tried_first_within_the_space() -> None:
    artifact = exported(found_once())
    studies: dict[str, StoredStudy] = {}
    searched(replace(PLAN, trials=1, start=artifact), studies)
    tried = {name.partition(" ")[0]: study.trials()[0].params for name, study in studies.items()}
    (price,) = price_start_of(artifact, PLAN.objective)
    assert tried["price"] == price
    assert (price["harm_weight"], price["hold_s"], price["table_weight"]) == (4.0, 0.0125 - 0.0025, 0.12)
    assert price["ttft_width"] == found_once().price["ttft_width"]
    # In the space for latency, where no table is favoured and small terms may weigh more.
    quick = with_price(artifact, price_start("latency")[-1])
    assert price_start_of(quick, "latency") == [price_start("latency")[-1]]
    assert price_start_of(quick, "goodput")[0]["tpot_weight"] == 0.2
    table = table_start_of(learned().compiled, artifact)[0]
    assert tried["table"] == table
    # Weights relative to the one that the space holds at 1.
    weights = ("prefill_request", "prefill_uncached", "decode_token", "decode_local_prefill", "decode_uncached")
    assert [table[name] for name in weights] == [0.1, 0.75, 0.5, 2.0, 0.25]


def test_an_artifact_whose_placement_does_not_fit_gives_its_price_alone() -> None:
    artifact = exported(found_once())
    placement = artifact.arrays["placement"].copy()
    placement[1] = 0.0
    odd = replace(artifact, arrays=artifact.arrays | {"placement": placement})
    assert table_start_of(learned().compiled, odd) == []
    space = table_space(learned().compiled)
    for point in table_start_of(learned().compiled, artifact):
        assert set(point) == set(space)
        assert all(space[name]._contains(value) for name, value in point.items())


def test_another_price_in_an_artifact_is_what_rutter_decides_by() -> None:
    artifact = exported(found_once())
    other = with_price(artifact, price_start()[1])
    assert other.metadata.policy == "price"
    assert other.price().harm_weight == price_start()[1]["harm_weight"]
    assert policy("rutter", artifact=other).digest != policy("rutter", artifact=artifact).digest
    assert np.array_equal(other.arrays["actions"], artifact.arrays["actions"])
    assert set(price_space()) <= set(LEARNED_FIELDS)


def test_stages_begin_with_a_few_traces() -> None:
    assert stage_sizes(12) == [3, 6, 12]
    assert stage_sizes(4) == [2, 4]
    assert stage_sizes(1) == [1]
