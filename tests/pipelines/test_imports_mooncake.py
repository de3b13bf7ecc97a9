"""Mooncake imports: units, order, defects and shared prefixes."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipelines.imports.mooncake import import_mooncake
from pipelines.imports.options import ImportOptions
from pipelines.traces import PUBLIC_TRACES, load_trace, traces_folder
from serve_table.errors import ConfigError, TraceError


def mooncake_file(tmp_path, rows):
    path = tmp_path / "mooncake.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def row(timestamp, input_length, hash_ids, output_length=10):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
    }


def chains(trace):
    return [
        trace.block_ids[start : start + length].tolist()
        for start, length in zip(trace.chain_start, trace.chain_length, strict=True)
    ]


def test_f34_every_defect_of_a_30_row_file_is_counted(tmp_path):
    good = [row(5_000 + 100 * i, 1_024, [7, 1_000 + i]) for i in range(15)]
    defects = [
        row(5_150, 1_024, [7, 8]),  # line 16: out of order
        row(5_050, 1_024, [7, 9]),  # 17: out of order
        row(-3, 600, [1, 2]),  # 18
        '{"timestamp": NaN, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}',  # 19
        {"input_length": 600, "output_length": 5, "hash_ids": [1, 2]},  # 20
        row("5000", 600, [1, 2]),  # 21: a time as text
        row(7_000, 600, [1, 2], output_length=0),  # 22
        {"timestamp": 7_000, "input_length": 600, "hash_ids": [1, 2]},  # 23
        row(7_000, 0, []),  # 24
        row(7_000, 100.5, [1]),  # 25
        row(7_000, 2_000, [7]),  # 26: three full blocks, one id
        row(7_000, 600, [7, 1, 2, 3]),  # 27: two ids too many
        row(7_000, 1_024, [3, 7]),  # 28: 7 after another prefix
        {"timestamp": 7_000, "input_length": 1_024, "output_length": 5},  # 29
        row(7_000, 1_024, [7, 1.5]),  # 30
    ]
    trace, report = import_mooncake(mooncake_file(tmp_path, good + defects))
    assert report.rows_read == 30
    assert {(finding.reason, finding.n_rows, finding.example_line) for finding in report.rejected} == {
        ("timestamp is missing or not a number", 3, 19),
        ("timestamp is negative", 1, 18),
        ("output_length is missing or not a number", 1, 23),
        ("output_length is below 1", 1, 22),
        ("input_length is below 1", 1, 24),
        ("input_length is not a whole number", 1, 25),
    }
    assert {(finding.reason, finding.n_rows, finding.example_line) for finding in report.fixed} == {
        ("out of order: sorted by time", 2, 16),
        ("with fewer hash_ids than full blocks: the rest taken as unshared", 1, 26),
        ("with more hash_ids than blocks: the surplus dropped", 1, 27),
        ("without usable hash_ids: no shared prefix", 2, 29),
        ("with a hash id after another prefix than before: taken as other text", 1, 28),
    }
    assert len(trace) == report.rows_kept == 22
    assert trace.arrival_s[0] == 0.0
    assert np.all(np.diff(trace.arrival_s) >= 0)
    assert trace.arrival_s[:4] == pytest.approx([0.0, 0.05, 0.1, 0.15])  # offset to the first row, sorted
    assert report.warnings == ()


def test_f34_equal_times_keep_the_order_of_the_file(tmp_path):
    path = mooncake_file(tmp_path, [row(100, 10 + i, [i]) for i in range(20)] + [row(50, 999, [1]), row(900, 1, [])])
    trace, _ = import_mooncake(path)
    assert trace.prompt_tokens.tolist() == [999, *range(10, 30), 1]


def test_f34_equal_ids_share_and_ids_that_differ_in_high_bits_do_not(tmp_path):
    ids = [5, 5 + 2**32, 5 + 2**33, 5 + 2**53, 6 + 2**53, 5 + 2**63, 5 + 2**64, -5]
    rows = [row(100 * i, 1_024, [block, 77]) for i, block in enumerate(ids)]
    trace, report = import_mooncake(mooncake_file(tmp_path, rows + [row(900, 1_024, [5 + 2**63, 77])]))
    # Only the two rows of id 5 + 2**63 share anything; 77 after different ids is different text.
    assert trace.chain_length.tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 2]
    assert chains(trace)[5] == chains(trace)[8] == [0, 1]
    assert [finding.n_rows for finding in report.fixed] == [8]


def test_f34_the_partial_last_block_is_not_shared(tmp_path):
    rows = [row(0, 1_000, [1, 2]), row(100, 700, [1, 2]), row(200, 1_024, [1, 2]), row(300, 1_536, [1, 2, 3])]
    trace, report = import_mooncake(mooncake_file(tmp_path, rows))
    assert trace.chain_length.tolist() == [1, 1, 2, 2]
    assert report.fixed == ()  # the same id with different lengths is no defect


def test_shared_blocks_are_those_that_another_kept_row_has(tmp_path):
    rows = [row(0, 2_048, [1, 2, 3, 4]), row(100, 2_048, [1, 2, 5, 6]), row(200, 2_048, [1, 2, 5, 7])]
    path = mooncake_file(tmp_path, rows)
    trace, _ = import_mooncake(path)
    assert chains(trace) == [[0, 1], [0, 1, 2], [0, 1, 2]]
    head, _ = import_mooncake(path, ImportOptions(n_requests=2))
    assert chains(head) == [[0, 1], [0, 1]]


@pytest.mark.parametrize(("unit", "gap", "guess"), [("ms", 0.2, "s"), ("s", 200, "ms")])
def test_f34_an_implausible_rate_names_the_other_unit(tmp_path, unit, gap, guess):
    path = mooncake_file(tmp_path, [row(gap * i, 10, []) for i in range(50)])
    _, wrong = import_mooncake(path, timestamp_unit=unit)
    right_trace, right = import_mooncake(path, timestamp_unit=guess)
    assert any(f"are they in {guess}?" in warning for warning in wrong.warnings)
    assert right.warnings == ()
    assert right_trace.arrival_s[-1] == pytest.approx(49 * 0.2)


def test_length_divisor_shortens_prompts_and_blocks_alike_and_says_so(tmp_path):
    path = mooncake_file(tmp_path, [row(0, 2_100, [1, 2, 3, 4, 9], 40), row(100, 2_300, [1, 2, 3, 4, 8], 50)])
    trace, _ = import_mooncake(path, length_divisor=8)
    assert trace.prompt_tokens.tolist() == [262, 287]
    assert trace.output_tokens.tolist() == [40, 50]
    assert trace.hash_block_tokens == 64
    assert trace.chain_length.tolist() == [4, 4]
    assert "prompts divided by 8, blocks of 64 tokens" in trace.notes


@pytest.mark.parametrize("divisor", [0, -1, 3, 64, 512])
def test_a_divisor_without_whole_blocks_is_refused(tmp_path, divisor):
    with pytest.raises(ConfigError, match="length_divisor"):
        import_mooncake(mooncake_file(tmp_path, [row(0, 10, [])]), length_divisor=divisor)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: the file is empty"),
        (b'{"timestamp": 0, "input_length": 5, "output_length": 5}\n{"timestamp": 1, "inp', "line 2: not JSON"),
        (b'{"timestamp": 0, "input_length": 5, "output_length": 5}\n[1]\n', "line 2: not an object"),
        (b"timestamp,input_length\n0,1\n", "line 1: not JSON"),
        (b"\x1f\x8b\x08\x00", "line 1: not text"),
        (b'{"a": 1}\n', "no usable row of 1: 1 timestamp is missing"),
    ],
)
def test_malformed_files_are_refused_with_file_line_and_advice(tmp_path, content, message):
    path = tmp_path / "mooncake.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as raised:
        import_mooncake(path)
    assert str(path) in str(raised.value)


VALUES = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=3), st.booleans())
OBJECTS = st.fixed_dictionaries(
    {},
    optional={
        "timestamp": VALUES,
        "input_length": VALUES,
        "output_length": VALUES,
        "hash_ids": st.one_of(VALUES, st.lists(st.one_of(st.integers(), VALUES), max_size=4)),
    },
)


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(OBJECTS, min_size=1, max_size=6))
@example(rows=[row(0, np.inf, [1])])
@example(rows=[row(0, np.inf, [1], output_length=-np.inf)])
@example(rows=[row(-1.7e308, 600, [1]), row(1.7e308, 600, [1])])
@example(rows=[row(0, 1.7e308, [1], output_length=1.7e308)])
def test_any_object_is_a_request_or_counted(tmp_path_factory, rows):
    path = mooncake_file(tmp_path_factory.mktemp("any"), rows + [row(1_000, 600, [1, 2])])
    trace, report = import_mooncake(path, ImportOptions(max_model_len_tokens=10**9))
    assert report.rows_read == len(rows) + 1
    assert report.rows_read == len(trace) + sum(finding.n_rows for finding in report.rejected)


def test_f34_requests_of_one_coarse_timestamp_are_spread_over_its_step_in_the_order_of_the_file(tmp_path):
    # Ten requests every three seconds, a millisecond more or less, as the public trace has them.
    stamps = [3_000 * (i // 10) + (i // 10) % 2 for i in range(200)]
    trace, report = import_mooncake(
        mooncake_file(tmp_path, [row(stamp, 100 + i, []) for i, stamp in enumerate(stamps)])
    )
    assert trace.prompt_tokens.tolist() == [100 + i for i in range(200)]
    np.testing.assert_allclose(np.diff(trace.arrival_s), 0.3, atol=1e-3)
    assert [(finding.reason, finding.n_rows) for finding in report.fixed] == [
        ("sharing a timestamp: spread evenly over the file's step of 3 s", 180)
    ]


def test_f34_equal_timestamps_stay_where_they_are_fine_few_or_rare(tmp_path):
    fine = [row(100 * (i // 2), 600, []) for i in range(200)]
    few = [row(3_000 * (i // 10), 600, []) for i in range(50)]
    rare = [row(3_000 * i, 600, []) for i in range(200)] + [row(3_000, 600, [])]
    for rows in (fine, few, rare):
        trace, report = import_mooncake(mooncake_file(tmp_path, rows))
        assert (np.diff(trace.arrival_s) == 0.0).any()
        assert not any("spread" in finding.reason for finding in report.fixed)


@pytest.mark.skipif(
    traces_folder() is None or not (traces_folder() / PUBLIC_TRACES["mooncake-conv"][1]).exists(),
    reason="no Mooncake trace here (RUTTER_TRACES)",
)
def test_the_public_conversation_trace_shares_prefixes():
    trace, report = load_trace("mooncake-conv", ImportOptions(n_requests=2_000, max_model_len_tokens=16_384))
    assert len(trace) == 2_000
    assert [finding.reason for finding in report.fixed] == [
        "sharing a timestamp: spread evenly over the file's step of 3 s"
    ]
    assert np.diff(trace.arrival_s).min() > 0.0
    shared = (trace.chain_length * 512).sum() / trace.prompt_tokens.sum()
    assert 0.2 < shared < 0.9
    assert set(np.unique(trace.block_ids)) == set(range(trace.block_ids.max() + 1))
