"""Traces by name."""

import numpy as np
import pytest

from pipelines.traces import load_trace, trace_by_name, trace_names, traces_folder
from pipelines.workloads import make_workload
from serve_table.errors import ConfigError, TraceError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of small stand-ins for the public traces."""
    rows = "\n".join(f"2023-11-16 18:00:{i:02d}.0000000,{100 + i},{10 + i}" for i in range(40))
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    lines = [
        f'{{"timestamp": {500 * i}, "input_length": 1200, "output_length": 9, "hash_ids": [0, {i}]}}' for i in range(9)
    ]
    (tmp_path / "mooncake_conversation_trace.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("RUTTER_TRACES", str(tmp_path))
    return tmp_path


def test_public_traces_are_found_by_name_and_scaled_in_time_only(folder):
    assert traces_folder() == folder
    own = trace_by_name("azure-conv", 20, seed=1)
    scaled = trace_by_name("azure-conv", 20, seed=1, requests_per_s=5.0)
    assert own.name == "azure-conv"
    assert own.arrival_s[-1] == pytest.approx(19.0)
    assert scaled.arrival_s[-1] == pytest.approx(19 / 5.0)
    assert np.array_equal(own.prompt_tokens, scaled.prompt_tokens)
    assert any("40 rows read, 20 kept" in note for note in own.notes)
    assert "time scaled to 5 requests/s" in scaled.notes


def test_start_skips_requests_and_none_takes_all(folder):
    assert trace_by_name("azure-conv", 5, 1, start=10).prompt_tokens.tolist() == [110, 111, 112, 113, 114]
    assert len(trace_by_name("azure-conv", None, 1)) == 40
    assert len(trace_by_name("azure-conv", None, 1, from_s=10.0, to_s=20.0)) == 10


def test_mooncake_takes_a_divisor_and_azure_does_not(folder):
    trace = trace_by_name("mooncake-conv", None, 1, length_divisor=4)
    assert (trace.hash_block_tokens, trace.prompt_tokens[0]) == (128, 300)
    with pytest.raises(ConfigError, match="Mooncake traces only"):
        trace_by_name("azure-conv", None, 1, length_divisor=4)


def test_own_files_are_given_as_format_and_path(folder):
    trace, report = load_trace(f"azure:{folder / 'AzureLLMInferenceTrace_conv.csv'}")
    assert len(trace) == report.rows_kept == 40
    with pytest.raises(TraceError, match="No such file"):
        load_trace("burstgpt:/nowhere/BurstGPT_1.csv")


def test_synthetic_names_make_the_workload_and_can_be_windowed():
    whole = make_workload("mixed", 60, 3, 10.0)
    part = trace_by_name("mixed", 20, 3, 10.0, start=40)
    assert np.array_equal(part.prompt_tokens, whole.prompt_tokens[40:])
    with pytest.raises(ConfigError, match="give the number of requests and their rate"):
        trace_by_name("mixed", 20, 3)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"known: mixed, chat, .*mooncake-conv.* or a file as azure\|mooncake\|burstgpt:PATH"
    ):
        trace_by_name("azure", 10, 1)
    assert {"mixed", "multi-turn", "azure-conv", "mooncake-conv"} <= set(trace_names())


def test_absent_folders_are_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("RUTTER_TRACES", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="which is no folder"):
        traces_folder()
    monkeypatch.delenv("RUTTER_TRACES")
    monkeypatch.setattr("pipelines.traces.__file__", str(tmp_path / "a" / "b" / "traces.py"))
    assert traces_folder() is None
    with pytest.raises(TraceError, match="set RUTTER_TRACES"):
        load_trace("azure-conv")
