"""Training: journals in, a candidate policy out, with everything that was learned on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from learn.clusters import Clusters, fit_clusters
from learn.costs import OVERHEAD_UNIT_S, CostFit, fit_costs, fitted_topology
from learn.evaluate import Bench, bench_of
from learn.frame import CleanFrame
from learn.journal_trace import JournalTrace
from learn.lengths import LengthError, LengthQuantiles, fit_lengths, held_out_error, predict_lengths
from learn.policy_space import (
    TablePoint,
    baseline_policy,
    baseline_space,
    baseline_start,
    price_policy,
    price_space,
    price_start,
    table_point,
    table_policy,
    table_space,
    table_warm_start,
)
from learn.resample import resampled
from learn.search import Params, Space, search
from learn.simulation import Topology
from learn.study import Best, StoredStudy
from learn.table import CompiledTable, compile_table
from learn.trace import Trace, joined
from serve_table.artifact_metadata import FEATURE_NAMES, LearnedForm
from serve_table.policy import Policy
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

Step = Callable[[str, int], Callable[[int, float], None]]
"""Begins a step of so many trials and returns what to tell of each: complete trials and best goodput."""

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


@dataclass(frozen=True)
class Searched:
    """The best table, the best price and every baseline at its tuned parameters, with their goodput on the training
    traces.
    """

    table: TablePoint
    table_best: Best
    price: Params
    baselines: dict[str, Params]
    training_goodput: dict[str, float]

    @property
    def form(self) -> LearnedForm:
        """The better one of the two learned policies."""
        return "price" if self.training_goodput["price"] > self.training_goodput["table"] else "table"


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


def search_policies(
    bench: Bench,
    learned: Learned,
    study: Callable[[str], StoredStudy],
    trials: int,
    seed: int,
    jobs: int,
    step: Step,
) -> Searched:
    """Search the table's actions, placement and regime borders and the price's weights, and tune every baseline, each
    with the same budget. study: of a policy's name.
    """
    kv_tokens = bench.topology.profile.kv_tokens
    compiled = learned.compiled

    def goodput(policy: Policy) -> float:
        return float(bench.goodput(policy).mean())

    table_best = search(
        study("table"),
        table_space(compiled),
        lambda params: goodput(table_policy(compiled, table_point(compiled, params))),
        trials,
        seed=seed,
        jobs=jobs,
        warm_start=table_warm_start(compiled),
        on_trial=step("search the table", trials),
    )
    price_best = search(
        study("price"),
        price_space(),
        lambda params: goodput(price_policy(params, bench.topology, bench.slo)),
        trials,
        seed=seed,
        jobs=jobs,
        warm_start=price_start(),
        on_trial=step("search the price", trials),
    )
    baselines: dict[str, Params] = {}
    scores = {"table": table_best.value, "price": price_best.value}
    for name in BASELINES:
        space: Space = baseline_space(name)
        if not space:
            baselines[name] = {}
            scores[name] = goodput(baseline_policy(name, {}, learned.cost_fit.costs, kv_tokens))
            continue
        best = search(
            study(name),
            space,
            lambda params, name=name: goodput(  # type: ignore[misc]
                baseline_policy(name, params, learned.cost_fit.costs, kv_tokens)
            ),
            trials,
            seed=seed,
            jobs=jobs,
            warm_start=baseline_start(name),
            on_trial=step(f"tune {name}", trials),
        )
        baselines[name] = best.params
        scores[name] = best.value
    return Searched(table_point(compiled, table_best.params), table_best, price_best.params, baselines, scores)
