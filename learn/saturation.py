"""Saturation: the rate at which round robin is in mid-collapse, where policies differ."""

from collections.abc import Callable, Sequence

import numpy as np

from learn.simulation import Topology, simulate
from learn.trace import Trace
from serve_table.errors import TraceError
from serve_table.policy import policy
from serve_table.slo import SloTargets

MID_COLLAPSE = 0.78
"""Goodput of round robin at the operating point (the study behind facts of which policies win)."""

BISECTIONS = 14
MIN_RATE, MAX_RATE = 0.01, 1e4
COLLISION_SHARE = 0.2
FIRST_RATE = 10.0
RATE_ROUNDS = 4
RATE_TOLERANCE = 0.03


def round_robin_goodput(traces: Sequence[Trace], topology: Topology, slo: SloTargets, requests_per_s: float) -> float:
    """Mean goodput of round robin over the traces, each scaled to the rate."""
    chosen = policy("round_robin")
    runs = (simulate(trace.scaled_to(requests_per_s), topology, chosen, slo, 1.0) for trace in traces)
    return float(np.mean([run.goodput for run in runs]))


def saturation_rate(
    traces: Sequence[Trace], topology: Topology, slo: SloTargets, goodput: float = MID_COLLAPSE
) -> float:
    """Requests per second at which round robin's mean goodput over the traces falls through `goodput`.

    Raises TraceError where no rate does: the targets cannot be met, or never fail to be.
    """

    def met(rate: float) -> bool:
        return round_robin_goodput(traces, topology, slo, rate) >= goodput

    low = 1.0
    if met(low):
        while met(low * 2.0):
            low *= 2.0
            if low > MAX_RATE:
                raise TraceError(
                    f"trace {traces[0].name!r}: its {len(traces[0])} requests do not saturate {topology}, however fast "
                    "they come: take more requests, or give the rate"
                )
    else:
        while not met(low / 2.0):
            low /= 2.0
            if low < MIN_RATE:
                raise _never_met(traces, goodput)
        low /= 2.0
    high = low * 2.0
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        if met(middle):
            low = middle
        else:
            high = middle
    return low


def settled_rate(
    traces_at: Callable[[float], Sequence[Trace]], topology: Topology, slo: SloTargets, rounds: int = RATE_ROUNDS
) -> float:
    """`saturation_rate` to three digits, of traces that are made anew near the rate found.

    Bursts and think times keep their length at another rate, so stretching a synthetic trace is right about its own
    rate only. rounds: 1 where traces are the same at any rate.
    """
    rate = FIRST_RATE
    for _ in range(rounds):
        found = saturation_rate(traces_at(rate), topology, slo)
        settled = abs(found / rate - 1.0) < RATE_TOLERANCE
        rate = found
        if settled:
            break
    return float(f"{rate:.3g}")


def _never_met(traces: Sequence[Trace], goodput: float) -> TraceError:
    gaps_s = np.concatenate([np.diff(trace.arrival_s) for trace in traces])
    together = float(np.mean(gaps_s == 0.0)) if len(gaps_s) else 0.0
    name = f"trace {traces[0].name!r}"
    if together >= COLLISION_SHARE:
        return TraceError(
            f"{name}: {together:.0%} of its requests arrive with the one before, at any rate, so round robin's "
            f"goodput stays below {goodput:.2f}: use a trace with finer timestamps, or give the rate"
        )
    return TraceError(
        f"{name}: round robin misses its targets even when idle (goodput below {goodput:.2f}); "
        "raise the SLO targets or use a shorter workload"
    )
