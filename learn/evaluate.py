"""Evaluation in the simulator: goodput over several traces with intervals, paired between policies."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy import stats

from learn.simulation import Simulated, Topology, simulate
from learn.trace import Trace
from serve_table.artifact_metadata import Score
from serve_table.policy import Policy
from serve_table.predictor import LengthPredictor
from serve_table.slo import SloTargets

Floats = npt.NDArray[np.float64]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Bench:
    """Traces to judge policies on, at their own rates, on one topology.

    predicted: output lengths (n_requests,) of each trace, as the router would predict them.
    """

    traces: tuple[Trace, ...]
    topology: Topology
    slo: SloTargets
    predicted: tuple[Floats, ...] = field(repr=False)

    def runs(self, policy: Policy) -> list[Simulated]:
        """One run a trace; the draws of trace i are seeded by i, the same for every policy."""
        return [self.run(policy, k) for k in range(len(self.traces))]

    def run(self, policy: Policy, k: int) -> Simulated:
        """The run on trace k alone."""
        return simulate(self.traces[k], self.topology, policy, self.slo, self.predicted[k], k)

    def goodput(self, policy: Policy) -> Floats:
        """(n_traces,) goodput of a policy."""
        return np.array([run.goodput for run in self.runs(policy)])


def bench_of(traces: Sequence[Trace], topology: Topology, slo: SloTargets, predictor: LengthPredictor) -> Bench:
    """A bench whose lengths are predicted from the prompts alone."""
    predicted = tuple(
        np.array([predictor.predict(tokens, None) for tokens in trace.prompt_tokens.tolist()]) for trace in traces
    )
    return Bench(tuple(traces), topology, slo, predicted)


def interval(values: Floats, confidence: float = CONFIDENCE, resolution: float = 0.0) -> tuple[float, float]:
    """Student's t interval of the mean of values (n,); from one value, the value itself.

    resolution: the step between neighbouring values. Their spread is taken as no less, or a few that happen to be equal
    would make the mean certain.
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, mean
    spread = max(float(np.std(values, ddof=1)), resolution)
    half = float(stats.t.ppf(0.5 + confidence / 2.0, len(values) - 1) * spread / np.sqrt(len(values)))
    return mean - half, mean + half


def score(name: str, runs: Sequence[Simulated]) -> Score:
    """A policy's score over its runs: mean goodput with its interval within [0, 1], mean percentiles of the runs that
    have that time, None where none has.
    """
    goodput = np.array([run.goodput for run in runs])
    low, high = interval(goodput)
    return Score(
        policy=name,
        goodput=float(goodput.mean()),
        goodput_low=max(low, 0.0),
        goodput_high=min(high, 1.0),
        ttft_p90_s=mean_percentile(runs, "ttft_s", 90),
        ttft_p99_s=mean_percentile(runs, "ttft_s", 99),
        tpot_p90_s=mean_percentile(runs, "tpot_s", 90),
    )


class Measured(Protocol):
    """A run, simulated or live, as figures are taken from it; percentiles are None where no request has that time."""

    @property
    def goodput(self) -> float: ...

    @property
    def ttft_s(self) -> Floats: ...

    @property
    def tpot_s(self) -> Floats: ...

    def percentile(self, column: str, q: float) -> float | None: ...


def mean_percentile(runs: Sequence[Measured], column: str, q: float) -> float | None:
    """Mean of the runs' percentiles; answers of one token alone have no TPOT."""
    found = [run.percentile(column, q) for run in runs if np.isfinite(getattr(run, column)).any()]
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if known else None


@dataclass(frozen=True)
class Comparison:
    """Held-out scores, best first. difference, low, high: the learned policy's goodput minus the best baseline's,

    paired by trace, with its interval; best_baseline: its name.
    """

    scores: tuple[Score, ...]
    best_baseline: str
    difference: float
    low: float
    high: float


def compare(bench: Bench, policies: Mapping[str, Policy], learned: str, baselines: Collection[str]) -> Comparison:
    """Score every policy on the same traces; `learned` names the one to hold against the best of the baselines."""
    runs = {name: bench.runs(policy) for name, policy in policies.items()}
    scores = {name: score(name, found) for name, found in runs.items()}
    best = max(baselines, key=lambda name: scores[name].goodput)
    paired = np.array([a.goodput - b.goodput for a, b in zip(runs[learned], runs[best], strict=True)])
    low, high = interval(paired)
    ordered = sorted(scores.values(), key=lambda entry: -entry.goodput)
    return Comparison(tuple(ordered), best, float(paired.mean()), low, high)
