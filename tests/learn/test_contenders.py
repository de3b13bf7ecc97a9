"""Contenders: all baselines, the hard clusters and Rutter's own, tuned with one budget."""

import numpy as np
import pytest
from small_training import SLO, TOPOLOGY, small_training

from learn.contenders import CONTENDERS, REFERENCES, is_tuned, tuned
from learn.evaluate import Bench, bench_of
from learn.study import StoredStudy
from learn.training import BASELINES
from pipelines.workloads import make_workload

TRIALS = 8


def bench() -> Bench:
    traces = [make_workload("mixed", 150, seed, 11.0) for seed in (50, 51)]
    return bench_of(traces, TOPOLOGY, SLO, small_training().lengths.predictor())


def test_every_baseline_is_compared_and_the_learned_ones() -> None:
    assert list(CONTENDERS) == [*BASELINES, "clusters", "table"]
    assert set(REFERENCES) == CONTENDERS.keys() - {"table"}


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_contender_starts_inside_its_space(name: str) -> None:
    contender = CONTENDERS[name](small_training())
    assert is_tuned(name) == bool(contender.space) == bool(contender.start)
    for point in contender.start:
        assert point.keys() == contender.space.keys()
        for key, value in point.items():
            assert contender.space[key]._contains(contender.space[key].to_internal_repr(value))
        assert np.isfinite(contender.policy(point).params).all()


def test_tuning_finds_at_least_its_best_start_and_is_stored() -> None:
    contender = CONTENDERS["clusters"](small_training())
    study = StoredStudy(None, "clusters")
    params, goodput = tuned(contender, bench(), lambda: study, TRIALS, 0)
    assert goodput >= max(bench().goodput(contender.policy(point)).mean() for point in contender.start[:TRIALS])
    assert goodput == pytest.approx(bench().goodput(contender.policy(params)).mean())
    assert len(study.trials()) == TRIALS


def test_what_has_nothing_to_tune_is_not_searched() -> None:
    def no_study() -> StoredStudy:
        raise AssertionError("nothing is to be searched")

    contender = CONTENDERS["round_robin"](small_training())
    params, goodput = tuned(contender, bench(), no_study, TRIALS, 0)
    assert params == {}
    assert 0.0 < goodput < 1.0
