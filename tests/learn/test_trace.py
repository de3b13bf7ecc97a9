"""Traces: what is refused, and cutting and stretching them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from trace_cases import random_trace

from learn.trace import Trace, joined
from serve_table.errors import TraceError


def small_trace(**changes: Any) -> Trace:
    columns: dict[str, Any] = {
        "name": "t",
        "arrival_s": np.array([0.5, 1.0, 1.0, 3.0]),
        "prompt_tokens": np.array([200, 10, 64, 130]),
        "output_tokens": np.array([1, 2, 3, 4]),
        "slo_class": np.array([0, 1, 0, 1]),
        "chain_start": np.array([0, 0, 0, 1]),
        "chain_length": np.array([2, 0, 1, 2]),
        "block_ids": np.array([0, 1, 2]),
    }
    return Trace(**{**columns, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_tokens": np.array([1, 2, 3])}, "columns differ in length"),
        ({"arrival_s": np.array([0.0, 2.0, 1.0, 3.0])}, "in order"),
        ({"arrival_s": np.array([-0.1, 0.0, 1.0, 3.0])}, "from 0 on"),
        ({"arrival_s": np.array([0.0, 1.0, 1.0, np.nan])}, "finite"),
        ({"arrival_s": np.array([0.0, 1.0, 1.0, np.inf])}, "finite"),
        ({"prompt_tokens": np.array([200, 0, 64, 130])}, "at least one prompt"),
        ({"output_tokens": np.array([1, 2, 0, 4])}, "one output token"),
        ({"chain_length": np.array([4, 0, 1, 2])}, "longer than its prompt"),
        ({"chain_start": np.array([2, 0, 0, 1])}, "beyond the block ids"),
        ({"chain_start": np.array([-1, 0, 0, 1])}, "at least 0"),
        ({"chain_length": np.array([2, -1, 1, 2])}, "at least 0"),
        ({"block_ids": np.array([0, -1, 2])}, "at least 0"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_by_its_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=f"trace 't'.*{message}"):
        small_trace(**changes)


def test_a_trace_has_the_length_of_its_columns() -> None:
    assert len(small_trace()) == 4
    assert len(small_trace().head(0)) == 0


def test_scaling_changes_times_only_and_meets_the_rate() -> None:
    trace = random_trace(0)
    scaled = trace.scaled_to(5.0)
    assert (len(scaled) - 1) / scaled.arrival_s[-1] == pytest.approx(5.0)
    assert scaled.arrival_s / trace.arrival_s == pytest.approx(np.full(60, scaled.arrival_s[0] / trace.arrival_s[0]))
    assert scaled.prompt_tokens is trace.prompt_tokens


def test_a_trace_without_a_span_is_not_scaled() -> None:
    for trace in (small_trace().head(0), replace(small_trace(), arrival_s=np.zeros(4))):
        assert trace.scaled_to(5.0) is trace


def test_a_window_counts_its_time_from_its_first_request_and_keeps_the_chains() -> None:
    trace = small_trace()
    window = trace.window(1, 4)
    assert list(window.arrival_s) == [0.0, 0.0, 2.0]
    assert list(window.prompt_tokens) == [10, 64, 130]
    assert list(window.output_tokens) == [2, 3, 4]
    assert list(window.slo_class) == [1, 0, 1]
    chains = [
        list(t.block_ids[start : start + length])
        for t in (trace.window(1, 4), trace)
        for start, length in zip(t.chain_start, t.chain_length, strict=True)
    ]
    assert chains[:3] == chains[4:]
    assert list(trace.head(2).output_tokens) == [1, 2]
    assert len(trace.window(2, 99)) == 2


def test_rows_picks_requests_by_index() -> None:
    picked = small_trace().rows(np.array([0, 3]))
    assert list(picked.arrival_s) == [0.0, 2.5]
    assert list(picked.output_tokens) == [1, 4]


def test_joined_traces_follow_each_other_and_share_no_prefix() -> None:
    trace = small_trace()
    both = joined([trace, trace])
    assert len(both) == 8
    assert both.arrival_s[4] == pytest.approx(3.0 + 1.0 + 0.5)
    chains = [set(both.block_ids[s : s + n]) for s, n in zip(both.chain_start, both.chain_length, strict=True)]
    assert set.union(*chains[:4]).isdisjoint(set.union(*chains[4:]))
    assert joined([trace]) is trace
    with pytest.raises(TraceError, match="different sizes"):
        joined([trace, replace(trace, hash_block_tokens=32)])


def test_joined_traces_may_measure_the_same_blocks_of_text_a_little_differently() -> None:
    trace = replace(small_trace(), prompt_tokens=np.full(4, 400))
    both = joined([trace, replace(trace, hash_block_tokens=trace.hash_block_tokens + 3)])
    assert both.hash_block_tokens == trace.hash_block_tokens
    none = np.zeros(4, np.int64)
    without = replace(trace, chain_start=none, chain_length=none, block_ids=none[:0], hash_block_tokens=999)
    assert joined([without, trace]).hash_block_tokens == trace.hash_block_tokens
