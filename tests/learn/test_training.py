"""Training from journals whose truth is known: what is learned, and on which load the search works."""

from dataclasses import replace
from functools import cache

import pytest
from simulated_journals import journal_of, profile_times, rows_of

from learn.evaluate import Bench
from learn.frame import CleanFrame, clean
from learn.journal_trace import JournalTrace, journal_trace
from learn.simulation import Topology
from learn.training import (
    LOAD_FACTORS,
    MIN_RUN_ROWS,
    TRAIN_SEEDS,
    Learned,
    learn_from,
    training_bench,
)
from pipelines.workloads import make_workload
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

SLO = targets_from_profile(A40_3B)
TOPOLOGY = Topology(2, 4, profile_times(1.3, 0.7, 1.0), 0.002)


@cache
def journaled() -> tuple[CleanFrame, tuple[JournalTrace, ...]]:
    rows = rows_of(make_workload("mixed", 300, 0, 7.0), TOPOLOGY)
    return clean(rows), (journal_trace(rows),)


@cache
def learned() -> Learned:
    frame, runs = journaled()
    return learn_from(frame, runs, A40_3B, SLO, seed=3)


def bench() -> Bench:
    return training_bench([run.trace for run in journaled()[1]], learned(), SLO, seed=3)


def test_a_journal_tells_lengths_clusters_costs_and_the_cluster_s_size() -> None:
    found = learned()
    assert found.topology.prefill_engines == 2
    assert found.topology.decode_engines == 4
    assert found.topology.overhead_s == found.cost_fit.costs.overhead_s
    step = found.cost_fit.costs.step_time
    assert step.floor_s == pytest.approx(1.3 * A40_3B.step.floor_s, rel=0.05)
    assert step.per_token_beyond_s == pytest.approx(0.7 * A40_3B.step.per_token_beyond_s, rel=0.1)
    assert 2 <= len(found.clusters) <= 8
    assert len(found.compiled.clusters.labels) == 300
    assert found.length_error.rows > 0


def test_clusters_see_the_new_predictor_s_lengths_not_those_of_the_journaled_decisions() -> None:
    frame = journaled()[0]
    assert set(frame.rows["predicted_output_tokens"]) == {200.0}
    centres = learned().clusters.centres_tokens
    assert len({round(value) for value in centres[:, 3]}) > 1


def test_short_runs_are_left_out_of_the_cost_fit_unless_there_is_no_other() -> None:
    frame, (run,) = journaled()
    wrong = journal_of(make_workload("mixed", MIN_RUN_ROWS - 1, 5, 7.0), Topology(2, 4, profile_times(5.0, 5.0, 1.0)))
    with_short = learn_from(frame, [wrong, run], A40_3B, SLO, seed=3)
    assert with_short.cost_fit == learned().cost_fit
    alone = learn_from(frame, [wrong], A40_3B, SLO, seed=3)
    assert alone.cost_fit.rows == MIN_RUN_ROWS - 1


def test_the_search_works_on_the_journaled_rate_and_around_it() -> None:
    trace = journaled()[1][0].trace
    rate = (len(trace) - 1) / trace.arrival_s[-1]
    found = bench()
    assert len(found.traces) == TRAIN_SEEDS
    rates = [(len(again) - 1) / again.arrival_s[-1] for again in found.traces]
    assert rates == pytest.approx([rate * LOAD_FACTORS[k % len(LOAD_FACTORS)] for k in range(TRAIN_SEEDS)])
    assert len({again.prompt_tokens.tobytes() for again in found.traces}) == TRAIN_SEEDS
    for again, predicted in zip(found.traces, found.predicted, strict=True):
        predictor = learned().lengths.predictor()
        assert predicted[:5].tolist() == [predictor.predict(float(tokens), None) for tokens in again.prompt_tokens[:5]]


def test_several_runs_make_one_longer_trace() -> None:
    trace = journaled()[1][0].trace
    found = training_bench([trace, replace(trace, name="again")], learned(), SLO, seed=0)
    assert {len(again) for again in found.traces} == {2 * len(trace)}
