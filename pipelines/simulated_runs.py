"""Compared runs in the simulator: the same requests, policy and parameters, with the costs that training fitted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from learn.costs import fitted_topology
from learn.evaluate import bench_of
from learn.simulation import Simulated, Topology, replay, simulate
from learn.table import costs_of_artifact
from learn.trace import Trace
from pipelines.live_run import profile_of
from pipelines.live_start import lengths_digest
from pipelines.recorded_runs import RecordedRun, request_index
from serve_table.artifact import Artifact
from serve_table.journal import Row
from serve_table.policy import LEARNED_POLICIES, policy
from serve_table.predictor import constant_predictor
from serve_table.replay import decode_candidates
from serve_table.situation import ACTION_NAMES, NO_ENGINE
from serve_table.slo import SloTargets

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SimulatedRun:
    """A compared run beside its simulation. replayed_met (n_requests,): SLO outcomes with every choice as executed,

    so that `replayed - simulated` is what other choices do, and `live - replayed` what other times do.
    """

    recorded: RecordedRun
    artifact: Artifact
    simulated: Simulated
    replayed_met: Bools

    @property
    def live_goodput(self) -> float:
        return self.recorded.measured.goodput

    @property
    def residual(self) -> float:
        """Simulated goodput minus the live one."""
        return self.simulated.goodput - self.live_goodput

    @property
    def replayed_goodput(self) -> float:
        return float(self.replayed_met.mean())


def simulated_run(recorded: RecordedRun, artifact: Artifact) -> SimulatedRun:
    """Simulate a run with an artifact that `calibration_of` found for it."""
    config, trace = recorded.config, recorded.trace
    topology = topology_of(recorded, artifact)
    predictor = constant_predictor() if config.lengths is None else artifact.predictor()
    predicted = bench_of([trace], topology, config.slo, predictor).predicted[0]
    learned = artifact if config.policy in LEARNED_POLICIES else None
    chosen = policy(config.policy, config.params, learned)
    simulated = simulate(trace, topology, chosen, config.slo, predicted, config.workload.seed)
    met = replayed_met(trace, topology, config.slo, predicted, recorded.rows)
    return SimulatedRun(recorded, artifact, simulated, met)


def topology_of(recorded: RecordedRun, artifact: Artifact) -> Topology:
    """The run's cluster with the fitted costs and the engines' own limits."""
    cluster = recorded.config.cluster
    n_prefill = max(cluster.prefill_engines, 1)
    return fitted_topology(n_prefill, cluster.decode_engines, profile_of(cluster), costs_of_artifact(artifact))


def replayed_met(trace: Trace, topology: Topology, slo: SloTargets, predicted: Floats, rows: Sequence[Row]) -> Bools:
    """SLO outcomes (n_requests,) of the executed choices; requests that none was executed for missed their targets."""
    choices = np.full((len(trace), 3), NO_ENGINE, np.int64)
    held_s = np.zeros(len(trace))
    part = np.zeros(len(trace), bool)
    for row in rows:
        if row.executed is None or row.executed_decode_engine is None:
            continue
        i = request_index(row)
        part[i] = True
        held_s[i] = row.waited_s or 0.0
        choices[i, 0] = ACTION_NAMES.index(row.executed)
        choices[i, 1] = _place(row.executed_prefill_engine, row.prefill_engines)
        choices[i, 2] = _place(row.executed_decode_engine, decode_candidates(row))
    met = np.zeros(len(trace), bool)
    if part.any():
        executed = np.flatnonzero(part)
        given = (trace.rows(executed), topology, slo, predicted[executed])
        action, prefill, decode = choices[executed].T
        run = replay(*given, action, prefill, decode, held_s[executed])
        met[executed] = run.slo_met
    return met


def _place(engine: str | None, engines: Sequence[str]) -> int:
    return NO_ENGINE if engine is None else engines.index(engine)


def calibration_of(recorded: RecordedRun, artifacts: Sequence[Artifact]) -> Artifact | str:
    """The artifact that the run was made with, whose costs are of the same kind of cluster; else why there is none.

    Its costs were fitted to other rows: one that learned from the run's own journal would be judged on what it knows.
    """
    config = recorded.config
    if config.table is not None:
        made_with = [artifact for artifact in artifacts if artifact.digest() == config.table]
        missing = f"no artifact given is its table {config.table}"
    elif config.lengths is not None:
        made_with = [artifact for artifact in artifacts if lengths_digest(artifact) == config.lengths]
        made_with = [artifact for artifact in made_with if artifact.slo_targets() == config.slo]
        missing = "no artifact given has its SLO targets and length predictor"
    else:
        made_with, missing = list(artifacts), "no artifact given"
    if not made_with:
        return missing
    kind = config.cluster.kind
    of_kind = [artifact for artifact in made_with if artifact.metadata.cluster_kind == kind]
    if not of_kind:
        return f"its artifact's costs were fitted to a cluster {made_with[0].metadata.cluster_kind!r}, not {kind!r}"
    if set(recorded.journal_digests()) & set(of_kind[0].metadata.journal_digests):
        return "its artifact learned from its journal"
    return of_kind[0]
