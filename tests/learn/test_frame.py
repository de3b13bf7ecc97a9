import hashlib
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic_rows import FleetState, journal_row, line_of, varied_rows, write_journal

from learn.drops import REASONS
from learn.frame import COLUMNS, clean, clean_journal, journaled_features
from serve_table.errors import JournalError
from serve_table.journal import JournalReader
from serve_table.situation import LOCAL, REMOTE


def test_features_are_those_of_the_decision() -> None:
    state = FleetState(
        prefill_tokens=3000.0, decode_requests=7.0, prefill_cached_tokens=128.0, decode_cached_tokens=64.0
    )
    row = journal_row(0, fleet=state.row(), slo_class=1)
    frame = clean([row])
    features = journaled_features(row)
    assert frame.features().tolist() == [[500.0, 372.0, 436.0, 200.0, 1.0]]
    assert frame.pressures().tolist() == [[3000.0, 7.0]]
    assert frame.rows.loc[0, list(features._fields)].tolist() == list(features)
    assert frame.rows["action"].tolist() == [REMOTE]
    assert {name: str(dtype) for name, dtype in frame.rows.dtypes.items()} == COLUMNS


@pytest.mark.parametrize(
    ("reason", "given"),
    [
        ("aborted", {"status": "aborted"}),
        ("empty", {"status": "empty"}),
        ("client_error", {"status": "client_error"}),
        ("upstream_error", {"status": "upstream_error"}),
        ("timeout", {"status": "timeout"}),
        ("unavailable", {"status": "unavailable"}),
        ("no_decision", {"fleet": None, "action": None, "executed": None}),
        ("no_decision", {"propensity": None}),
        ("fallback", {"executed": "local"}),
        ("fallback", {"executed_decode_engine": "http://d3"}),
        ("fallback", {"fallback_reason": "handle expired"}),
        ("invalid_fleet", {"prefill_engines": ["http://p0"]}),
        ("invalid_fleet", {"decode_engines": ["http://d0"]}),
        ("missing_feature", {"predicted_output_tokens": math.nan}),
        ("missing_feature", {"prompt_tokens": math.inf}),
        ("missing_feature", {"fleet": FleetState(decode_requests=math.nan).row()}),
        ("non_positive_length", {"prompt_tokens": 0.0}),
        ("non_positive_length", {"output_tokens": 0}),
        ("non_positive_length", {"usage_prompt_tokens": -1}),
        ("unknown_slo_class", {"slo_class": 2}),
        ("invalid_outcome", {"ttft_s": -0.1}),
        ("invalid_outcome", {"tpot_s": math.nan}),
        ("invalid_outcome", {"propensity": 0.0}),
        ("missing_outcome", {"ttft_s": None}),
    ],
)
def test_dropped_rows_are_counted_by_reason(reason: str, given: dict[str, object]) -> None:
    frame = clean([journal_row(0), journal_row(1, **given)])
    assert frame.rows["request_id"].tolist() == ["r000000"]
    assert frame.report.dropped == {reason: 1}
    assert f"dropped 1: {reason} ({REASONS[reason]})" in "\n".join(frame.report.lines())


def test_duplicate_request_ids_count_once() -> None:
    frame = clean([journal_row(0), journal_row(1), journal_row(0, ttft_s=9.0)])
    assert frame.rows["ttft_s"].tolist() == [0.2, 0.2]
    assert frame.report.dropped == {"duplicate_request_id": 1}


def test_mixed_clusters_need_a_selection() -> None:
    rows = [journal_row(0), journal_row(1, cluster_kind="vllm-cpu", dilation=8.0), journal_row(2)]
    with pytest.raises(JournalError, match=r"emulated at dilation 1 \(2 rows\), vllm-cpu at dilation 8 \(1 rows\)"):
        clean(rows)
    frame = clean(rows, cluster_kind="vllm-cpu")
    assert (frame.cluster_kind, frame.dilation, len(frame)) == ("vllm-cpu", 8.0, 1)
    assert frame.report.dropped == {"other_cluster_kind": 2}
    assert clean(rows, dilation=1.0).report.dropped == {"other_dilation": 1}


