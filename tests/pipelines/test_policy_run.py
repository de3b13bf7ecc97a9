"""What a live run's journal says of it, and what makes it no run."""

from pathlib import Path

import numpy as np
import pytest
from synthetic_rows import journal_row, write_journal

from pipelines.policy_run import Conditions, measured_from, require_answers
from serve_table.errors import ClusterError

GOOD = Conditions(True, True)


def test_rows_find_their_request_and_failures_met_nothing() -> None:
    rows = [
        journal_row(0, client_id="attempt-1-2", ttft_s=0.3, tpot_s=None, slo_met=True),
        journal_row(1, client_id="attempt-1-0", ttft_s=0.1, tpot_s=0.02, slo_met=False),
        journal_row(2, client_id="attempt-1-1", ttft_s=0.1, tpot_s=0.02, slo_met=True, status="upstream_error"),
    ]
    found = measured_from(rows, 3, GOOD)
    assert found.ttft_s.tolist() == [0.1, 0.1, 0.3]
    assert np.isnan(found.tpot_s).tolist() == [False, False, True]
    assert found.slo_met.tolist() == [False, False, True]
    assert found.failed.tolist() == [False, True, False]
    assert (found.n_failed, found.goodput) == (1, pytest.approx(1 / 3))


def test_percentiles_are_of_what_was_measured_and_none_where_nothing_was() -> None:
    rows = [journal_row(i, client_id=f"attempt-1-{i}", ttft_s=0.1 * (i + 1), tpot_s=None) for i in range(5)]
    found = measured_from(rows, 5, GOOD)
    assert found.percentile("ttft_s", 50) == pytest.approx(0.3)
    assert found.percentile("tpot_s", 50) is None


@pytest.mark.parametrize(
    ("kept_schedule", "kept_pace", "kept"),
    [(True, True, True), (True, None, True), (False, True, False), (True, False, False), (False, None, False)],
)
def test_a_run_counts_where_load_and_engines_kept_their_times(
    kept_schedule: bool, kept_pace: bool | None, kept: bool
) -> None:
    assert Conditions(kept_schedule, kept_pace).kept == kept


def test_missing_rows_and_answers_are_an_error(tmp_path: Path) -> None:
    write_journal(tmp_path, [journal_row(0, status="timeout"), journal_row(1, status="timeout")])
    with pytest.raises(ClusterError, match="1 of 3 requests have no journal row"):
        require_answers(tmp_path, 3)
    with pytest.raises(ClusterError, match="none of 2 requests was answered, the first: timeout"):
        require_answers(tmp_path, 2)
    write_journal(tmp_path, [journal_row(2)])
    require_answers(tmp_path, 3)
