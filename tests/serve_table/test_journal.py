"""The journal: rows come back as they were written, whatever a crash left behind them (F19)."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_row import sample_row

from serve_table.errors import JournalError
from serve_table.journal import FORMAT_VERSION, JournalReader, JournalWriter, Row, free_bytes, segment_number

ROWS = [sample_row(request_id=f"r{i}") for i in range(3)]
LINES = [msgspec.json.encode(row) + b"\n" for row in ROWS]
WHOLE = b"".join(LINES)


def read(content: bytes, folder: Path) -> tuple[list[Row], JournalReader]:
    (folder / "journal-000001.jsonl").write_bytes(content)
    reader = JournalReader([folder])
    return list(reader), reader


def test_rows_come_back_in_order_over_segments(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "new" / "folder", segment_bytes=len(LINES[0]) + 10)
    for row in ROWS:
        writer.append(row)
    writer.close()
    paths = sorted((tmp_path / "new" / "folder").iterdir())
    assert [path.name for path in paths] == [f"journal-{n:06d}.jsonl" for n in (1, 2, 3)]
    assert [segment_number(path) for path in paths] == [1, 2, 3]
    assert list(JournalReader([tmp_path / "new" / "folder"])) == ROWS
    assert list(JournalReader(paths[1:])) == ROWS[1:]


def test_a_new_writer_starts_a_new_segment(tmp_path: Path) -> None:
    for row in ROWS:
        writer = JournalWriter(tmp_path)
        writer.append(row)
        writer.close()
    assert len(list(tmp_path.iterdir())) == 3
    assert list(JournalReader([tmp_path], strict=True)) == ROWS


def test_rows_are_strict_json_without_prompt_text() -> None:
    def refuse(text: str) -> None:
        raise AssertionError(text)

    assert json.loads(LINES[0], parse_constant=refuse)["ttft_s"] == 0.12


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, len(WHOLE)))
def test_f19_truncated_anywhere_loses_only_the_torn_row(tmp_path: Path, length: int) -> None:
    rows, reader = read(WHOLE[:length], tmp_path)
    # A last row that lacks only its line end is whole.
    ends = [len(LINES[0]) - 1, len(LINES[0] + LINES[1]) - 1, len(WHOLE) - 1]
    assert rows == ROWS[: sum(end <= length for end in ends)]
    assert len(reader.broken) == (0 if length in (0, *ends, *(end + 1 for end in ends)) else 1)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (b'{"version": 1, "request_id"\n', "truncated"),
        (b"\0" * 4096 + b"\n", "only NUL bytes"),
        (b"not a row\n", "malformed"),
        (b'{"version":1}\n', "missing required field"),
        (b"\xff\xfe\n", "malformed"),
    ],
)
def test_f19_broken_line_in_the_middle_is_counted_with_its_place(tmp_path: Path, broken: bytes, reason: str) -> None:
    rows, reader = read(LINES[0] + broken + LINES[1], tmp_path)
    assert rows == ROWS[:2]
    (place,) = reader.broken
    assert (place.path.name, place.offset_bytes) == ("journal-000001.jsonl", len(LINES[0]))
    assert reason in str(place)
    assert f"at byte {len(LINES[0])}" in str(place)


def test_f19_nul_filled_tail_is_tolerated(tmp_path: Path) -> None:
    rows, reader = read(WHOLE + b"\0" * 4096, tmp_path)
    assert rows == ROWS
    assert len(reader.broken) == 1


def test_f19_strict_reading_stops_at_the_first_broken_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES[0] + b"x\n" + LINES[1])
    with pytest.raises(JournalError, match=rf"a.jsonl at byte {len(LINES[0])}: "):
        list(JournalReader([tmp_path], strict=True))


def test_rows_from_before_kv_events_are_read(tmp_path: Path) -> None:
    old = json.loads(LINES[0])
    del old["cached_tokens_source"]
    rows, reader = read(json.dumps(old).encode() + b"\n", tmp_path)
    assert ([row.cached_tokens_source for row in rows], reader.broken) == ([None], [])


def test_empty_lines_are_no_rows(tmp_path: Path) -> None:
    rows, reader = read(b"\n\r\n" + WHOLE + b"\n", tmp_path)
    assert (rows, reader.broken) == (ROWS, [])


def test_another_format_is_named(tmp_path: Path) -> None:
    newer = msgspec.json.encode(sample_row(version=FORMAT_VERSION + 1)) + b"\n"
    rows, reader = read(newer + LINES[0], tmp_path)
    assert rows == ROWS[:1]
    assert f"row format {FORMAT_VERSION + 1}" in str(reader.broken[0])


def test_missing_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"no journal at .*nowhere"):
        list(JournalReader([tmp_path / "nowhere"]))
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot create the journal folder"):
        JournalWriter(tmp_path / "file" / "journal")


class FullDisk:
    """A file that takes half a line and then refuses."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb", buffering=0)

    def write(self, line: bytes) -> int:
        return self.file.write(line[: len(line) // 2])

    def close(self) -> None:
        self.file.close()


def test_full_disk_is_an_error_and_the_next_row_is_whole(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.append(ROWS[0])
    full: Any = FullDisk(tmp_path / "journal-000002.jsonl")
    writer.close()
    writer._file = full
    with pytest.raises(JournalError, match="No space left on device"):
        writer.append(ROWS[1])
    writer.append(ROWS[2])
    writer.close()
    reader = JournalReader([tmp_path])
    assert list(reader) == [ROWS[0], ROWS[2]]
    assert len(reader.broken) == 1


def test_free_bytes_of_a_folder(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) > 0
