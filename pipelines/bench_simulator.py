"""How many requests a second the simulator gets through, per core, by policy."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from learn.simulation import Topology, simulate
from learn.trace import Floats, Trace
from pipelines.bench_timing import Spread, collector_off, spread
from pipelines.workloads import make_workload
from serve_table.policy import Policy
from serve_table.predictor import LengthPredictor
from serve_table.slo import SloTargets

NOMINAL_REQUESTS_PER_S = 10.0
"""Near the mixed workload's saturation at 2P+4D, so that finding it hardly changes the length of bursts."""


@dataclass(frozen=True)
class Setting:
    """What is simulated, the same for all policies. predictor: of output lengths, as the router has them."""

    topology: Topology
    slo: SloTargets
    predictor: LengthPredictor

    def predicted_tokens(self, trace: Trace) -> Floats:
        """(n_requests,)"""
        return np.array([self.predictor.predict(float(tokens), None) for tokens in trace.prompt_tokens.tolist()])


@dataclass(frozen=True)
class TimedRun:
    """One run of `simulate`."""

    wall_s: float
    process_s: float
    goodput: float
    ttft_s: float
    tpot_s: float


class Speed(msgspec.Struct, frozen=True):
    """Requests simulated in a second of wall time and of this process' CPU time, and the mean goodput."""

    wall: Spread
    process: Spread
    goodput: float


def mixed_traces(n_requests: int, seeds: Sequence[int]) -> list[Trace]:
    """Of the mixed workload, not yet at its saturation."""
    return [make_workload("mixed", n_requests, seed, NOMINAL_REQUESTS_PER_S) for seed in seeds]


def timed_run(trace: Trace, predicted_tokens: Floats, setting: Setting, chosen: Policy, seed: int) -> TimedRun:
    process_ns, start_ns = time.process_time_ns(), time.perf_counter_ns()
    run = simulate(trace, setting.topology, chosen, setting.slo, predicted_tokens, seed)
    wall_ns, process_ns = time.perf_counter_ns() - start_ns, time.process_time_ns() - process_ns
    several = np.isfinite(run.tpot_s)
    tpot_s = float(run.tpot_s[several].mean()) if several.any() else 0.0
    return TimedRun(wall_ns / 1e9, process_ns / 1e9, run.goodput, float(run.ttft_s.mean()), tpot_s)


def measured_speeds(
    setting: Setting, policies: Sequence[Policy], traces: Sequence[Trace], rounds: int
) -> dict[str, Speed]:
    """Speed by policy, from `rounds` runs of every trace; policies take turns, so that all see the same machine."""
    runs: dict[str, list[TimedRun]] = {chosen.name: [] for chosen in policies}
    predicted = [setting.predicted_tokens(trace) for trace in traces]
    for chosen in policies:
        timed_run(traces[0], predicted[0], setting, chosen, 0)  # compiles and warms up
    with collector_off():
        for _ in range(rounds):
            for seed, trace in enumerate(traces):
                for chosen in policies:
                    runs[chosen.name].append(timed_run(trace, predicted[seed], setting, chosen, seed))
    n_requests = len(traces[0])
    return {
        name: Speed(
            spread([n_requests / run.wall_s for run in timed]),
            spread([n_requests / max(run.process_s, 1e-9) for run in timed]),
            float(np.mean([run.goodput for run in timed])),
        )
        for name, timed in runs.items()
    }
