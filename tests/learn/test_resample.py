"""Resampled traces: the same kind of load, other arrivals, prefixes of their own."""

from itertools import chain

import numpy as np
import pytest

from learn.resample import BLOCK_REQUESTS, resampled
from learn.trace import Trace
from pipelines.workloads import make_workload


def burstiness(trace: Trace, window_s: float = 2.0) -> float:
    """Variance over mean of the requests in windows: 1 for Poisson arrivals."""
    counts = np.bincount((trace.arrival_s / window_s).astype(int))
    return float(counts.var() / counts.mean())


def chain_of(trace: Trace, i: int) -> list[int]:
    start = trace.chain_start[i]
    return [int(block) for block in trace.block_ids[start : start + trace.chain_length[i]]]


def test_bursts_rate_and_lengths_stay_roughly() -> None:
    trace = make_workload("mixed", 2000, 0, 10.0)
    found = [resampled(trace, seed) for seed in range(8)]
    assert all(len(again) == len(trace) for again in found)
    for measure, tolerance in (
        (burstiness, 0.25),
        (lambda again: again.arrival_s[-1], 0.15),
        (lambda again: again.prompt_tokens.mean(), 0.1),
        (lambda again: again.output_tokens.mean(), 0.1),
        (lambda again: again.slo_class.mean(), 0.1),
        (lambda again: np.std(np.diff(again.arrival_s)) / np.mean(np.diff(again.arrival_s)), 0.1),
    ):
        assert np.mean([measure(again) for again in found]) == pytest.approx(measure(trace), rel=tolerance)
    assert burstiness(trace) > 5.0
    # Single requests drawn at random would lose the bursts.
    assert np.mean([burstiness(resampled(trace, seed, block_requests=1)) for seed in range(4)]) < 0.5 * burstiness(
        trace
    )


def test_requests_keep_their_own_lengths_and_gaps() -> None:
    trace = make_workload("multi-turn", 300, 0, 5.0)
    again = resampled(trace, 3)
    rows = {pair: i for i, pair in enumerate(zip(trace.prompt_tokens, trace.output_tokens, strict=True))}
    found = [rows[pair] for pair in zip(again.prompt_tokens, again.output_tokens, strict=True)]
    assert again.chain_length.tolist() == trace.chain_length[found].tolist()
    assert again.slo_class.tolist() == trace.slo_class[found].tolist()
    inside = np.arange(1, len(found)) % BLOCK_REQUESTS != 0
    gaps_s = np.diff(trace.arrival_s, prepend=0.0)
    np.testing.assert_allclose(np.diff(again.arrival_s)[inside], gaps_s[found[1:]][inside])
    assert (np.diff(found)[inside] == 1).all()


def test_copies_of_a_request_share_no_prefix() -> None:
    trace = make_workload("multi-turn", 120, 0, 5.0)
    again = resampled(trace, 0, n_requests=600)
    rows = {pair: i for i, pair in enumerate(zip(trace.prompt_tokens, trace.output_tokens, strict=True))}
    copies: dict[int, list[set[int]]] = {}
    for i, pair in enumerate(zip(again.prompt_tokens, again.output_tokens, strict=True)):
        copies.setdefault(rows[pair], []).append(set(chain_of(again, i)))
    assert max(len(chains) for chains in copies.values()) > 3
    for chains in copies.values():
        assert sum(len(blocks) for blocks in chains) == len(set().union(*chains))


def test_requests_of_one_draw_share_prefixes_as_before() -> None:
    trace = make_workload("multi-turn", 200, 0, 5.0)
    again = resampled(trace, 1, n_requests=BLOCK_REQUESTS)
    start = trace.prompt_tokens.tolist().index(again.prompt_tokens[0])
    original = [chain_of(trace, start + i) for i in range(BLOCK_REQUESTS)]
    drawn = [chain_of(again, i) for i in range(BLOCK_REQUESTS)]
    renamed = dict(zip(chain.from_iterable(original), chain.from_iterable(drawn), strict=True))
    assert [[renamed[block] for block in blocks] for blocks in original] == drawn
    assert len(set(renamed.values())) == len(renamed)
    assert set(renamed.values()) == set(range(len(renamed)))


def test_equal_seeds_give_equal_traces_and_others_differ() -> None:
    trace = make_workload("multi-turn", 400, 0, 5.0)
    first, second, other = resampled(trace, 5), resampled(trace, 5), resampled(trace, 6)
    for column in ("arrival_s", "prompt_tokens", "chain_start", "block_ids"):
        assert np.array_equal(getattr(first, column), getattr(second, column))
    assert not np.array_equal(first.prompt_tokens, other.prompt_tokens)
    assert first.name != other.name


@pytest.mark.parametrize("n_requests", [2, 49, 51, 130])
def test_short_traces_and_any_count_give_valid_traces(n_requests: int) -> None:
    for n in (2, 30, 60):
        again = resampled(make_workload("multi-turn", n, 0, 5.0), 0, n_requests)
        assert len(again) == n_requests
        assert again.arrival_s[0] == 0.0
    assert len(resampled(make_workload("chat", 1, 0, 5.0), 0, n_requests)) == 1
    assert len(resampled(make_workload("chat", 10, 0, 5.0), 0, 0)) == 10
