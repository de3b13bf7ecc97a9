"""The one learned policy of a topology in a simulated comparison: searched on all its workloads, judged on each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from optuna.distributions import distribution_to_json

from learn.contenders import CONTENDERS, JOINT, REFERENCES
from learn.evaluate import bench_of
from learn.joint import (
    CONFIRMED,
    CONFIRMING_ROUNDS,
    CONFIRMING_TAILS,
    PRICE_TRIALS,
    TAIL_LOAD,
    JointCell,
    JointSearch,
    joint_chains,
    joint_loads,
    joint_space,
)
from learn.lengths import LengthQuantiles
from learn.objective import TAIL_LIMIT
from learn.policy_space import table_point
from learn.search import SAMPLER
from learn.simulated_training import SimulatedTraining, joint_compiled, joint_lengths
from learn.simulation import Simulated, Topology
from learn.study import StoredStudy
from learn.table import Costs, SearchRecord, Source, build_artifact
from pipelines.grid_cell import SIMULATED, Cell, CellConfig, ContenderConfig, Judged, cell_rate, read_judged, rows_of
from pipelines.grid_traces import Requests, requests_for
from pipelines.stages import Run, canonical, digest_of_config
from serve_table.artifact import Artifact, load, save, write_atomically
from serve_table.policy import Policy
from serve_table.policy import policy as policy_named

DYNAMO = "dynamo_style"
CONFIRMING = 100
"""Number of the first trace that the best points are confirmed on."""


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides a topology's learned policy. cells: its workloads; loads: of the traces it is searched on;
    tail_limit: of P99 TTFT; confirmed: points that are tried on other traces in the end, of confirming_loads, and on
    confirming_tails more for their tail alone; space: what is searched, as Optuna's JSON by name; trials: of the
    table's search, and of each baseline's that it is held against meanwhile; price_trials: of each search for the price
    for each of these; chains: searches for the price.
    """

    cells: tuple[CellConfig, ...]
    objective: str
    loads: tuple[float, ...]
    tail_limit: float
    confirmed: int
    confirming_loads: tuple[float, ...]
    confirming_tails: int
    space: dict[str, str]
    trials: int
    price_trials: float
    chains: int

    @property
    def topology(self) -> Topology:
        return self.cells[0].topology

    @property
    def policy(self) -> str:
        return JOINT[self.objective]

    @property
    def stage_name(self) -> str:
        return stage_name_of(self.policy, self.topology)

    @property
    def form(self) -> str:
        """What the policy's name stands for in a cell."""
        return f"price for {len(self.cells)} workloads {digest_of_config(canonical(msgspec.to_builtins(self)))}"


def stage_name_of(policy: str, topology: Topology | str) -> str:
    return f"policy-{topology}-{policy}"


class LearnedPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was learned for a topology, for people and for changes of it; the artifact beside it is the policy.

    params: of the price; value: of the search's objective, over trials and workloads; table_value: of the table's.
    """

    topology: str
    objective: str
    workloads: tuple[str, ...]
    params: dict[str, float]
    value: float
    table_value: float
    trials: int


@dataclass(frozen=True)
class TopologyWork:
    """A topology's policy to be learned. cells: its workloads, each with its references; contenders: the learned
    policy in each of them.
    """

    config: PolicyConfig
    cells: tuple[Cell, ...]
    contenders: tuple[ContenderConfig, ...]
    run: Run

    @property
    def stage_config(self) -> dict[str, object]:
        config: dict[str, object] = msgspec.to_builtins(self.config)
        return config

    @property
    def folder(self) -> Path:
        return self.run.stage_folder(self.config.stage_name, self.stage_config)

    def learned_path(self) -> Path:
        return self.folder / "learned.json"

    def artifact_path(self) -> Path:
        return self.folder / "artifact.safetensors"

    def outputs(self) -> dict[str, Path]:
        """What the stage leaves."""
        return {"learned": self.learned_path(), "artifact": self.artifact_path()}

    def study(self, name: str) -> StoredStudy:
        return StoredStudy(self.folder / f"{name}.log", name)

    def judged_cells(self) -> tuple[Cell, ...]:
        """The cells with the learned policy alone."""
        pairs = zip(self.cells, self.contenders, strict=True)
        return tuple(Cell(cell.config, (contender,), self.run) for cell, contender in pairs)


def topology_work(cells: Sequence[Cell], objective: str, trials: int, run_: Run) -> TopologyWork:
    """The work of cells of one topology, each with at least the references among its contenders."""
    space = {
        name: distribution_to_json(distribution) for name, distribution in joint_space(objective, len(cells)).items()
    }
    loads = joint_loads(objective, len(cells))
    config = PolicyConfig(
        tuple(cell.config for cell in cells),
        objective,
        loads,
        TAIL_LIMIT,
        CONFIRMED,
        CONFIRMING_ROUNDS * loads,
        CONFIRMING_TAILS,
        space,
        trials,
        PRICE_TRIALS[objective],
        joint_chains(objective, len(cells)),
    )
    contenders = tuple(
        ContenderConfig(cell.config, config.policy, config.form, trials, cell.contenders[0].test_seeds)
        for cell in cells
    )
    return TopologyWork(config, tuple(cells), contenders, run_)


@dataclass(frozen=True)
class Workload:
    """A cell's requests at its rate, and what its own traces tell."""

    cell: Cell
    requests: Requests
    rate: float
    training: SimulatedTraining


