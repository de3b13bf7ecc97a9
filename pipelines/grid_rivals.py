"""What a simulated comparison left in its run folder, to be judged anew at other loads and on other clusters."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from learn.contenders import CONTENDERS, RUTTER
from learn.evaluate import Bench, Floats, bench_of
from learn.simulation import Topology
from learn.trace import Trace
from pipelines.grid_cell import Cell, ContenderConfig, Judged
from pipelines.grid_policy import LearnedPolicy, Workload, price_of, stage_name_of, workload_of
from pipelines.live_start import stage_word
from pipelines.stages import Run, StageRecord
from serve_table.artifact import Artifact, load
from serve_table.errors import RunError
from serve_table.policy import Policy
from serve_table.predictor import LengthPredictor


@dataclass(frozen=True)
class Rival:
    """A policy as a comparison tuned or learned it, with the lengths that it was given there."""

    name: str
    policy: Policy
    predictor: LengthPredictor

    def bench(self, traces: Sequence[Trace], workload: Workload, topology: Topology | None = None) -> Bench:
        """These traces with its lengths, on the workload's cluster or another."""
        training = workload.training
        return bench_of(traces, topology or training.topology, training.slo, self.predictor)

    def goodput(self, traces: Sequence[Trace], workload: Workload, topology: Topology | None = None) -> Floats:
        """(n_traces,)"""
        return self.bench(traces, workload, topology).goodput(self.policy)


@dataclass(frozen=True)
class ComparedCell:
    """A workload on a topology, e.g. 2P+4D, as a run folder has it."""

    run: Run
    name: str
    topology: str

    def workload(self) -> Workload:
        """Its requests and its rate. RunError where the learned policy was not compared in it."""
        config, _ = self.judged(RUTTER)
        return workload_of(Cell(config.cell, (config,), self.run))

    def judged(self, policy: str) -> tuple[ContenderConfig, Judged]:
        """How a policy was configured and what came out, of several runs the last."""
        record = last_record(self.run, f"cell-{stage_word(self.name)}-{self.topology}-{policy}", self._where(policy))
        config = msgspec.json.decode(record.config, type=ContenderConfig)
        return config, msgspec.json.decode(self.run.output_path(record, "judged").read_bytes(), type=Judged)

    def learned(self) -> tuple[LearnedPolicy, Artifact]:
        """Its topology's learned policy."""
        record = last_record(self.run, stage_name_of(RUTTER, self.topology), self._where(RUTTER))
        path, artifact_path = (self.run.output_path(record, key) for key in ("learned", "artifact"))
        return msgspec.json.decode(path.read_bytes(), type=LearnedPolicy), load(artifact_path)

    def rival(self, policy: str, workload: Workload) -> Rival:
        """A policy of this cell as it was there: Rutter or a baseline.

        workload: the same one, on whichever topology, whose training traces have the same lengths.
        """
        training = workload.training
        if policy == RUTTER:
            _, artifact = self.learned()
            return Rival(policy, price_of(artifact), artifact.predictor())
        _, judged = self.judged(policy)
        return Rival(policy, CONTENDERS[policy](training).policy(judged.params), training.lengths.predictor())

    def _where(self, policy: str) -> str:
        return f"{policy} on {self.name} {self.topology}"


def last_record(run: Run, stage: str, what: str) -> StageRecord:
    """The record finished last of a stage, under any configuration; RunError where there is none."""
    records = [record for name, record in run.finished(stage) if name == stage]
    if not records:
        raise RunError(
            f"the run in {run.folder} has no {what}: run `rutter compare --cluster simulated` with it in this run first"
        )
    return max(records, key=lambda record: record.finished_time or 0.0)


def compared_topologies(run: Run, name: str) -> list[tuple[int, int]]:
    """Engines of every topology on which the learned policy was compared on a workload; RunError where on none."""
    found = set()
    for stage, record in run.finished(f"cell-{stage_word(name)}-"):
        if stage.endswith(f"-{RUTTER}"):
            cell = msgspec.json.decode(record.config, type=ContenderConfig).cell
            found.add((cell.prefill_engines, cell.decode_engines))
    if not found:
        last_record(run, f"cell-{stage_word(name)}", f"{RUTTER} on {name}")
    return sorted(found)


def nearest(topologies: Sequence[tuple[int, int]], prefill_engines: int, decode_engines: int) -> tuple[int, int]:
    """The topology whose engines differ least; of equal ones the smaller."""
    distance = [abs(p - prefill_engines) + abs(d - decode_engines) for p, d in topologies]
    return topologies[int(np.argmin(distance))]
