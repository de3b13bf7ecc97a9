"""Azure and BurstGPT imports: what is kept, what is counted, what is refused."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipelines.imports.azure import import_azure
from pipelines.imports.burstgpt import import_burstgpt
from pipelines.imports.options import ImportOptions
from pipelines.traces import PUBLIC_TRACES, load_trace, traces_folder
from serve_table.errors import ConfigError, TraceError

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def azure_file(tmp_path, rows, end=""):
    path = tmp_path / "azure.csv"
    path.write_text("\n".join([AZURE_HEADER, *rows]) + end)
    return path


def burst_file(tmp_path, rows):
    path = tmp_path / "burst.csv"
    lines = [f"{time},ChatGPT,{prompt},{output},{prompt + output},Conversation log" for time, prompt, output in rows]
    path.write_text("\n".join([BURST_HEADER, *lines]) + "\n")
    return path


def test_azure_rows_become_requests_with_exact_times(tmp_path):
    path = azure_file(
        tmp_path, ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"], end="\r\n"
    )
    trace, report = import_azure(path)
    assert trace.arrival_s == pytest.approx([0.0, 4.314579], abs=1e-9)
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]
    assert (report.rows_read, report.rows_kept, report.rejected, report.fixed) == (2, 2, (), ())
    assert any("SLO classes drawn at random" in note for note in trace.notes)


def test_azure_rows_that_cannot_be_used_are_counted_by_reason_with_a_line(tmp_path):
    path = azure_file(
        tmp_path,
        [
            "2023-11-16 18:15:46.0000000,374,44",
            "yesterday,374,44",
            "2023-11-16 18:15:47.0000000,,44",
            "2023-11-16 18:15:48.0000000,12.5,44",
            "2023-11-16 18:15:49.0000000,12,0",
            "",
            "2023-11-16 18:15:50.0000000,1e30,4",
            "2023-11-16 18:15:45.0000000,100,5",
        ],
    )
    trace, report = import_azure(path)
    assert trace.prompt_tokens.tolist() == [100, 374]
    assert {(finding.reason, finding.n_rows, finding.example_line) for finding in report.rejected} == {
        ("TIMESTAMP is missing or no date and time", 1, 3),
        ("ContextTokens is missing or not a number", 1, 4),
        ("ContextTokens is not a whole number", 1, 5),
        ("GeneratedTokens is below 1", 1, 6),
        ("ContextTokens is above 100,000,000", 1, 8),
    }
    assert [(finding.reason, finding.example_line) for finding in report.fixed] == [("out of order: sorted by time", 9)]
    assert report.rows_read == 7
    text = "\n".join(report.lines())
    assert "7 rows read, 2 kept" in text
    assert "1 GeneratedTokens is below 1 (line 6)" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: the file is empty"),
        (b" \n\n", "line 1: the file is empty"),
        (
            b"TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n",
            "line 1: no column GeneratedTokens; it has TIMESTAMP, Con",
        ),
        (AZURE_HEADER.encode() + b"\n", "line 1: a header and no rows"),
        (AZURE_HEADER.encode() + b"\n2023-11-16 18:15:46,3,4\n2023-11-16 18:15:4", "line 3: the last line is cut off"),
        (AZURE_HEADER.encode() + b"\n2023-11-16 18:15:46,3,4\n2023-11-16 18:15:47,3,4,5,6\n", "line 3: .*saw 5"),
        (AZURE_HEADER.encode() + b'\n2023-11-16 18:15:46,"3,4\n', "line 2: EOF inside string"),
        (AZURE_HEADER.encode() + b"\n2023-11-16 18:15:46,3,4\n\xff\xfe\n", "line 3: not text"),
        (AZURE_HEADER.encode() + b"\n2023-11-16 18:15:46,3,4\n\0\0\0\n", "line 3: a NUL byte"),
        (AZURE_HEADER.encode() + b"\nx,3,4\n", "no usable row of 1: 1 TIMESTAMP is missing .*line 2"),
    ],
)
def test_malformed_files_are_refused_with_file_line_and_advice(tmp_path, content, message):
    path = tmp_path / "azure.csv"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as raised:
        import_azure(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"cannot read the trace .*none\.csv: No such file"):
        import_azure(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="cannot read the trace"):
        import_azure(tmp_path)


@settings(max_examples=60, deadline=None)
@given(content=st.one_of(st.binary(max_size=200), st.text(alphabet='0123456789.,-:"\n eTNa', max_size=200)))
def test_any_content_is_a_trace_or_a_trace_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "azure.csv"
    body = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(AZURE_HEADER.encode() + b"\n" + body)
    try:
        trace, report = import_azure(path)
    except TraceError as error:
        assert "\n" not in str(error)
    else:
        assert len(trace) == report.rows_kept
        assert report.rows_read == report.rows_kept + sum(finding.n_rows for finding in report.rejected)


CELLS = st.one_of(st.floats(), st.integers(), st.sampled_from(["", "x", "1e999", "-Infinity", "5e-324"]))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=6))
@example(rows=[(-1.7e308, 1, 1), (1.7e308, 1, 1)])
@example(rows=[(2, "inf", "-inf"), (2, 1.7e308, 1.7e308)])
@example(rows=[(3, 1, 1)] * 120 + [(1.7e308, 1, 1), (1.6e308, 1, 1)])
def test_any_numbers_are_a_request_or_counted(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("any") / "burst.csv"
    lines = [f"{time},ChatGPT,{prompt},{output},0,API log" for time, prompt, output in [*rows, (1, 600, 5)]]
    path.write_text("\n".join([BURST_HEADER, *lines]) + "\n")
    trace, report = import_burstgpt(path, ImportOptions(max_model_len_tokens=10**9))
    assert report.rows_read == len(rows) + 1
    assert report.rows_read == len(trace) + sum(finding.n_rows for finding in report.rejected)


TEN_ROWS = [(5, 472, 18), (45, 1087, 230), (118, 417, 0), (160, 1361, 0), (214, 300, 40)]
TEN_ROWS += [(1000, 90, 10), (1001, 91, 0), (1002, 92, 12), (1003, 93, 13), (1004, 94, 14)]


def test_f33_failed_rows_are_skipped_and_counted(tmp_path):
    trace, report = import_burstgpt(burst_file(tmp_path, TEN_ROWS))
    assert len(trace) == 7
    assert trace.output_tokens.min() >= 1
    assert [(finding.reason, finding.n_rows, finding.example_line) for finding in report.rejected] == [
        ("Response tokens are 0: a failed request", 3, 4)
    ]
    assert "7 kept" in report.lines()[0]


def test_f33_a_slice_by_time_starts_at_its_own_zero(tmp_path):
    # Times count from the first usable row, which the file has at 5 s.
    options = ImportOptions(from_s=995.0, to_s=998.0)
    trace, report = import_burstgpt(burst_file(tmp_path, TEN_ROWS), options)
    assert trace.prompt_tokens.tolist() == [90, 92]
    assert trace.arrival_s.tolist() == [0.0, 2.0]
    assert report.rows_outside_slice == 5
    skipped, _ = import_burstgpt(burst_file(tmp_path, TEN_ROWS), ImportOptions(start=1, n_requests=2))
    assert skipped.prompt_tokens.tolist() == [1087, 300]


def test_f33_the_quiet_head_is_warned_of_and_a_busy_slice_is_not(tmp_path):
    quiet = [(100 * i, 50, 5) for i in range(30)]
    busy = [(3000 + i // 3, 50, 5) for i in range(900)]
    path = burst_file(tmp_path, quiet + busy)
    for capacity in (3.0, None):
        _, head = import_burstgpt(path, ImportOptions(n_requests=30, capacity_requests_per_s=capacity))
        _, slice_ = import_burstgpt(path, ImportOptions(from_s=3000.0, capacity_requests_per_s=capacity))
        assert any("far below" in warning for warning in head.warnings)
        assert slice_.warnings == ()
        assert any("rate over the file: 0.01" in line for line in head.lines())


def test_f33_session_columns_are_allowed(tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "0.5,-1,2.5,GPT-4,10,20,30,API log\n1.25,-1,2.5,GPT-4,11,21,32,API log\n"
    )
    trace, _ = import_burstgpt(path)
    assert trace.arrival_s.tolist() == [0.0, 0.75]


def test_rows_beyond_the_context_are_dropped_never_shortened(tmp_path):
    path = burst_file(tmp_path, [(0, 100, 10), (1, 990, 11), (2, 990, 10)])
    trace, report = import_burstgpt(path, ImportOptions(max_model_len_tokens=1000))
    assert trace.prompt_tokens.tolist() == [100, 990]
    assert trace.output_tokens.tolist() == [10, 10]
    assert [(finding.n_rows, finding.example_line) for finding in report.rejected] == [(1, 3)]


def test_classes_follow_the_seed_and_stay_with_their_rows_in_every_slice(tmp_path):
    path = burst_file(tmp_path, [(i, i + 1, 10) for i in range(400)])
    whole, _ = import_burstgpt(path, ImportOptions(seed=3))
    part, _ = import_burstgpt(path, ImportOptions(seed=3, start=100, n_requests=50))
    other, _ = import_burstgpt(path, ImportOptions(seed=4))
    assert np.array_equal(part.slo_class, whole.slo_class[100:150])
    assert not np.array_equal(whole.slo_class, other.slo_class)
    assert 0.2 < whole.slo_class.mean() < 0.4


def test_an_empty_slice_says_what_there_is(tmp_path):
    path = burst_file(tmp_path, TEN_ROWS)
    with pytest.raises(TraceError, match=r"the slice is empty: 0 of 7 usable rows .* spans 0 to 999 s"):
        import_burstgpt(path, ImportOptions(from_s=2000.0))
    _, report = import_burstgpt(path, ImportOptions(n_requests=100))
    assert "only 7 of the 100 requests asked for" in report.warnings[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"from_s": 5.0, "to_s": 5.0}, "not before"),
        ({"from_s": float("nan")}, "finite"),
        ({"start": -1}, "start"),
        ({"n_requests": 0}, "n_requests"),
        ({"tight_share": 1.5}, "tight_share"),
        ({"max_model_len_tokens": 0}, "max_model_len_tokens"),
    ],
)
def test_bad_options_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        ImportOptions(**fields)


@pytest.mark.skipif(traces_folder() is None, reason="no folder of public traces (RUTTER_TRACES)")
@pytest.mark.parametrize(("name", "n_rows"), [("azure-conv", 19_366), ("azure-code", 8_819)])
def test_the_public_azure_traces_are_kept_whole(name, n_rows):
    if not (traces_folder() / PUBLIC_TRACES[name][1]).exists():
        pytest.skip(f"{name} is not among the public traces here")
    trace, report = load_trace(name, ImportOptions(max_model_len_tokens=16_384))
    assert (report.rows_read, len(trace), report.rejected, report.fixed) == (n_rows, n_rows, (), ())
    assert trace.name == name
    assert 3_400 < trace.arrival_s[-1] < 3_600
