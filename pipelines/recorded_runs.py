"""The runs that comparisons left in run folders: found by their stages' records, with what their journals say."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from learn.frame import journal_digests
from learn.trace import Trace
from pipelines.compared_runs import RunConfig, gates_passed
from pipelines.policy_run import Conditions, Measured, measured_from
from pipelines.stages import RUNS_FOLDER, Run, StageRecord
from pipelines.workload_spec import requests_of
from serve_table.errors import ConfigError
from serve_table.journal import JournalReader, Row

STAGE_PREFIX = "run-"
MAX_OTHER_SHARE = 0.01
"""Share of rows that may differ from the workload's requests."""


@dataclass(frozen=True)
class RecordedRun:
    """A compared run that is whole. finished_time: Unix time."""

    config: RunConfig
    journal: Path
    conditions: Conditions
    gated: bool
    finished_time: float

    @property
    def what(self) -> str:
        workload, cluster = self.config.workload, self.config.cluster
        return (
            f"{workload.name}, seed {workload.seed}, {self.config.policy} on {cluster.kind} "
            f"{cluster.prefill_engines}P+{cluster.decode_engines}D, attempt {self.config.attempt}"
        )

    @property
    def key(self) -> tuple[str, int, int, str, str, int]:
        """Of all runs of one key, one counts."""
        cluster, workload = self.config.cluster, self.config.workload
        return (
            cluster.kind,
            cluster.prefill_engines,
            cluster.decode_engines,
            workload.name,
            self.config.policy,
            workload.seed,
        )

    @cached_property
    def trace(self) -> Trace:
        """The requests that were sent, made again from their specification."""
        return requests_of(self.config.workload)

    @cached_property
    def rows(self) -> list[Row]:
        return list(JournalReader([self.journal]))

    @cached_property
    def measured(self) -> Measured:
        return measured_from(self.rows, self.config.workload.n_requests, self.conditions)

    @property
    def policy_digest(self) -> str:
        return self.rows[0].policy_digest

    def journal_digests(self) -> tuple[str, ...]:
        return journal_digests(JournalReader([self.journal]).segments())

    def why_not(self) -> str | None:
        """Why its figures do not count; None where they do."""
        if not self.conditions.kept:
            late = "the engines were" if self.conditions.engines_kept_pace is False else "the load was"
            return f"{late} late"
        if not self.gated:
            return "its gates are not on record"
        return None if self._is_of_its_trace() else "its workload is made otherwise by this program: compare again"

    def _is_of_its_trace(self) -> bool:
        """Whether the journaled answers and classes are those of the requests made again."""
        n = len(self.trace)
        other = 0
        for row in self.rows:
            i = request_index(row)
            tokens = int(self.trace.output_tokens[i]) if i < n else 0
            other += row.status == "ok" and (row.output_tokens, row.slo_class) != (tokens, self.trace.slo_class[i])
        return n == self.config.workload.n_requests and other <= MAX_OTHER_SHARE * n


def request_index(row: Row) -> int:
    """Which request of its run's trace a row is of."""
    return int((row.client_id or "").rpartition("-")[2])


def run_named(source: str) -> Run:
    """A run by its name or folder; ConfigError where there is none."""
    folder = Path(source) if Path(source).is_dir() else RUNS_FOLDER / source
    if not folder.is_dir():
        raise ConfigError(f"{source!r}: neither a run under {RUNS_FOLDER} nor a run folder")
    return Run(folder)


def recorded_runs(run_: Run) -> list[RecordedRun]:
    """Every compared run of a folder that is finished and unaltered, also such as do not count.

    Raises ConfigError for a record of another version of the program.
    """
    return [_recorded(name, record, run_) for name, record in run_.finished(STAGE_PREFIX)]


def _recorded(name: str, record: StageRecord, run_: Run) -> RecordedRun:
    try:
        config = msgspec.json.decode(record.config, type=RunConfig)
        conditions = msgspec.json.decode(run_.output_path(record, "conditions").read_bytes(), type=Conditions)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name} in {run_.folder} is of another version ({error}): compare again") from error
    return RecordedRun(
        config=config,
        journal=run_.output_path(record, "journal"),
        conditions=conditions,
        gated=gates_passed(record, run_),
        finished_time=record.finished_time or 0.0,
    )


def latest_of_each(runs: Sequence[RecordedRun]) -> tuple[list[RecordedRun], list[RecordedRun]]:
    """The run of each key that was finished last, by key, and the others."""
    in_order = sorted(runs, key=lambda run: (run.key, run.finished_time))
    latest = {run.key: run for run in in_order}
    return list(latest.values()), [run for run in in_order if latest[run.key] is not run]