def test_f15_nulls_stay_null_for_each_objective() -> None:
    rows = [
        journal_row(0),
        journal_row(1, output_tokens=1, tpot_s=None),
        journal_row(2, stream=False, ttft_s=None, tpot_s=None, slo_met=None),
        journal_row(3, output_tokens=None),
        journal_row(4, status="empty", output_tokens=0, ttft_s=None, tpot_s=None),
    ]
    frame = clean(rows)
    assert len(frame) == 4
    assert np.isnan(frame.outcome("tpot_s")).tolist() == [False, True, True, False]
    assert np.isnan(frame.outcome("ttft_s")).tolist() == [False, False, True, False]
    assert frame.rows["slo_met"].isna().tolist() == [False, False, True, False]
    assert frame.rows["output_tokens"].isna().tolist() == [False, False, False, True]
    assert np.nanmedian(frame.outcome("ttft_s")) == 0.2
    assert frame.report.nulls == {"ttft_s": 1, "tpot_s": 2, "output_tokens": 1, "slo_met": 1}


def test_f15_a_whole_answer_s_time_is_no_ttft_and_one_token_has_no_tpot() -> None:
    frame = clean([journal_row(0, stream=False, ttft_s=2.0), journal_row(1, output_tokens=1, tpot_s=0.0)])
    assert np.isnan(frame.outcome("ttft_s")[0])
    assert np.isnan(frame.outcome("tpot_s")[1])


def test_local_rows_have_no_prefill_engine() -> None:
    frame = clean([journal_row(0, action="local")])
    assert frame.rows["action"].tolist() == [LOCAL]
    assert frame.rows["prefill_engine"].isna().tolist() == [True]


def test_no_usable_row_says_why_and_what_to_do() -> None:
    with pytest.raises(JournalError, match=r"no usable row among 2 journal rows: 2 aborted; collect more"):
        clean([journal_row(0, status="aborted"), journal_row(1, status="aborted")])
    with pytest.raises(JournalError, match="no usable row among 0 journal rows; collect more"):
        clean([])


def test_digests_are_of_the_segments_by_name(tmp_path: Path) -> None:
    segments = write_journal(tmp_path, [journal_row(number) for number in range(6)], segment_bytes=4000)
    assert len(segments) > 1
    expected = tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in segments)
    assert clean_journal([tmp_path]).digests == expected
    assert clean_journal(list(reversed(segments))).digests == expected


def test_f19_last_row_cut_at_every_byte(tmp_path: Path) -> None:
    rows = varied_rows(4)
    whole = b"".join(line_of(row) for row in rows[:-1])
    last = line_of(rows[-1])
    clean_prefix = clean(rows[:-1])
    path = tmp_path / "journal-000001.jsonl"
    for kept_bytes in range(1, len(last) - 1):
        path.write_bytes(whole + last[:kept_bytes])
        reader = JournalReader([path])
        assert list(reader) == rows[:-1]
        assert [line.offset_bytes for line in reader.broken] == [len(whole)]
        if kept_bytes % 97 == 1:
            frame = clean_journal([path])
            assert (frame.report.rows_read, len(frame.report.broken)) == (3, 1)
            pd.testing.assert_frame_equal(frame.rows, clean_prefix.rows)
    path.write_bytes(whole + last[:-1])
    assert len(clean_journal([path])) == 4


def test_f19_broken_middle_line_and_nul_tail(tmp_path: Path) -> None:
    rows = varied_rows(5)
    lines = [line_of(row) for row in rows]
    path = tmp_path / "journal-000001.jsonl"
    damaged = {
        len(lines[0]): lines[0] + lines[1][:40] + b"\n" + b"".join(lines[2:]),
        sum(map(len, lines[:-1])): b"".join(lines[:-1]) + bytes(4096),
    }
    remaining = [rows[:1] + rows[2:], rows[:-1]]
    for (offset_bytes, content), kept in zip(damaged.items(), remaining, strict=True):
        path.write_bytes(content)
        frame = clean_journal([path])
        assert [(line.path, line.offset_bytes) for line in frame.report.broken] == [(path, offset_bytes)]
        assert frame.report.counts() == {"broken_line": 1}
        assert f"{path} at byte {offset_bytes}" in "\n".join(frame.report.lines())
        pd.testing.assert_frame_equal(frame.rows, clean(kept).rows)
        with pytest.raises(JournalError, match=f"at byte {offset_bytes}"):
            clean_journal([path], strict=True)


def test_f19_only_broken_lines_says_where(tmp_path: Path) -> None:
    path = tmp_path / "journal-000001.jsonl"
    path.write_bytes(b"not a row\n")
    with pytest.raises(JournalError, match=r"no usable row.*1 broken lines, first: .*000001.jsonl at byte 0"):
        clean_journal([path])


def test_missing_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no journal at"):
        clean_journal([tmp_path / "absent"])
