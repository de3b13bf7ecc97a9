"""A search over several workloads: what a point is worth, and which points are given up."""

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
from small_training import SLO, TOPOLOGY, small_training

from learn.evaluate import bench_of
from learn.joint import (
    CHAINS,
    GAINS,
    HOPELESS,
    PRICE_TRIALS,
    TAIL_COST,
    TAIL_LOAD,
    WORST_WEIGHT,
    JointCell,
    JointObjective,
    JointSearch,
    goodput_gain,
    joint_chains,
    joint_loads,
    joint_space,
    joint_start,
    long_tail,
    lower_latency,
)
from learn.objective import TAIL_LIMIT
from learn.policy_space import Params, table_point
from learn.price_space import price_policy
from learn.simulated_training import joint_compiled
from learn.simulation import Simulated
from learn.study import StoredStudy
from pipelines.workloads import make_workload
from serve_table.policy import Policy, policy

N_TRACES = 4


def cell(workload: str, rate: float) -> JointCell:
    traces = [make_workload(workload, 150, seed, rate) for seed in range(N_TRACES)]
    bench = bench_of(traces, TOPOLOGY, SLO, small_training().lengths.predictor())
    return JointCell(bench, [1.0] * N_TRACES, bench.runs(policy("least_loaded")), bench.runs(policy("dynamo_style")))


def price(params: Params) -> Policy:
    return price_policy(params, TOPOLOGY, SLO)


def with_goodput(run: Simulated, n_met: int, ttft_factor: float = 1.0) -> Simulated:
    return dataclasses.replace(
        run, slo_met=np.arange(len(run.slo_met)) < n_met, ttft_s=np.asarray(run.ttft_s) * ttft_factor
    )


def test_a_gain_is_paired_and_a_tail_counts_up_to_the_workloads_load() -> None:
    mixed = cell("mixed", 11.0)
    reference = [with_goodput(run, 90 + 15 * k) for k, run in enumerate(mixed.dynamo)]
    judged = JointCell(mixed.bench, mixed.loads, reference, mixed.dynamo)
    better = [with_goodput(run, 105 + 15 * k) for k, run in enumerate(mixed.dynamo)]
    assert goodput_gain(judged, better) == pytest.approx(0.1)
    # The first traces alone, as where a point is given up.
    assert goodput_gain(judged, better[:1]) == pytest.approx(0.1)
    late = [with_goodput(run, 105 + 15 * k, ttft_factor=2.0 * TAIL_LIMIT) for k, run in enumerate(mixed.dynamo)]
    assert goodput_gain(judged, late) == pytest.approx(0.1)
    assert long_tail(judged, better) == 0.0
    assert long_tail(judged, late) == pytest.approx(1.0)
    assert long_tail(replace(judged, loads=[1.5] * N_TRACES), late) == 0.0


def test_a_point_is_worth_the_mean_and_the_worst_of_its_workloads() -> None:
    cells = [cell("mixed", 11.0), cell("chat", 40.0)]
    objective = JointObjective(cells, goodput_gain, price)
    point = joint_start("goodput", 5)[0]
    gains = [goodput_gain(one, one.bench.runs(price(point))) for one in cells]
    tail = max(long_tail(one, one.bench.runs(price(point))) for one in cells)
    assert objective(point) == pytest.approx(np.mean(gains) + WORST_WEIGHT * min(gains) - TAIL_COST * tail)


def test_traces_for_the_tail_alone_are_no_gain() -> None:
    mixed = cell("mixed", 11.0)
    whole = replace(mixed, tail_only=1)
    runs = [
        with_goodput(run, 150 * (k < N_TRACES - 1), 1.0 + 3.0 * (k == N_TRACES - 1))
        for k, run in enumerate(mixed.dynamo)
    ]
    assert whole.gain(goodput_gain, runs) == pytest.approx(goodput_gain(mixed, runs[:-1]))
    assert whole.gain(goodput_gain, runs[:1]) == pytest.approx(goodput_gain(mixed, runs[:1]))
    assert long_tail(whole, runs) > 0.0 == long_tail(whole, runs[:-1])


