"""The artifact that the bench measures, found or built, and how long loading one takes."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from learn.clusters import fit_clusters
from learn.drops import DropReport
from learn.frame import CleanFrame
from learn.lengths import fit_lengths, predict_lengths
from learn.simulation import Simulated, Topology, simulate
from learn.table import CompiledTable, Costs, SearchRecord, build_artifact, compile_table
from learn.trace import Floats, Trace
from pipelines.bench_timing import collector_off
from pipelines.workloads import HASH_BLOCK_TOKENS, make_workload
from serve_table import artifact
from serve_table.artifact import Artifact
from serve_table.artifact_metadata import Score
from serve_table.policy import OF_AN_ARTIFACT, POLICIES, PlacementParams, policy
from serve_table.situation import LOCAL, REMOTE
from serve_table.slo import SloTargets

DEFAULT_ARTIFACT = Path("artifacts/default.safetensors")
N_CLUSTERS = 8
LOCAL_TOKENS = 1000.0
"""The built table sends prompts below this length local while the prefill pool is at its busiest."""


@dataclass(frozen=True)
class ArtifactFound:
    """The artifact under measurement. source: where it comes from, for people."""

    artifact: Artifact
    path: Path
    source: str


def artifact_to_measure(
    asked: Path | None, folder: Path, topology: Topology, slo: SloTargets, n_rows: int, seed: int
) -> ArtifactFound:
    """The artifact asked for, else the repository's default, else one of full size built into `folder`.

    Raises ArtifactError where the one asked for, or the default, cannot be used.
    """
    if asked is None and not DEFAULT_ARTIFACT.exists():
        built = full_size_artifact(topology, slo, n_rows, seed)
        path = folder / "built.safetensors"
        artifact.save(built, path)
        return ArtifactFound(built, path, f"built by the bench from {n_rows} made-up rows")
    path = DEFAULT_ARTIFACT if asked is None else asked
    return ArtifactFound(artifact.load(path), path, str(path))


def load_ms(path: Path, repetitions: int) -> list[float]:
    """Time to read, parse and validate the artifact file, in milliseconds, each time."""
    times_ms = []
    with collector_off():
        for _ in range(repetitions):
            start_ns = time.perf_counter_ns()
            artifact.load(path)
            times_ms.append((time.perf_counter_ns() - start_ns) / 1e6)
    return times_ms


def full_size_artifact(topology: Topology, slo: SloTargets, n_rows: int, seed: int) -> Artifact:
    """An artifact as large as training makes them: k-means and the full grid on rows made up around the mixed
    workload, each baseline scored in the simulator; its actions follow a rule instead of a search.
    """
    trace = make_workload("mixed", n_rows, seed, 10.0)
    lengths = fit_lengths(trace.prompt_tokens.astype(float), trace.output_tokens.astype(float))
    features, pressures = _made_up_rows(trace, predict_lengths(lengths, trace.prompt_tokens.astype(float)), seed)
    compiled = compile_table(features, pressures, fit_clusters(features, seed=seed, k=N_CLUSTERS), seed=seed)
    rows = pd.DataFrame({"time": trace.arrival_s})
    frame = CleanFrame(rows, DropReport(n_rows, n_rows, {}, {}), "simulated", 1.0, digests=("0" * 64,))
    return build_artifact(
        frame,
        compiled,
        ruled_actions(compiled),
        PlacementParams(),
        lengths,
        Costs(topology.profile.step, topology.profile.handoff, topology.overhead_s),
        slo,
        SearchRecord(seed, "none", 1, 0, "none", _scores(trace, topology, slo)),
        form="table",
        price={},
        profile=topology.profile,
        workload="mixed",
        prefill_engines=topology.prefill_engines,
        decode_engines=topology.decode_engines,
    )


def _made_up_rows(trace: Trace, predicted_tokens: Floats, seed: int) -> tuple[Floats, Floats]:
    """Features (n_requests, 5) with part of many prompts cached, and pressures (n_requests, 2)."""
    rng = np.random.default_rng(seed)
    n = len(trace)
    columns = [trace.prompt_tokens.astype(float)]
    for cached_share in (0.5, 0.3):
        cached = np.where(rng.random(n) < cached_share, rng.random(n), 0.0) * trace.prompt_tokens
        columns.append(trace.prompt_tokens - cached // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS)
    features: Floats = np.column_stack([*columns, predicted_tokens, trace.slo_class.astype(float)])
    pressures: Floats = np.column_stack([rng.gamma(1.0, 2000.0, n), rng.gamma(4.0, 3.0, n)])
    return features, pressures


def ruled_actions(compiled: CompiledTable) -> list[int]:
    """Actions (n_actions,): local for short prompts in the regimes of highest prefill pressure."""
    n_decode_regimes = len(compiled.regimes.decode_edges_requests) + 1
    busiest = len(compiled.regimes.prefill_edges_tokens)
    return [
        LOCAL if centre[0] < LOCAL_TOKENS and regime // n_decode_regimes == busiest else REMOTE
        for centre in compiled.clusters.centres_tokens
        for regime in range(len(compiled.regimes))
    ]


def _scores(trace: Trace, topology: Topology, slo: SloTargets) -> tuple[Score, ...]:
    """Every baseline's result on the trace; one run has no interval."""
    names = [name for name in POLICIES if name not in OF_AN_ARTIFACT]
    return tuple(_score(name, simulate(trace, topology, policy(name), slo, 200.0)) for name in names)


def _score(name: str, run: Simulated) -> Score:
    goodput = run.goodput
    percentiles = [run.percentile("ttft_s", 90), run.percentile("ttft_s", 99), run.percentile("tpot_s", 90)]
    return Score(name, goodput, goodput, goodput, *percentiles)
