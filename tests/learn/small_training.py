"""Simulated training on short traces, for the tests of what is learned from it."""

from functools import cache

from learn.simulated_training import SimulatedTraining
from learn.simulation import Topology
from learn.table import Costs
from pipelines.workloads import make_workload
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

SLO = targets_from_profile(A40_3B)
TOPOLOGY = Topology(2, 4, A40_3B, 0.003)
COSTS = Costs(A40_3B.step, A40_3B.handoff, 0.003)


@cache
def small_training(workload: str = "mixed", seed: int = 0) -> SimulatedTraining:
    traces = [make_workload(workload, 200, k, 10.0) for k in range(3)]
    return SimulatedTraining(traces, TOPOLOGY, SLO, COSTS, seed)
