"""One policy over one trace on live engines: a run that is whole or made again, and what its journal says of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from learn.trace import Trace
from pipelines.attempts import Attempts
from pipelines.engine_cluster import pacing_lines
from pipelines.engine_pace import read_pace, reset_pace
from pipelines.gate_report import GateReport
from pipelines.gates import RESET_PATIENCE_S, gates, reset_caches
from pipelines.live_run import ClusterConfig, Engines, RunPolicy, Say, send_through_router
from pipelines.load_report import LoadReport
from pipelines.progress import Progress
from serve_table.artifact import write_atomically
from serve_table.errors import ClusterError
from serve_table.journal import JournalReader, Row

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Conditions(msgspec.Struct, frozen=True):
    """Whether a live run was what it should be: requests sent when due, paced steps as long as asked.

    engines_kept_pace: None for engines that run at a pace of their own.
    """

    load_kept_schedule: bool
    engines_kept_pace: bool | None

    @property
    def kept(self) -> bool:
        """Whether the run's figures may count."""
        return self.load_kept_schedule and self.engines_kept_pace is not False


@dataclass(frozen=True)
class Measured:
    """Columns (n_requests,), from the journal: times NaN where not measured, slo_met False where not answered."""

    ttft_s: Floats
    tpot_s: Floats
    slo_met: Bools
    failed: Bools
    conditions: Conditions

    @property
    def goodput(self) -> float:
        """Share of all requests, failed ones too, that met both of their targets."""
        return float(self.slo_met.mean())

    @property
    def n_failed(self) -> int:
        return int(self.failed.sum())

    def percentile(self, column: str, q: float) -> float | None:
        """Of `ttft_s` or `tpot_s`, over the requests that have that time; None where none has."""
        return percentile(getattr(self, column), q)


def percentile(values: Floats, q: float) -> float | None:
    """Percentile of the values (n,) that are not NaN; None where all are."""
    return float(np.nanpercentile(values, q)) if np.isfinite(values).any() else None


@dataclass(frozen=True)
class PolicyRun:
    """A run in a folder of its own. what: names it to a person."""

    cluster: ClusterConfig
    policy: RunPolicy
    trace: Trace
    folder: Path
    what: str

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def conditions(self) -> Path:
        """File of the run's `Conditions`, which a run that is whole has."""
        return self.folder / "conditions.json"

    @property
    def outputs(self) -> dict[str, Path]:
        """What the run leaves, for `Run.finish`."""
        return {"journal": self.journal, "conditions": self.conditions}

    def make(self, engines: Engines, say: Say) -> Measured:
        """Send every request, from empty prefix caches on; what a killed run left is thrown away first.

        Raises ClusterError where an engine is gone or nothing was answered, KeyboardInterrupt where it was cut short.
        """
        attempts = Attempts(self.folder)
        # A run is one piece: half of it from another attempt would not be the same load.
        self.conditions.unlink(missing_ok=True)
        attempts.discard(self.journal)
        kind, urls = self.cluster.kind, (*engines.prefill_urls, *engines.decode_urls)
        # A hand-off that nobody fetched is held for its lease, which the dilation stretches.
        reset_caches(engines, RESET_PATIENCE_S * max(self.cluster.dilation, 1.0))
        reset_pace(kind, urls)
        report = self._send(engines, attempts.begin(np.arange(len(self.trace))))
        if not report.complete:
            raise KeyboardInterrupt
        for line in report.lines():
            say(f"{self.what}: {line}")
        paces = read_pace(kind, urls)
        kept_pace = None if paces is None else all(pace.kept for pace in paces)
        if paces is not None and not kept_pace:
            for line in pacing_lines(urls, paces):
                say(f"{self.what}: {line}")
        require_answers(self.journal, len(self.trace))
        write_atomically(self.conditions, msgspec.json.encode(Conditions(report.kept_schedule, kept_pace)))
        return self.measured()

    def _send(self, engines: Engines, id_prefix: str) -> LoadReport:
        progress = Progress(self.what, total=len(self.trace))
        return send_through_router(
            self.cluster, engines, self.policy, self.trace, self.folder, progress, id_prefix=id_prefix
        )

    def measured(self) -> Measured:
        """The outcome of a run that is whole."""
        conditions = msgspec.json.decode(self.conditions.read_bytes(), type=Conditions)
        return measured_from(list(JournalReader([self.journal])), len(self.trace), conditions)


def require_answers(journal: Path, n_requests: int) -> None:
    """ClusterError where requests have no row, or none was answered: nothing to compare then."""
    rows = list(JournalReader([journal]))
    if len(rows) < n_requests:
        raise ClusterError(f"{n_requests - len(rows)} of {n_requests} requests have no journal row in {journal}")
    if not any(row.status == "ok" for row in rows):
        raise ClusterError(f"none of {n_requests} requests was answered, the first: {rows[0].status}; see {journal}")


def measured_from(rows: Sequence[Row], n_requests: int, conditions: Conditions) -> Measured:
    """The journal's outcomes by request; client ids end in the request's index."""
    measured = Measured(
        ttft_s=np.full(n_requests, np.nan),
        tpot_s=np.full(n_requests, np.nan),
        slo_met=np.zeros(n_requests, bool),
        failed=np.ones(n_requests, bool),
        conditions=conditions,
    )
    for row in rows:
        i = int((row.client_id or "").rpartition("-")[2])
        measured.ttft_s[i] = np.nan if row.ttft_s is None else row.ttft_s
        measured.tpot_s[i] = np.nan if row.tpot_s is None else row.tpot_s
        measured.slo_met[i] = row.status == "ok" and bool(row.slo_met)
        measured.failed[i] = row.status != "ok"
    return measured


def pass_gates(engines: Engines, cluster: ClusterConfig, say: Say) -> GateReport:
    """Run the correctness gates, which also warm every pair; ClusterError where one fails: nothing may count then."""
    say("correctness gates first")
    report = gates(engines, cluster.model, say=say)
    report.require_passed()
    say(f"all {len(report.gates)} gates passed in {report.duration_s:.0f} s")
    return report
