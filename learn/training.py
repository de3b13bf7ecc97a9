"""Training: journals in; lengths, clusters, costs and the traces to search policies on out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from learn.clusters import Clusters, fit_clusters
from learn.costs import OVERHEAD_UNIT_S, CostFit, fit_costs, fitted_topology
from learn.evaluate import Bench, bench_of
from learn.frame import CleanFrame
from learn.journal_trace import JournalTrace
from learn.lengths import LengthError, LengthQuantiles, fit_lengths, held_out_error, predict_lengths
from learn.resample import resampled
from learn.simulation import Topology
from learn.table import CompiledTable, compile_table
from learn.trace import Trace, joined
from serve_table.artifact_metadata import FEATURE_NAMES
from serve_table.slo import SloTargets
from serve_table.step_time import HardwareProfile

TRAIN_SEEDS = 12
LOAD_FACTORS = (1.0, 0.85, 1.15, 0.7, 1.3, 0.92)
"""The search sees the journaled rate and up to 30 % less and more. At one rate policies tie that differ by points on
other windows of the same traffic, whose lengths and bursts make another load of the same rate."""

BASELINES = (
    "round_robin",
    "least_loaded",
    "length_threshold",
    "power_of_two",
    "always_local",
    "dynamo_style",
    "class_aware",
    "marginal_cost",
    "marginal_cost_uncalibrated",
)
MIN_RUN_ROWS = 50
"""A run with fewer rows tells nothing of the costs."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Learned:
    """What journals say by themselves: lengths, clusters, the compiled look-up and the costs."""

    lengths: LengthQuantiles
    length_error: LengthError
    clusters: Clusters
    compiled: CompiledTable
    cost_fit: CostFit
    topology: Topology


def learn_from(
    frame: CleanFrame,
    runs: Sequence[JournalTrace],
    profile: HardwareProfile,
    slo: SloTargets,
    seed: int,
    overhead_s: float = OVERHEAD_UNIT_S,
) -> Learned:
    """Fit everything that needs no search. runs: the journal's runs as traces, at least one.

    profile, overhead_s: where the fit of costs starts, a hardware profile's or a calibration's.
    """
    prompts = frame.rows["prompt_tokens"].to_numpy(dtype=np.float64)
    outputs = frame.outcome("output_tokens")
    lengths = fit_lengths(prompts, outputs)
    features = frame.features()
    # The router will predict lengths with the new predictor, whatever the journaled decisions had.
    features[:, FEATURE_NAMES.index("predicted_output_tokens")] = predict_lengths(lengths, prompts)
    clusters = fit_clusters(features, seed=seed)
    compiled = compile_table(features, frame.pressures(), clusters, seed=seed)
    largest = max(runs, key=lambda run: len(run.trace))
    fitted_runs = [run for run in runs if len(run.trace) >= MIN_RUN_ROWS] or [largest]
    cost_fit = fit_costs(fitted_runs, profile, slo, overhead_s=overhead_s)
    topology = fitted_topology(
        max(len(largest.prefill_engines), 1), len(largest.decode_engines), profile, cost_fit.costs
    )
    return Learned(lengths, held_out_error(prompts, outputs, seed=seed), clusters, compiled, cost_fit, topology)


def training_bench(journaled: Sequence[Trace], learned: Learned, slo: SloTargets, seed: int) -> Bench:
    """Resampled arrivals of the journaled requests at the journaled rate and around it."""
    trace = joined(journaled)
    span_s = float(trace.arrival_s[-1])
    rate = (len(trace) - 1) / span_s if span_s > 0 else 1.0
    traces: list[Trace] = []
    for k in range(TRAIN_SEEDS):
        again = resampled(trace, seed * 1000 + k)
        traces.append(again.scaled_to(rate * LOAD_FACTORS[k % len(LOAD_FACTORS)]))
    return bench_of(traces, learned.topology, slo, learned.lengths.predictor())
