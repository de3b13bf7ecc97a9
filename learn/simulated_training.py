"""Training without a journal: explored runs in the simulator stand in for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from learn.clusters import fit_clusters
from learn.lengths import LengthQuantiles, fit_lengths, predict_lengths
from learn.simulation import Topology, simulate
from learn.table import CompiledTable, Costs, compile_table
from learn.trace import Trace
from serve_table.artifact_metadata import FEATURE_NAMES
from serve_table.policy import policy
from serve_table.slo import SloTargets

Floats = npt.NDArray[np.float64]

EXPLORED_POLICY = "least_loaded"
EXPLORED_SHARE = 0.3
"""As `rutter collect` journals by default."""

EXPLORED_TRACES = 2


@dataclass(frozen=True)
class SimulatedTraining:
    """What training traces at their rate tell of one workload on one topology. costs: what the router knows of it."""

    traces: Sequence[Trace]
    topology: Topology
    slo: SloTargets
    costs: Costs
    seed: int

    @cached_property
    def lengths(self) -> LengthQuantiles:
        """The length predictor of all traces."""
        return joint_lengths([self])

    @cached_property
    def compiled(self) -> CompiledTable:
        """Clusters, regimes and look-up of what an exploring router saw on the first traces."""
        traces = self.traces[:EXPLORED_TRACES]
        return compiled_from(self.explored(traces, self.lengths), self.seed)

    def explored(self, traces: Sequence[Trace], lengths: LengthQuantiles) -> Floats:
        """What an exploring router sees on traces, in the order of `situation.Features`: (n_requests, 7)."""
        explored = policy(EXPLORED_POLICY)
        runs = [
            simulate(
                trace,
                self.topology,
                explored,
                self.slo,
                predict_lengths(lengths, trace.prompt_tokens.astype(np.float64)),
                seed=self.seed + k,
                explore=EXPLORED_SHARE,
                with_features=True,
            )
            for k, trace in enumerate(traces)
        ]
        return np.concatenate([run.features for run in runs])


def compiled_from(seen: Floats, seed: int) -> CompiledTable:
    """Clusters, regimes and look-up of what was seen (n_requests, 7)."""
    features, pressures = seen[:, : len(FEATURE_NAMES)], seen[:, len(FEATURE_NAMES) :]
    return compile_table(features, pressures, fit_clusters(features, seed=seed), seed=seed)


def joint_lengths(trainings: Sequence[SimulatedTraining]) -> LengthQuantiles:
    """The length predictor of several workloads' traces together."""
    traces = [trace for training in trainings for trace in training.traces]
    prompts = np.concatenate([trace.prompt_tokens for trace in traces]).astype(np.float64)
    outputs = np.concatenate([trace.output_tokens for trace in traces]).astype(np.float64)
    return fit_lengths(prompts, outputs)


def joint_compiled(trainings: Sequence[SimulatedTraining], lengths: LengthQuantiles) -> CompiledTable:
    """Clusters, regimes and look-up of several workloads on one topology, of the first trace of each."""
    seen = [training.explored(training.traces[:1], lengths) for training in trainings]
    return compiled_from(np.concatenate(seen), trainings[0].seed)
