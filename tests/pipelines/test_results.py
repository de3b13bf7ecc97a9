"""Result files: what is kept, what is replaced, what is refused."""

from pathlib import Path

import msgspec
import pytest
from result_rows import result_row

from pipelines.results import COLUMNS, ResultFile
from serve_table.errors import ConfigError


def test_rows_come_back_as_they_were_put(tmp_path: Path) -> None:
    rows = [
        result_row("a", 1, 0.5, ttft_p99_s=None, kept_pace=None),
        result_row("a", 2, 0.25, counted=False, kept_pace=False, kept_schedule=False, failed=3),
        result_row("b, with a comma", 1, 1.0),
    ]
    file = ResultFile(tmp_path / "new folder" / "r.csv", "emulated")
    assert file.rows() == []
    file.put(rows)
    assert file.rows() == rows
    first = file.path.read_bytes()
    file.put([])
    assert file.path.read_bytes() == first


def test_a_row_of_the_same_key_is_replaced_and_others_stay(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "r.csv", "emulated")
    kept = [
        result_row("a", 2, 0.1),
        result_row("b", 1, 0.1),
        result_row("a", 1, 0.1, workload="chat"),
        result_row("a", 1, 0.1, decode_engines=3),
    ]
    file.put([result_row("a", 1, 0.5), *kept])
    file.put([result_row("a", 1, 0.75)])
    rows = {row.key: row for row in file.rows()}
    assert len(rows) == 5
    assert rows[result_row("a", 1, 0.0).key].goodput == 0.75
    assert all(rows[row.key] == row for row in kept)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no file of live results"),
        ("workload,policy\n", "no file of live results"),
        (",".join(COLUMNS) + "\nmixed,1\n", "line 2 is damaged .2 cells instead of 21"),
        (",".join(COLUMNS) + "\n" + ",".join(["x"] * len(COLUMNS)) + "\n", "line 2 is damaged"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused_and_left(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        ResultFile(path, "emulated").put([result_row("a", 1, 0.5)])
    assert path.read_text() == text


def test_the_columns_that_others_read_are_there() -> None:
    times = [f"{kind}_p{q}_s" for kind in ("ttft", "tpot") for q in (50, 90, 99)]
    asked = ["workload", "prefill_engines", "decode_engines", "policy", "seed", "goodput", *times, "cluster_kind"]
    assert list(COLUMNS[: len(asked)]) == asked
    assert set(COLUMNS) >= {"dilation", "requests_per_s", "requests", "kept_schedule", "kept_pace", "counted"}
    assert len(msgspec.structs.astuple(result_row("a", 1, 0.5))) == len(COLUMNS)
