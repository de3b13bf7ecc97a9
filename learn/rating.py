"""What a search for a learned policy is told of a point: its objective against tuned baselines, few traces first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from learn.evaluate import Bench
from learn.objective import OBJECTIVES, latency_gain, percentile_ratio
from learn.simulation import Simulated
from learn.trials import Rating
from serve_table.policy import Policy

STAGE_SHARES = (0.25, 0.5, 1.0)
"""Of the traces, that a point is judged on by the end of each stage."""


@dataclass(frozen=True)
class References:
    """Runs of tuned baselines on the traces of a bench. best: of the one with the highest goodput; latency: of
    Dynamo-style routing, which published latency gains are measured against.
    """

    best: Sequence[Simulated]
    latency: Sequence[Simulated]

    def of(self, objective: str) -> Sequence[Simulated]:
        """Those that an objective compares with."""
        return self.latency if objective == "latency" else self.best


def stage_sizes(n_traces: int) -> list[int]:
    """How many traces each stage ends with; the first has at least two, which a spread needs."""
    return sorted({min(max(round(share * n_traces), 2), n_traces) for share in STAGE_SHARES})


def ratings(policy: Policy, bench: Bench, references: References, objective: str) -> Iterator[Rating]:
    """The value of an objective after each stage; with the last one the figures of all objectives."""
    reference = references.of(objective)
    runs: list[Simulated] = []
    for n in stage_sizes(len(bench.traces)):
        runs.extend(bench.run(policy, k) for k in range(len(runs), n))
        value = OBJECTIVES[objective](runs, reference[:n])
        yield Rating(value, figures(runs, references) if n == len(bench.traces) else {})


def figures(runs: Sequence[Simulated], references: References) -> dict[str, float]:
    """Mean goodput, and the latency gain and percentile ratios against Dynamo-style routing."""
    return {
        "goodput": sum(run.goodput for run in runs) / len(runs),
        "latency_gain": latency_gain(runs, references.latency),
        "ttft_p90_ratio": percentile_ratio(runs, references.latency, "ttft_s", 90),
        "ttft_p99_ratio": percentile_ratio(runs, references.latency, "ttft_s", 99),
        "tpot_p90_ratio": percentile_ratio(runs, references.latency, "tpot_s", 90),
    }