def test_hopeless_points_stop_early_and_stay_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell("mixed", 11.0)]
    seen: list[int] = []

    def gain(one: JointCell, runs: list[Simulated]) -> float:
        seen.append(len(runs))
        return goodput_gain(one, runs)

    objective = JointObjective(cells, gain, price)  # type: ignore[arg-type]
    start = joint_start("goodput", 5)[0]
    best = objective(start)
    hopeless = start | {
        "step_factor": 1.1,
        "tpot_weight": 0.2,
        "local_weight": 0.0,
        "kv_wait": 3.0,
    }
    monkeypatch.setattr("learn.joint.HOPELESS", {1: -1.0})
    seen.clear()
    assert objective(hopeless) < best + 1.0
    assert seen == [1]
    assert min(HOPELESS.values()) > 0.0


def test_lower_latency_is_for_both_times_and_not_for_goodput() -> None:
    mixed = cell("mixed", 11.0)
    same = list(mixed.dynamo)
    assert lower_latency(mixed, same) == pytest.approx(0.0)
    faster = [dataclasses.replace(run, ttft_s=run.ttft_s * 0.9) for run in same]
    assert lower_latency(mixed, faster) > 0.0
    # A slower TPOT is not paid for by a TTFT that is faster by three times as much.
    traded = [dataclasses.replace(run, ttft_s=run.ttft_s * 0.9, tpot_s=run.tpot_s * 1.03) for run in same]
    assert lower_latency(mixed, traded) < 0.0
    lost = [with_goodput(run, 0) for run in faster]
    assert lower_latency(mixed, lost) < -1.0


@pytest.mark.parametrize("objective", GAINS)
def test_a_search_finds_at_least_its_best_start_and_continues(objective: str) -> None:
    cells = [cell("mixed", 11.0), cell("documents", 2.0)]
    compiled = joint_compiled([small_training("mixed"), small_training("chat")], small_training().lengths)
    table_study, study = StoredStudy(None, "table"), StoredStudy(None, "price")
    joint = JointSearch(cells, objective, 4, 0)
    found = table_point(compiled, joint.best_table(table_study, compiled).params)
    table = replace(compiled, regimes=found.regimes).decision_table(found.actions)
    best = joint.best_price(study, table)
    value = JointObjective(cells, GAINS[objective], price)
    # The first points favour no table, so that it does not matter which it is.
    assert best.value >= max(value(point) for point in joint_start(objective, len(cells))[:1]) - 1e-12
    assert best.params.keys() == joint_space(objective, len(cells)).keys()
    assert replace(joint, n_trials=6).best_price(study, table).complete == math.ceil(PRICE_TRIALS[objective] * 6)


def test_the_best_points_of_every_chain_are_confirmed_on_other_traces() -> None:
    cells = [cell("mixed", 11.0)]
    studies = [StoredStudy(None, f"price-{chain}") for chain in range(2)]
    joint = JointSearch(cells, "goodput", 6, 0)
    compiled = joint_compiled([small_training("mixed")], small_training().lengths)
    table = compiled.decision_table(np.ones(compiled.n_actions, np.uint8))
    for chain, study in enumerate(studies):
        joint.best_price(study, table, chain)
    points = [[trial.params for trial in study.trials()] for study in studies]
    # The starts are the same, what each goes on to is not.
    assert points[0][0] == points[1][0]
    assert points[0][-1] != points[1][-1]
    other = replace(cells[0], bench=replace(cells[0].bench, traces=cells[0].bench.traces[::-1]))
    confirmed = joint.confirmed(studies, table, [other])
    value = JointObjective([other], GAINS["goodput"], lambda params: price_policy(params, TOPOLOGY, SLO, table))
    assert confirmed.value == pytest.approx(max(value(point) for found in points for point in found))
    assert confirmed.params in [point for found in points for point in found]
    assert confirmed.complete == sum(map(len, points))


@pytest.mark.parametrize("objective", GAINS)
def test_a_workload_alone_is_searched_in_chains_and_at_its_own_load(objective: str) -> None:
    assert (joint_chains(objective, 1), joint_chains(objective, 8)) == (CHAINS[objective], 1)
    for n_workloads in (1, 8):
        loads = joint_loads(objective, n_workloads)
        assert loads.count(TAIL_LOAD) >= 3
    assert max(joint_loads(objective, 1)) <= max(joint_loads(objective, 8))
