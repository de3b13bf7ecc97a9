"""The runs of a live comparison: each one stage of a run folder, made again once where its times were not kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pipelines.gate_report import GateReport
from pipelines.live_run import ClusterConfig, Engines, RunPolicy, Say
from pipelines.live_start import LiveStart, lasting, stage_word
from pipelines.policy_run import PolicyRun
from pipelines.results import ResultRow
from pipelines.stages import Run, StageRecord
from pipelines.tuned_baselines import Params, live_params
from pipelines.workload_spec import WorkloadSpec, requests_of
from serve_table.artifact import write_atomically
from serve_table.journal import JournalReader
from serve_table.policy import LEARNED_POLICIES
from serve_table.slo import SloTargets

ATTEMPTS = 2


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides a run's figures. table: the artifact's digest, for a learned policy alone; lengths: of its length
    predictor, which all policies see. So another artifact with the same targets and lengths keeps the baselines' runs.
    """

    workload: WorkloadSpec
    cluster: ClusterConfig
    policy: str
    params: Params
    slo: SloTargets
    lengths: str | None
    table: str | None
    attempt: int


@dataclass(frozen=True)
class CompareSettings:
    """What all runs of a comparison share. tuned: baselines' parameters by workload and policy."""

    cluster: ClusterConfig
    start: LiveStart
    tuned: dict[str, dict[str, Params]]

    def params(self, name: str, workload: str) -> Params:
        """A policy's parameters over its defaults."""
        return live_params(name, self.tuned[workload], self.start.costs, self.cluster.hardware)

    def config(self, spec: WorkloadSpec, name: str, attempt: int) -> RunConfig:
        learned = self.start.loaded if name in LEARNED_POLICIES else None
        return RunConfig(
            workload=spec,
            cluster=lasting(self.cluster),
            policy=name,
            params=self.params(name, spec.name),
            slo=self.start.slo,
            lengths=self.start.lengths_digest(),
            table=None if learned is None else learned.digest(),
            attempt=attempt,
        )


@dataclass(frozen=True)
class ComparedRun:
    """One policy on one workload and seed. config: of the attempt that is pending, else of the last one made.

    made: the last attempt that was made, None where there is none yet.
    """

    config: RunConfig
    made: RunConfig | None
    pending: bool

    @property
    def attempt(self) -> int:
        return self.config.attempt

    @property
    def what(self) -> str:
        return f"{self.config.workload.name}, seed {self.config.workload.seed}, {self.config.policy}"

    @property
    def duration_s(self) -> float:
        """Wall time that sending takes."""
        return self.config.workload.n_requests / self.config.workload.requests_per_s * self.config.cluster.dilation


def stage_name(config: RunConfig) -> str:
    return f"run-{stage_word(config.workload.name)}-{config.policy}-{config.workload.seed}"


def compared_runs(
    specs: Sequence[Sequence[WorkloadSpec]], policies: Sequence[str], settings: CompareSettings, run_: Run
) -> list[ComparedRun]:
    """All runs in the order made. specs: of each workload, one a seed.

    Seed by seed, within a seed workload by workload, and the policies of each interleaved: whichever drift the
    machine has meets all of them, and what is there after a while is comparable. Each seed begins with another policy.
    """
    runs = []
    for k in range(len(specs[0])):
        for of_workload in specs:
            turn = k % len(policies)
            for name in (*policies[turn:], *policies[:turn]):
                runs.append(compared_run(of_workload[k], name, settings, run_))
    return runs


def compared_run(spec: WorkloadSpec, name: str, settings: CompareSettings, run_: Run) -> ComparedRun:
    """How far a run is: pending where it was never made, and where it was spoilt and not made once more yet."""
    made: RunConfig | None = None
    for attempt in range(1, ATTEMPTS + 1):
        config = settings.config(spec, name, attempt)
        record = run_.done(stage_name(config), msgspec.to_builtins(config))
        if record is None:
            return ComparedRun(config, made, pending=True)
        made = config
        if policy_run(config, settings, run_).measured().conditions.kept:
            break
    return ComparedRun(config, made, pending=False)


def policy_run(config: RunConfig, settings: CompareSettings, run_: Run) -> PolicyRun:
    """The run in its stage's folder."""
    start = settings.start
    chosen = RunPolicy(
        config.policy,
        artifact=start.artifact,
        calibration=start.calibration,
        seed=config.workload.seed,
        params=config.params,
    )
    folder = run_.stage_folder(stage_name(config), msgspec.to_builtins(config))
    what = f"{config.workload.name} {config.workload.seed} {config.policy}"
    return PolicyRun(settings.cluster, chosen, requests_of(config.workload), folder, what)


def make_run(
    one: ComparedRun, settings: CompareSettings, run_: Run, engines: Engines, report: GateReport, say: Say
) -> ResultRow:
    """Make a pending run on engines whose gates passed, and return its row."""
    report.require_passed()
    config, builtins = one.config, msgspec.to_builtins(one.config)
    stage = run_.begin(stage_name(config), builtins)
    policy_run_ = policy_run(config, settings, run_)
    policy_run_.make(engines, say)
    gates = stage.folder / "gates.json"
    write_atomically(gates, msgspec.json.encode(report))
    run_.finish(stage_name(config), builtins, {**policy_run_.outputs, "gates": gates})
    return row_of(ComparedRun(config, config, pending=False), settings, run_)


def row_of(one: ComparedRun, settings: CompareSettings, run_: Run) -> ResultRow:
    """The row of a run that was made, from its journal."""
    if one.made is None:
        raise ValueError(f"{one.what} was not made yet")
    config = one.made
    found = policy_run(config, settings, run_)
    measured = found.measured()
    record = run_.done(stage_name(config), msgspec.to_builtins(config))
    times = {f"{kind}_p{q}_s": measured.percentile(f"{kind}_s", q) for kind in ("ttft", "tpot") for q in (50, 90, 99)}
    return ResultRow(
        workload=config.workload.name,
        prefill_engines=config.cluster.prefill_engines,
        decode_engines=config.cluster.decode_engines,
        policy=config.policy,
        seed=config.workload.seed,
        goodput=measured.goodput,
        **times,
        cluster_kind=config.cluster.kind,
        dilation=config.cluster.dilation,
        requests_per_s=config.workload.requests_per_s,
        requests=len(measured.slo_met),
        failed=measured.n_failed,
        kept_schedule=measured.conditions.load_kept_schedule,
        kept_pace=measured.conditions.engines_kept_pace,
        counted=measured.conditions.kept and gates_passed(record, run_),
        policy_digest=next(iter(JournalReader([found.journal]))).policy_digest,
    )


def gates_passed(record: StageRecord | None, run_: Run) -> bool:
    """Whether the run was made after gates that passed."""
    if record is None or "gates" not in record.outputs:
        return False
    path = run_.output_path(record, "gates")
    return msgspec.json.decode(path.read_bytes(), type=GateReport).passed
