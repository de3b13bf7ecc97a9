"""New arrival sequences from one trace: a moving-block bootstrap of requests with their gaps.

Blocks of consecutive requests keep bursts, and most of a conversation, together (Kuensch 1989).
"""

from dataclasses import replace

import numpy as np

from learn.trace import Trace

BLOCK_REQUESTS = 50


def resampled(trace: Trace, seed: int, n_requests: int | None = None, block_requests: int = BLOCK_REQUESTS) -> Trace:
    """As many requests as the trace has (or n_requests), in blocks drawn with replacement.

    A block drawn again brings prefixes of its own: the same conversation twice would find all of itself cached.
    """
    n = len(trace) if n_requests is None else n_requests
    if len(trace) < 2 or n == 0:
        return trace
    block = min(block_requests, len(trace))
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(trace) - block + 1, size=-(-n // block))
    rows = (starts[:, None] + np.arange(block)).ravel()[:n]
    gaps_s = np.diff(trace.arrival_s, prepend=0.0)
    # The first request's gap is unknown; the mean gap stands in for it.
    gaps_s[0] = trace.arrival_s[-1] / (len(trace) - 1)
    arrival_s = np.cumsum(gaps_s[rows])
    chain_start, chain_length, block_ids = _chains(trace, rows)
    return replace(
        trace,
        name=f"{trace.name} resampled {seed}",
        arrival_s=arrival_s - arrival_s[0],
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        slo_class=trace.slo_class[rows],
        chain_start=chain_start,
        chain_length=chain_length,
        block_ids=block_ids,
    )


def _chains(trace: Trace, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Chains of the drawn rows; the n-th copy of a request uses ids of its own."""
    chain_length = trace.chain_length[rows]
    chain_start = np.cumsum(chain_length) - chain_length
    if len(trace.block_ids) == 0:
        return chain_start, chain_length, trace.block_ids
    copies = np.zeros(len(trace), np.int64)
    n_ids = int(trace.block_ids.max()) + 1
    parts = []
    for row in rows.tolist():
        start = trace.chain_start[row]
        parts.append(trace.block_ids[start : start + trace.chain_length[row]] + copies[row] * n_ids)
        copies[row] += 1
    ids = np.concatenate(parts) if parts else trace.block_ids
    _, dense = np.unique(ids, return_inverse=True)
    return chain_start, chain_length, dense.astype(np.int64)
