"""Saturation: the rate at which round robin is in mid-collapse, where policies differ."""

from collections.abc import Sequence

import numpy as np

from learn.simulation import Topology, simulate
from learn.trace import Trace
from serve_table.errors import TraceError
from serve_table.policy import policy
from serve_table.slo import SloTargets

MID_COLLAPSE = 0.78
"""Goodput of round robin at the operating point (the study behind facts of which policies win)."""

BISECTIONS = 14
MAX_RATE = 1e4


def round_robin_goodput(traces: Sequence[Trace], topology: Topology, slo: SloTargets, requests_per_s: float) -> float:
    """Mean goodput of round robin over the traces, each scaled to the rate."""
    chosen = policy("round_robin")
    runs = (simulate(trace.scaled_to(requests_per_s), topology, chosen, slo, 1.0) for trace in traces)
    return float(np.mean([run.goodput for run in runs]))


def saturation_rate(
    traces: Sequence[Trace], topology: Topology, slo: SloTargets, goodput: float = MID_COLLAPSE
) -> float:
    """Requests per second at which round robin's mean goodput over the traces falls through `goodput`.

    Raises TraceError where even a rate near zero does not reach it: the targets cannot be met then.
    """
    low, high = 0.01, 1.0
    if round_robin_goodput(traces, topology, slo, low) < goodput:
        raise TraceError(
            f"trace {traces[0].name!r}: round robin misses its targets even when idle (goodput below {goodput:.2f}); "
            "raise the SLO targets or use a shorter workload"
        )
    while round_robin_goodput(traces, topology, slo, high) >= goodput:
        low, high = high, high * 2.0
        if high > MAX_RATE:
            return low
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        if round_robin_goodput(traces, topology, slo, middle) >= goodput:
            low = middle
        else:
            high = middle
    return low
