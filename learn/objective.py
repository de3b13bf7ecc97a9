"""What a search maximises, from a policy's runs and a reference's on the same traces.

Every objective is paired by trace with the reference, a tuned baseline's runs: a trace that is hard for all says
nothing of a policy. The spread of the differences is taken off, or the search would find what wins by luck on one of
the traces (a robust objective in the sense of Beyer and Sendhoff 2007).
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from learn.evaluate import Measured, mean_percentile

SPREAD_WEIGHT = 0.5
"""Standard deviations of the paired differences that are taken off their mean."""
TAIL_LIMIT = 1.1
"""P99 TTFT against the reference's beyond which goodput is not all that counts."""
TAIL_WEIGHT = 0.05
"""Goodput that a doubled P99 TTFT costs beyond the limit."""
TTFT_AIM, TPOT_AIM = 0.105, 0.041
"""Log gains in P90 TTFT and P90 TPOT (10 and 4 %) that count alike in the latency profile. Published gains are 5.7 to
7.9 and 2.6 to 10.1 % (arXiv 2610.40292); those in TPOT shrink more on other traces than those that were searched on."""
LESSER_WEIGHT = 0.7
"""Of the lesser of the two gains, the rest of their mean: a Pareto point near both aims rather than beyond one."""
GOODPUT_WORTH = 20.0
"""A lost point of goodput against a share of latency."""


def goodput_difference(runs: Sequence[Measured], reference: Sequence[Measured]) -> float:
    """Mean of the paired differences in goodput less their spread; and less what a long tail costs."""
    paired = np.array([run.goodput - other.goodput for run, other in zip(runs, reference, strict=True)])
    spread = float(paired.std(ddof=1)) if len(paired) > 1 else 0.0
    tail = tail_excess(percentile_ratio(runs, reference, "ttft_s", 99))
    return float(paired.mean()) - SPREAD_WEIGHT * spread - TAIL_WEIGHT * tail


def tail_excess(ratio: float) -> float:
    """By what factor, in doublings, a P99 TTFT of so many times the reference's is beyond TAIL_LIMIT, if at all."""
    return max(float(np.log2(ratio / TAIL_LIMIT)), 0.0)


def latency_gain(runs: Sequence[Measured], reference: Sequence[Measured]) -> float:
    """How far P90 TTFT and P90 TPOT are below the reference's, in aims; worse goodput takes away from it."""
    ttft = -float(np.log(percentile_ratio(runs, reference, "ttft_s", 90))) / TTFT_AIM
    tpot = -float(np.log(percentile_ratio(runs, reference, "tpot_s", 90))) / TPOT_AIM
    gain = LESSER_WEIGHT * min(ttft, tpot) + (1.0 - LESSER_WEIGHT) * 0.5 * (ttft + tpot)
    return gain - GOODPUT_WORTH / TTFT_AIM * goodput_lost(runs, reference)


def tail_gain(runs: Sequence[Measured], reference: Sequence[Measured]) -> float:
    """How far P99 TTFT is below the reference's, as a log ratio; worse goodput takes away from it."""
    ratio = percentile_ratio(runs, reference, "ttft_s", 99)
    return -float(np.log(ratio)) - GOODPUT_WORTH * goodput_lost(runs, reference)


def goodput_lost(runs: Sequence[Measured], reference: Sequence[Measured]) -> float:
    """By how much the mean goodput is below the reference's; 0 where it is not."""
    return max(float(np.mean([other.goodput - run.goodput for run, other in zip(runs, reference, strict=True)])), 0.0)


def percentile_ratio(runs: Sequence[Measured], reference: Sequence[Measured], column: str, q: float) -> float:
    """Percentiles against the reference's: the geometric mean of the traces' ratios, so that one at a high load weighs
    no more than one at a low load. A trace counts as 1 where either has none, as answers of one token have no TPOT.
    """
    logs = []
    for run, other in zip(runs, reference, strict=True):
        own, its = mean_percentile([run], column, q), mean_percentile([other], column, q)
        if own is not None and its is not None and own > 0.0 and its > 0.0:
            logs.append(float(np.log(own / its)))
    return float(np.exp(sum(logs) / len(runs)))


OBJECTIVES: Mapping[str, Callable[[Sequence[Measured], Sequence[Measured]], float]] = MappingProxyType(
    {"goodput": goodput_difference, "latency": latency_gain, "tail": tail_gain}
)
"""By name: what the search for the learned policies can maximise."""
