"""Which requests of a collection are left, whatever the attempts before it came to."""

from pathlib import Path

import numpy as np
from synthetic_rows import journal_row, line_of, write_journal

from pipelines.attempts import Attempts


def test_without_attempts_or_journal_everything_is_left(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path)
    assert attempts.left(tmp_path / "journal", 4).tolist() == [0, 1, 2, 3]
    assert attempts.paths() == []


def test_only_answered_requests_of_noted_attempts_are_done(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path)
    journal = tmp_path / "journal"
    assert attempts.begin(np.arange(5)) == "attempt-1"
    rows = [
        journal_row(0, client_id="attempt-1-0"),
        journal_row(1, client_id="attempt-1-3"),
        journal_row(2, client_id="attempt-1-1", status="aborted"),
        journal_row(3, client_id="attempt-9-2"),
        journal_row(4, client_id="attempt-1-77"),
        journal_row(5, client_id=None),
        journal_row(6, client_id="somebody-else"),
        journal_row(7, client_id="attempt-1-warmup-2"),
    ]
    write_journal(journal, rows)
    assert attempts.left(journal, 5).tolist() == [1, 2, 4]
    # The next attempt counts its own requests, which are those left.
    assert attempts.begin(np.array([1, 2, 4])) == "attempt-2"
    write_journal(journal, [journal_row(8, client_id="attempt-2-2"), journal_row(9, client_id="attempt-2-0")])
    assert attempts.left(journal, 5).tolist() == [2]


def test_more_than_nine_attempts_keep_their_order_and_numbers(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path)
    assert [attempts.begin(np.arange(1)) for _ in range(11)][-1] == "attempt-11"
    assert [path.name for path in attempts.paths()] == [f"attempt-{number}.json" for number in range(1, 12)]


def test_f19_a_torn_last_row_is_a_request_that_is_left(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path)
    journal = tmp_path / "journal"
    attempts.begin(np.arange(3))
    (segment,) = write_journal(journal, [journal_row(0, client_id="attempt-1-0")])
    with open(segment, "ab") as file:
        file.write(line_of(journal_row(1, client_id="attempt-1-1"))[:-9])
    assert attempts.left(journal, 3).tolist() == [1, 2]


def test_discarded_attempts_take_their_journal_along(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path)
    journal = tmp_path / "journal"
    attempts.begin(np.arange(3))
    write_journal(journal, [journal_row(0, client_id="attempt-1-0")])
    attempts.discard(journal)
    assert not journal.exists()
    assert attempts.paths() == []
    attempts.discard(journal)
    assert attempts.begin(np.arange(3)) == "attempt-1"
