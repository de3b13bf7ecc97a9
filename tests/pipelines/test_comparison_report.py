"""Scores and paired differences of a comparison, on runs whose truth is known."""

import numpy as np
import pytest
from result_rows import result_row
from scipy import stats

from pipelines.comparison_report import HEADER, markdown_lines, scores_of, text_lines, verdict_lines
from pipelines.results import ResultRow

GOODPUT = {"table": (0.90, 0.86, 0.91), "least_loaded": (0.85, 0.80, 0.87), "round_robin": (0.78, 0.75, 0.84)}

LESS = {"table": 0.0025, "least_loaded": 0.0}


def rows() -> list[ResultRow]:
    return [result_row(name, seed, value) for name, values in GOODPUT.items() for seed, value in enumerate(values)]


def test_scores_are_means_over_seeds_with_their_spread_best_first() -> None:
    found = scores_of(rows())
    assert [score.policy for score in found.scores] == ["table", "least_loaded", "round_robin"]
    assert found.best_baseline == "least_loaded"
    for score in found.scores:
        assert score.goodput == pytest.approx(np.mean(GOODPUT[score.policy]))
        assert score.spread == pytest.approx(np.std(GOODPUT[score.policy], ddof=1))
        assert score.times_s == pytest.approx((0.2, 0.4, 0.02))
        assert score.seeds == (0, 1, 2)


def test_differences_to_the_best_baseline_are_paired_by_seed() -> None:
    found = scores_of(rows())
    for score in found.scores:
        if score.policy == "least_loaded":
            assert score.difference is None
            continue
        assert score.difference is not None
        low, high = stats.ttest_rel(GOODPUT[score.policy], GOODPUT["least_loaded"]).confidence_interval(0.95)
        assert (score.difference.low, score.difference.high) == pytest.approx((low, high))
    (verdict,) = verdict_lines(found)
    assert verdict.startswith("Policy table is better than the best baseline, least_loaded: goodput ")
    assert verdict.endswith("+0.050 [+0.025, +0.075], paired over 3 seeds.")


def test_a_run_that_does_not_count_enters_nothing_but_is_told() -> None:
    spoilt = [
        result_row("table", 2, 0.0, counted=False, kept_pace=False, failed=7),
        result_row("round_robin", 2, 0.0, counted=False, kept_schedule=False),
        result_row("round_robin", 1, 0.0, counted=False),
    ]
    kept = [row for row in rows() if (row.policy, row.seed) not in {(row.policy, row.seed) for row in spoilt}]
    found = scores_of([*kept, *spoilt])
    table = found.learned
    assert table is not None
    assert (table.goodput, table.seeds, table.failed) == (pytest.approx(0.88), (0, 1), 0)
    # The pair is of the two seeds that count for both.
    assert table.difference is not None
    assert (table.difference.n_seeds, table.difference.mean) == (2, pytest.approx(0.055))
    assert verdict_lines(found)[1:] == [
        "Not all policies have the same seeds: their means are of different arrivals, differences are not.",
        "table, seed 2, does not count: the engines were late.",
        "round_robin, seed 2, does not count: the load was late.",
        "round_robin, seed 1, does not count: its gates are not on record.",
    ]


def test_one_seed_has_a_difference_but_no_interval_and_no_verdict() -> None:
    found = scores_of([row for row in rows() if row.seed == 0])
    assert found.learned is not None
    assert str(found.learned.difference) == "+0.050"
    assert verdict_lines(found) == [
        "Policy table is not to be told from the best baseline, least_loaded: goodput +0.050, paired over 1 seed."
    ]


def test_equal_differences_of_a_request_do_not_make_a_verdict() -> None:
    found = scores_of([result_row(name, seed, 0.8 - less) for seed in range(2) for name, less in LESS.items()])
    (verdict,) = verdict_lines(found)
    assert verdict.startswith("Policy table is level with the best baseline, least_loaded: goodput -0.00")
    assert "[-0.025, +0.020], paired over 2 seeds" in verdict


def test_nothing_that_counts_and_baselines_alone_are_reported_too() -> None:
    none = scores_of([result_row("table", 0, 0.5, counted=False)])
    assert (none.scores, none.best_baseline) == ((), None)
    assert text_lines(none)[-1] == "table, seed 0, does not count: its gates are not on record."
    alone = scores_of([row for row in rows() if row.policy == "table"])
    assert alone.learned is not None
    assert alone.learned.difference is None
    assert verdict_lines(alone) == []


def test_both_tables_show_every_policy_and_times_that_are_missing() -> None:
    found = scores_of([*rows(), result_row("always_local", 0, 0.1, tpot_p90_s=None, failed=5)])
    text, markdown = text_lines(found), markdown_lines(found)
    assert text[1] == "mixed at 10.1 requests/s, 400 requests a run"
    assert text[3].split()[:3] == ["table", "0.890", "0.026"]
    assert [line.split()[0] for line in text[3:7]] == ["table", "least_loaded", "round_robin", "always_local"]
    assert markdown[3] == f"| {' | '.join(HEADER)} |"
    assert markdown[4].count("|") == markdown[3].count("|")
    assert markdown[8] == "| always_local | 0.100 | - | 200.0 ms | 400.0 ms | - | -0.750 | 5 | 1 |"


def test_the_learned_policy_is_not_held_against_other_forms_of_itself() -> None:
    found = scores_of([*rows(), *(result_row("price", seed, 0.95) for seed in range(3))])
    assert (found.learned_policy, found.best_baseline) == ("price", "least_loaded")
    assert [verdict.split(",")[0] for verdict in verdict_lines(found)] == [
        "Policy price is better than the best baseline"
    ]
