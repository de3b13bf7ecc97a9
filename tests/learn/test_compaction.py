from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic_rows import journal_row, line_of, varied_rows, write_journal

from learn.compaction import compact, read_parquet
from learn.frame import clean_journal
from serve_table.errors import JournalError


def test_parquet_gives_back_the_same_frame(tmp_path: Path) -> None:
    rows = [*varied_rows(20), journal_row(30, status="aborted"), journal_row(31, output_tokens=1, tpot_s=None)]
    rows += [journal_row(32, stream=False, ttft_s=None, slo_met=None), journal_row(33, output_tokens=None)]
    (segment,) = write_journal(tmp_path / "journal", rows)
    segment.write_bytes(segment.read_bytes() + b"torn")
    parquet = tmp_path / "rows.parquet"
    written = compact([segment], parquet)
    read = read_parquet(parquet)
    pd.testing.assert_frame_equal(read.rows, written.rows)
    pd.testing.assert_frame_equal(read.rows, clean_journal([segment]).rows)
    assert read.report == written.report
    assert len(read.report.broken) == 1
    assert (read.cluster_kind, read.dilation, read.digests) == ("emulated", 1.0, written.digests)
    assert pq.read_schema(parquet).field("slo_met").type == pa.bool_()


def test_compaction_is_done_once_and_follows_the_journal(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    (segment,) = write_journal(folder, varied_rows(5))
    parquet = tmp_path / "rows.parquet"
    compact([folder], parquet)
    first_write = parquet.stat().st_mtime_ns
    compact([folder], parquet)
    assert parquet.stat().st_mtime_ns == first_write
    with open(segment, "ab") as file:
        file.write(line_of(journal_row(90)))
    assert len(compact([folder], parquet)) == 6
    assert len(read_parquet(parquet)) == 6


def test_strict_compaction_refuses_what_a_lenient_one_skipped(tmp_path: Path) -> None:
    (segment,) = write_journal(tmp_path / "journal", varied_rows(3))
    segment.write_bytes(segment.read_bytes() + b"torn")
    parquet = tmp_path / "rows.parquet"
    compact([segment], parquet)
    with pytest.raises(JournalError, match="without --strict"):
        compact([segment], parquet, strict=True)


def test_another_selection_compacts_again(tmp_path: Path) -> None:
    rows = [*varied_rows(3), journal_row(50, cluster_kind="vllm-cpu")]
    write_journal(tmp_path / "journal", rows)
    parquet = tmp_path / "rows.parquet"
    assert len(compact([tmp_path / "journal"], parquet, cluster_kind="emulated")) == 3
    assert len(compact([tmp_path / "journal"], parquet, cluster_kind="vllm-cpu")) == 1


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.parquet"
    text.write_text("not parquet")
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), other)
    for path in (text, other, tmp_path / "absent.parquet"):
        with pytest.raises(JournalError, match="is not a compacted journal"):
            read_parquet(path)
