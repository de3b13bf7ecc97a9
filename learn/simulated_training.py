"""Training without a journal: explored runs in the simulator stand in for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from learn.clusters import fit_clusters
from learn.lengths import LengthQuantiles, fit_lengths, predict_lengths
from learn.simulation import Topology, simulate
from learn.table import CompiledTable, Costs, compile_table
from learn.trace import Trace
from serve_table.artifact_metadata import FEATURE_NAMES
from serve_table.policy import policy
from serve_table.slo import SloTargets

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
        prompts = np.concatenate([trace.prompt_tokens for trace in self.traces]).astype(np.float64)
        outputs = np.concatenate([trace.output_tokens for trace in self.traces]).astype(np.float64)
        return fit_lengths(prompts, outputs)

    @cached_property
    def compiled(self) -> CompiledTable:
        """Clusters, regimes and look-up of what an exploring router saw on the first traces."""
        explored = policy(EXPLORED_POLICY)
        runs = [
            simulate(
                trace,
                self.topology,
                explored,
                self.slo,
                predict_lengths(self.lengths, trace.prompt_tokens.astype(np.float64)),
                seed=self.seed + k,
                explore=EXPLORED_SHARE,
                with_features=True,
            )
            for k, trace in enumerate(self.traces[:EXPLORED_TRACES])
        ]
        seen = np.concatenate([run.features for run in runs])
        features, pressures = seen[:, : len(FEATURE_NAMES)], seen[:, len(FEATURE_NAMES) :]
        return compile_table(features, pressures, fit_clusters(features, seed=self.seed), seed=self.seed)
