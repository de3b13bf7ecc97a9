"""Specifications of what a run sends: repeatable, and never overlapping with what it is judged on."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from learn.trace import Trace
from pipelines.traces import traces_folder
from pipelines.workload_spec import (
    DEFAULT_TRACE,
    FALLBACK_WORKLOAD,
    WorkloadSpec,
    default_name,
    held_out,
    requests_of,
)
from serve_table.errors import ConfigError, TraceError

SPEC = WorkloadSpec("chat", 120, 3, 0, 6.0, 0.25, 16_384)


def rate(trace: Trace) -> float:
    return (len(trace) - 1) / float(trace.arrival_s[-1])


def azure_file(folder: Path, n_rows: int) -> Path:
    """A trace of distinct prompt lengths, one request a second."""
    path = folder / "trace.csv"
    lines = [f"2023-11-16 18:{i // 60:02d}:{i % 60:02d}.5000000,{100 + i},{10 + i % 7}" for i in range(n_rows)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    return path


def test_a_specification_gives_the_same_requests_again_also_through_json() -> None:
    first = requests_of(SPEC)
    second = requests_of(msgspec.json.decode(msgspec.json.encode(SPEC), type=WorkloadSpec))
    for column in ("arrival_s", "prompt_tokens", "output_tokens", "slo_class"):
        assert np.array_equal(getattr(first, column), getattr(second, column))
    assert len(first) == 120
    assert rate(first) == pytest.approx(6.0, rel=0.02)
    other = requests_of(msgspec.structs.replace(SPEC, seed=4))
    assert not np.array_equal(first.prompt_tokens, other.prompt_tokens)


def test_synthetic_held_out_traces_have_other_seeds() -> None:
    traces = held_out(SPEC, 3)
    assert [len(trace) for trace in traces] == [120] * 3
    assert len({trace.prompt_tokens.tobytes() for trace in [requests_of(SPEC), *traces]}) == 4
    assert [rate(trace) for trace in traces] == pytest.approx([6.0] * 3, rel=0.02)


def test_imported_held_out_windows_lie_after_the_slice(tmp_path: Path) -> None:
    spec = WorkloadSpec(f"azure:{azure_file(tmp_path, 600)}", 100, 0, 50, 2.0, 0.3, 16_384)
    sent = requests_of(spec)
    assert sent.prompt_tokens.tolist() == list(range(150, 250))
    assert rate(sent) == pytest.approx(2.0)
    traces = held_out(spec, 4)
    for trace in traces:
        assert len(trace) == 100
        assert trace.prompt_tokens.min() >= 250
        assert rate(trace) == pytest.approx(2.0)
    # Apart where the trace is long enough, up to its end.
    firsts = [int(trace.prompt_tokens[0]) for trace in traces]
    assert (firsts[0], firsts[-1] + 99) == (250, 699)
    assert np.diff(firsts).min() >= 100


def test_a_trace_too_short_to_judge_on_says_how_to_ask(tmp_path: Path) -> None:
    spec = WorkloadSpec(f"azure:{azure_file(tmp_path, 180)}", 100, 0, 0, 2.0, 0.3, 16_384)
    with pytest.raises(ConfigError, match=r"80 requests are left after the slice, 100 are needed.*--requests"):
        held_out(spec, 4)


def test_the_default_is_said_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUTTER_TRACES", str(tmp_path))
    assert default_name()[0] == DEFAULT_TRACE
    monkeypatch.setattr("pipelines.workload_spec.traces_folder", lambda: None)
    name, why = default_name()
    assert name == FALLBACK_WORKLOAD
    assert "no traces folder is at hand" in why


def test_what_cannot_be_made_is_an_error_of_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown trace 'nonsense'"):
        requests_of(msgspec.structs.replace(SPEC, name="nonsense"))
    with pytest.raises(ConfigError, match="tight share"):
        requests_of(msgspec.structs.replace(SPEC, tight_share=1.5))
    with pytest.raises(TraceError, match="slice is empty"):
        requests_of(WorkloadSpec(f"azure:{azure_file(tmp_path, 20)}", 100, 0, 30, 2.0, 0.3, 16_384))


@pytest.mark.skipif(traces_folder() is None, reason="no folder of public traces here (RUTTER_TRACES)")
@pytest.mark.parametrize("name", ["azure-conv", "azure-code", "mooncake-conv"])
def test_public_traces_are_long_enough_for_the_default_slice(name: str) -> None:
    spec = WorkloadSpec(name, 1500, 0, 0, 5.0, 0.3, 16_384)
    sent = requests_of(spec)
    assert len(sent) == 1500
    assert (sent.prompt_tokens + sent.output_tokens).max() <= 16_384
    assert [len(trace) for trace in held_out(spec, 4)] == [1500] * 4
