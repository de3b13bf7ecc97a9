"""One cell of a simulated comparison: a workload on a topology, its rate, and every policy tuned for it and judged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from learn.contenders import CONTENDERS, is_tuned, tuned
from learn.evaluate import Bench, bench_of
from learn.saturation import RATE_ROUNDS, settled_rate
from learn.simulated_training import SimulatedTraining
from learn.simulation import Simulated, Topology
from learn.study import StoredStudy
from learn.table import Costs
from pipelines.grid_traces import Requests, requests_for
from pipelines.live_start import stage_word
from pipelines.results import ResultRow
from pipelines.stages import Run, canonical, digest_of_config
from pipelines.workload_spec import WorkloadSpec
from serve_table.artifact import write_atomically
from serve_table.policy import Policy
from serve_table.slo import SloTargets
from serve_table.step_time import HardwareProfile

SIMULATED = "simulated"


class CellConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides a cell's rate and what is learned of it. seed: of clustering and search."""

    workload: WorkloadSpec
    prefill_engines: int
    decode_engines: int
    profile: HardwareProfile
    overhead_s: float
    slo: SloTargets
    seed: int

    def __str__(self) -> str:
        return f"{self.workload.name} {self.topology}"

    @property
    def topology(self) -> Topology:
        return Topology(self.prefill_engines, self.decode_engines, self.profile, self.overhead_s)

    @property
    def stage_name(self) -> str:
        return f"cell-{stage_word(self.workload.name)}-{self.topology}"


class ContenderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides a policy's figures in a cell. form: what the name stands for; trials: 0 where nothing is tuned."""

    cell: CellConfig
    policy: str
    form: str
    trials: int
    test_seeds: tuple[int, ...]

    @property
    def stage_name(self) -> str:
        return f"{self.cell.stage_name}-{self.policy}"


class Judged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy in a cell: its tuned parameters, its goodput on the traces it was tuned on, its held-out rows."""

    policy: str
    params: dict[str, float | str]
    training_goodput: float
    rows: tuple[ResultRow, ...]


@dataclass(frozen=True)
class Cell:
    """A cell's work in a run folder: the policies that are wanted of it, all of one cell and the same test seeds."""

    config: CellConfig
    contenders: tuple[ContenderConfig, ...]
    run: Run

    def rate_path(self) -> Path:
        """Where the rate is kept, found once."""
        return self.run.stage_folder(self.config.stage_name, msgspec.to_builtins(self.config)) / "rate.json"

    def judged_path(self, contender: ContenderConfig) -> Path:
        return self._folder(contender) / "judged.json"

    def study(self, contender: ContenderConfig) -> StoredStudy:
        """The search of a contender, the same for whichever test seeds and budget."""
        searched = msgspec.structs.replace(contender, trials=0, test_seeds=())
        return StoredStudy(self._folder(searched) / "study.log", contender.policy)

    def _folder(self, contender: ContenderConfig) -> Path:
        return self.run.stage_folder(contender.stage_name, msgspec.to_builtins(contender))


def contender_config(cell: CellConfig, name: str, trials: int, test_seeds: Sequence[int]) -> ContenderConfig:
    return ContenderConfig(cell, name, name, trials if is_tuned(name) else 0, tuple(test_seeds))


def make_cell(cell: Cell) -> Cell:
    """Tune and judge the cell's policies, each into its file, continuing what a killed call left; returns the cell.

    Searches are of one job, so a cell's figures follow from its configuration alone.
    """
    config = cell.config
    requests = requests_for(config.workload, cell.contenders[0].test_seeds)
    rate = cell_rate(cell, requests)
    costs = Costs(config.profile.step, config.profile.handoff, config.overhead_s)
    training = SimulatedTraining(requests.training(rate), config.topology, config.slo, costs, config.seed)
    predictor = training.lengths.predictor()
    bench = bench_of(requests.searched(rate), config.topology, config.slo, predictor)
    tests = requests.tests(rate)
    held_out = bench_of(list(tests.values()), config.topology, config.slo, predictor)
    for wanted in cell.contenders:
        contender = CONTENDERS[wanted.policy](training)
        params, goodput = tuned(contender, bench, lambda one=wanted: cell.study(one), wanted.trials, config.seed)  # type: ignore[misc]
        rows = rows_of(wanted, contender.policy(params), dict(params), held_out, list(tests), rate)
        judged = Judged(wanted.policy, dict(params), goodput, rows)
        path = cell.judged_path(wanted)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(judged), indent=2))
    return cell


def read_judged(cell: Cell, contender: ContenderConfig) -> Judged:
    """What a made contender's file says."""
    return msgspec.json.decode(cell.judged_path(contender).read_bytes(), type=Judged)


def cell_rate(cell: Cell, requests: Requests) -> float:
    """Where round robin is in mid-collapse on the training traces; found once and kept."""
    path = cell.rate_path()
    if not path.exists():
        rounds = RATE_ROUNDS if requests.imported is None else 1
        rate = settled_rate(requests.training, cell.config.topology, cell.config.slo, rounds)
        write_atomically(path, msgspec.json.encode(rate))
    return msgspec.json.decode(path.read_bytes(), type=float)


def rows_of(
    contender: ContenderConfig,
    policy: Policy,
    params: dict[str, float | str],
    held_out: Bench,
    seeds: Sequence[int],
    requests_per_s: float,
) -> tuple[ResultRow, ...]:
    """One row a held-out trace."""
    cell = contender.cell
    digest = digest_of_config(canonical({"policy": contender.policy, "form": contender.form, "params": params}))
    return tuple(
        ResultRow(
            workload=cell.workload.name,
            prefill_engines=cell.prefill_engines,
            decode_engines=cell.decode_engines,
            policy=contender.policy,
            seed=seed,
            goodput=run.goodput,
            ttft_p50_s=percentile(run, "ttft_s", 50),
            ttft_p90_s=percentile(run, "ttft_s", 90),
            ttft_p99_s=percentile(run, "ttft_s", 99),
            tpot_p50_s=percentile(run, "tpot_s", 50),
            tpot_p90_s=percentile(run, "tpot_s", 90),
            tpot_p99_s=percentile(run, "tpot_s", 99),
            cluster_kind=SIMULATED,
            dilation=1.0,
            requests_per_s=requests_per_s,
            requests=len(run.slo_met),
            failed=0,
            kept_schedule=True,
            kept_pace=None,
            counted=True,
            policy_digest=digest,
        )
        for seed, run in zip(seeds, held_out.runs(policy), strict=True)
    )


def percentile(run: Simulated, column: str, q: float) -> float | None:
    """None where no request has that time, as answers of one token have no TPOT."""
    known = np.isfinite(getattr(run, column)).any()
    value = run.percentile(column, q) if known else math.nan
    return value if math.isfinite(value) else None
