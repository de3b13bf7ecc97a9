"""Ablations: each changes what it says, and nothing else."""

import numpy as np
import pytest
from small_training import SLO, TOPOLOGY, small_training

from learn.ablations import ABLATIONS, FULL, Ablation, constant, with_step_factor, wrong_by
from learn.evaluate import Bench, bench_of
from learn.joint import joint_start
from learn.price_space import price_policy
from pipelines.workloads import make_workload
from serve_table.price_params import FLOOR_S, HARM_WEIGHT, KV_TOKENS
from serve_table.situation import REMOTE

PARAMS = joint_start("goodput", 5)[0]
TABLE = small_training().compiled.decision_table(np.zeros(small_training().compiled.n_actions, np.uint8))
"""All local."""
BY_NAME = {ablation.name: ablation for ablation in ABLATIONS}


@pytest.fixture(scope="module")
def bench() -> Bench:
    traces = [make_workload("mixed", 200, seed, 11.0) for seed in (1, 2)]
    return bench_of(traces, TOPOLOGY, SLO, small_training().lengths.predictor())


def test_the_unchanged_policy_is_the_learned_one(bench: Bench) -> None:
    learned = price_policy(PARAMS, TOPOLOGY, SLO, TABLE)
    assert BY_NAME[FULL].goodput(PARAMS, bench, TABLE) == pytest.approx(bench.goodput(learned))


def test_a_part_is_left_out_of_the_parameters(bench: Bench) -> None:
    full, without = (BY_NAME[name].policy(PARAMS, bench, TABLE).params for name in (FULL, "no harm to residents"))
    assert (full[HARM_WEIGHT] > 0.0, without[HARM_WEIGHT]) == (True, 0.0)
    assert [i for i, (a, b) in enumerate(zip(full, without, strict=True)) if a != b] == [HARM_WEIGHT]


def test_remote_only_prefills_nothing_locally(bench: Bench) -> None:
    runs = bench.runs(BY_NAME["remote only"].policy(PARAMS, bench, TABLE))
    assert all((run.action == REMOTE).all() for run in runs)
    # Not even where the table has local for all.
    assert any((run.action != REMOTE).any() for run in bench.runs(BY_NAME[FULL].policy(PARAMS, bench, TABLE)))


def test_wrong_constants_are_the_router_s_alone(bench: Bench) -> None:
    slow = BY_NAME["step times 7.4 times, kept"].policy(PARAMS, bench, TABLE).params
    assert slow[FLOOR_S] == pytest.approx(7.4 * TOPOLOGY.profile.step.floor_s)
    assert slow[KV_TOKENS] == TOPOLOGY.profile.kv_tokens
    assert with_step_factor(TOPOLOGY.profile, 1.0) == TOPOLOGY.profile
    assert Ablation("none", step_factor=1.0).goodput(PARAMS, bench, TABLE) == pytest.approx(
        BY_NAME[FULL].goodput(PARAMS, bench, TABLE)
    )


def test_lengths_are_true_wrong_or_all_the_same(bench: Bench) -> None:
    trace, lengths = bench.traces[0], bench.predicted[0]
    assert (wrong_by(0.0)(trace, lengths, 0) == trace.output_tokens).all()
    wrong = wrong_by(1.0)(trace, lengths, 3)
    assert np.mean(np.abs(wrong / trace.output_tokens - 1.0)) == pytest.approx(1.0, rel=0.5)
    assert (wrong == wrong_by(1.0)(trace, lengths, 3)).all()
    assert (wrong != wrong_by(1.0)(trace, lengths, 4)).any()
    assert len(set(constant(trace, lengths, 0).tolist())) == 1
