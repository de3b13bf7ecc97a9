"""Requests of a simulated comparison: training's and tests' never mix."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learn.training import LOAD_FACTORS
from pipelines.grid_traces import TRAINING_WINDOWS, Requests, requests_for, windows_of
from pipelines.workload_spec import HELD_OUT_SEED, WorkloadSpec
from serve_table.errors import ConfigError, TraceError

SEEDS = (HELD_OUT_SEED, HELD_OUT_SEED + 1, HELD_OUT_SEED + 2)
RATE = 5.0


def requests(name: str, n_requests: int = 20, seeds: tuple[int, ...] = SEEDS) -> Requests:
    return requests_for(WorkloadSpec(name, n_requests, 0, 0, 1.0, 0.3, 16_384), seeds)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversation trace of 130 requests, whose prompts tell which they are."""
    lines = [f"2023-11-16 18:{i // 60:02d}:{i % 60:02d}.0000000,{1000 + i},{10 + i % 7}" for i in range(130)]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines])
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text(text)
    monkeypatch.setenv("RUTTER_TRACES", str(tmp_path))
    return tmp_path


@given(st.integers(1, 5000), st.integers(1, 400), st.integers(1, 10))
def test_windows_never_overlap_and_tests_are_later(n_trace: int, n_requests: int, n_tests: int) -> None:
    if n_trace < 2 * n_requests:
        with pytest.raises(ConfigError, match="take a smaller --requests"):
            windows_of("some", n_trace, n_requests, n_tests)
        return
    windows = windows_of("some", n_trace, n_requests, n_tests)
    starts = [*windows.training, *windows.tests]
    assert all(later - earlier >= n_requests for earlier, later in pairwise(starts))
    assert starts[0] == 0
    assert starts[-1] + n_requests <= n_trace
    assert 1 <= len(windows.training) <= TRAINING_WINDOWS
    # Fewer tests only where there is room for no more.
    assert len(windows.tests) == min(n_tests, n_trace // n_requests - 1)


def test_synthetic_requests_are_other_draws_for_rate_search_and_tests() -> None:
    found = requests("mixed")
    parts = [found.training(RATE), found.searched(RATE), list(found.tests(RATE).values())]
    assert [len(part) for part in parts] == [8, len(LOAD_FACTORS), 3]
    drawn = [trace.prompt_tokens.tobytes() for part in parts for trace in part]
    assert len(set(drawn)) == len(drawn)
    assert list(found.tests(RATE)) == list(SEEDS)


def test_the_search_sees_the_rate_and_around_it(folder: Path) -> None:
    for name in ("mixed", "azure-conv"):
        rates = [(len(trace) - 1) / trace.arrival_s[-1] for trace in requests(name).searched(RATE)]
        assert rates == pytest.approx([RATE * factor for factor in LOAD_FACTORS])


def test_no_test_request_of_an_imported_trace_was_trained_on(folder: Path) -> None:
    found = requests("azure-conv")
    trained = {int(tokens) for trace in found.training(RATE) for tokens in trace.prompt_tokens}
    searched = {int(tokens) for trace in found.searched(RATE) for tokens in trace.prompt_tokens}
    tests = found.tests(RATE)
    judged = [int(tokens) for trace in tests.values() for tokens in trace.prompt_tokens]
    assert searched <= trained
    assert len(set(judged)) == len(judged) == 60
    assert max(trained) < min(judged)
    assert list(tests) == list(SEEDS)
    for trace in tests.values():
        assert (len(trace) - 1) / trace.arrival_s[-1] == pytest.approx(RATE)


def test_training_and_tests_draw_their_slo_classes_apart(folder: Path) -> None:
    training, tests, _ = requests("azure-conv").imported or pytest.fail("not imported")
    assert np.array_equal(training.prompt_tokens, tests.prompt_tokens)
    assert not np.array_equal(training.slo_class, tests.slo_class)


def test_a_short_trace_gives_fewer_windows(folder: Path) -> None:
    found = requests("azure-conv", n_requests=50)
    assert list(found.tests(RATE)) == [HELD_OUT_SEED]
    assert len(found.training(RATE)) == 1


def test_seeds_that_could_be_training_s_and_traces_that_are_not_there_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="seed 7 could be training's"):
        requests("mixed", seeds=(HELD_OUT_SEED, 7))
    with pytest.raises(TraceError, match="No such file"):
        requests("azure-code")
    with pytest.raises(ConfigError, match="unknown trace 'nonsense'"):
        requests("nonsense")