def make_policy(work: TopologyWork) -> TopologyWork:
    """Learn the topology's policy from all its workloads and judge it in each cell; continues what a killed call left.

    Every cell's rate and references are made before.
    """
    workloads = [workload_of(cell) for cell in work.cells]
    learned, artifact = learned_policy(work, workloads)
    policy, predictor = price_of(artifact), artifact.predictor()
    for workload, contender in zip(workloads, work.contenders, strict=True):
        topology, slo = workload.training.topology, workload.training.slo
        searched = bench_of(workload.requests.searched(workload.rate), topology, slo, predictor)
        tests = workload.requests.tests(workload.rate)
        held_out = bench_of(list(tests.values()), topology, slo, predictor)
        params: dict[str, float | str] = dict(learned.params)
        rows = rows_of(contender, policy, params, held_out, list(tests), workload.rate)
        judged = Judged(contender.policy, params, float(searched.goodput(policy).mean()), rows)
        path = workload.cell.judged_path(contender)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(judged), indent=2))
    return work


def workload_of(cell: Cell) -> Workload:
    config = cell.config
    requests = requests_for(config.workload, cell.contenders[0].test_seeds)
    rate = cell_rate(cell, requests)
    costs = Costs(config.profile.step, config.profile.handoff, config.overhead_s)
    training = SimulatedTraining(requests.training(rate), config.topology, config.slo, costs, config.seed)
    return Workload(cell, requests, rate, training)


def price_of(artifact: Artifact) -> Policy:
    """The price of an artifact, as a router that serves it has it."""
    return policy_named("price", artifact=artifact)


def learned_policy(work: TopologyWork, workloads: Sequence[Workload]) -> tuple[LearnedPolicy, Artifact]:
    """Searched on all workloads with one length predictor and one table, and written; read where it was."""
    path, artifact_path = work.learned_path(), work.artifact_path()
    if not path.exists():
        learned, artifact = learn_policy(work, workloads)
        save(artifact, artifact_path)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(learned), indent=2))
    return msgspec.json.decode(path.read_bytes(), type=LearnedPolicy), load(artifact_path)


def learn_policy(work: TopologyWork, workloads: Sequence[Workload]) -> tuple[LearnedPolicy, Artifact]:
    """The search itself: the table first, then the price that may favour it."""
    config = work.config
    trainings = [workload.training for workload in workloads]
    lengths = joint_lengths(trainings)
    compiled = joint_compiled(trainings, lengths)
    cells = [joint_cell(workload, lengths, config.loads) for workload in workloads]
    joint = JointSearch(cells, config.objective, config.trials, config.cells[0].seed)
    table_best = joint.best_table(work.study("table"), compiled)
    table = table_point(compiled, table_best.params)
    compiled = replace(compiled, regimes=table.regimes)
    decided = compiled.decision_table(table.actions)
    prices = [work.study(f"price-{chain}") for chain in range(config.chains)]
    for chain, study in enumerate(prices):
        joint.best_price(study, decided, chain)
    tail_only = config.confirming_tails
    others = [joint_cell(workload, lengths, config.confirming_loads, CONFIRMING, tail_only) for workload in workloads]
    best = joint.confirmed(prices, decided, others)
    learned = LearnedPolicy(
        topology=str(config.topology),
        objective=config.objective,
        workloads=tuple(cell.workload.name for cell in config.cells),
        params={name: float(value) for name, value in best.params.items()},
        value=best.value,
        table_value=table_best.value,
        trials=best.complete,
    )
    n_rows = int(compiled.clusters.counts.sum())
    artifact = build_artifact(
        Source(SIMULATED, 1.0, n_rows, {}, (), None),
        compiled,
        table.actions,
        table.placement,
        lengths,
        trainings[0].costs,
        trainings[0].slo,
        SearchRecord(joint.seed, SAMPLER, 1, best.complete, config.policy, ()),
        form="price",
        price=learned.params,
        profile=trainings[0].topology.profile,
        workload=", ".join(learned.workloads),
        prefill_engines=config.topology.prefill_engines,
        decode_engines=config.topology.decode_engines,
    )
    return learned, artifact


def joint_cell(
    workload: Workload, lengths: LengthQuantiles, loads: Sequence[float], first: int = 0, tail_only: int = 0
) -> JointCell:
    """The traces to search on, the first of that number, and after them those of the tail alone, with the runs of the
    references as they were tuned: with their workload's lengths.
    """
    loads = (*loads, *[TAIL_LOAD] * tail_only)
    training = workload.training
    traces = workload.requests.searched(workload.rate, loads, first)
    own = bench_of(traces, training.topology, training.slo, training.lengths.predictor())
    judged = {c.policy: read_judged(workload.cell, c) for c in workload.cell.contenders if c.policy in REFERENCES}
    best = max(judged, key=lambda name: judged[name].training_goodput)

    def runs(name: str) -> list[Simulated]:
        return own.runs(CONTENDERS[name](training).policy(judged[name].params))

    bench = bench_of(traces, training.topology, training.slo, lengths.predictor())
    return JointCell(bench, loads, runs(best), runs(DYNAMO), tail_only)
