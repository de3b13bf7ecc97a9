"""The file of fidelity figures: one row for each compared run that was simulated."""

from pathlib import Path

from pipelines.policy_run import percentile
from pipelines.results import RESULTS_FOLDER
from pipelines.row_file import KeyedRow, RowFile
from pipelines.simulated_runs import SimulatedRun

DEFAULT_PATH = RESULTS_FOLDER / "fidelity.csv"


class FidelityRow(KeyedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run, live and simulated. Times in seconds of engine time, over the requests that have them.

    replayed_goodput: simulated with every choice as it was executed live. artifact: digest of the one whose costs,
    fitted before the run, were simulated with.
    """

    workload: str
    prefill_engines: int
    decode_engines: int
    policy: str
    seed: int
    cluster_kind: str
    live_goodput: float
    simulated_goodput: float
    replayed_goodput: float
    live_ttft_p50_s: float | None
    live_ttft_p90_s: float | None
    live_tpot_p50_s: float | None
    live_tpot_p90_s: float | None
    simulated_ttft_p50_s: float | None
    simulated_ttft_p90_s: float | None
    simulated_tpot_p50_s: float | None
    simulated_tpot_p90_s: float | None
    dilation: float
    requests_per_s: float
    requests: int
    failed: int
    policy_digest: str
    artifact: str

    @property
    def key(self) -> tuple[str | int, ...]:
        """What a file has one row of."""
        return self.workload, self.prefill_engines, self.decode_engines, self.policy, self.seed, self.cluster_kind


def fidelity_file(path: Path) -> RowFile[FidelityRow]:
    return RowFile(path, FidelityRow, "fidelity results")


def fidelity_row(run: SimulatedRun) -> FidelityRow:
    """The row of a run."""
    config, measured = run.recorded.config, run.recorded.measured
    times: dict[str, float | None] = {}
    for side, columns in (("live", measured), ("simulated", run.simulated)):
        for kind in ("ttft", "tpot"):
            for q in (50, 90):
                times[f"{side}_{kind}_p{q}_s"] = percentile(getattr(columns, f"{kind}_s"), q)
    return FidelityRow(
        workload=config.workload.name,
        prefill_engines=config.cluster.prefill_engines,
        decode_engines=config.cluster.decode_engines,
        policy=config.policy,
        seed=config.workload.seed,
        cluster_kind=config.cluster.kind,
        live_goodput=measured.goodput,
        simulated_goodput=run.simulated.goodput,
        replayed_goodput=run.replayed_goodput,
        **times,
        dilation=config.cluster.dilation,
        requests_per_s=config.workload.requests_per_s,
        requests=len(measured.slo_met),
        failed=measured.n_failed,
        policy_digest=run.recorded.policy_digest,
        artifact=run.artifact.digest(),
    )
