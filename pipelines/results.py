"""Result files: one row a run, of one kind of cluster a file, as CSV."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipelines.row_file import KeyedRow, RowFile
from serve_table.errors import ConfigError

RESULTS_FOLDER = Path("data/results")


class ResultRow(KeyedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run. Times in seconds of engine time, over the requests that have them; goodput of all requests.

    failed: requests without a whole answer, which missed their targets. kept_pace: None for engines of a pace of
    their own. counted: whether the run may be used: gates passed, pace and schedule kept.
    """

    workload: str
    prefill_engines: int
    decode_engines: int
    policy: str
    seed: int
    goodput: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None
    tpot_p99_s: float | None
    cluster_kind: str
    dilation: float
    requests_per_s: float
    requests: int
    failed: int
    kept_schedule: bool
    kept_pace: bool | None
    counted: bool
    policy_digest: str

    @property
    def key(self) -> tuple[str, int, int, str, int]:
        """What a file has one row of."""
        return self.workload, self.prefill_engines, self.decode_engines, self.policy, self.seed


COLUMNS = tuple(ResultRow.__struct_fields__)


@dataclass(frozen=True)
class ResultFile:
    """A CSV file of runs of one kind of cluster."""

    path: Path
    cluster_kind: str

    @property
    def _file(self) -> RowFile[ResultRow]:
        return RowFile(self.path, ResultRow, "live results")

    def rows(self) -> list[ResultRow]:
        """Those in the file; none where there is no file. ConfigError where it is none of ours, or of another kind."""
        rows = self._file.rows()
        other = next((row for row in rows if row.cluster_kind != self.cluster_kind), None)
        if other is not None:
            raise ConfigError(
                f"{self.path} holds results of a cluster {other.cluster_kind!r}, these are of {self.cluster_kind!r}: "
                "kinds are never mixed in one file, name another --out"
            )
        return rows

    def put(self, rows: Iterable[ResultRow]) -> None:
        """Replace the rows of the same keys and keep all others; the file is whole at any moment."""
        self.rows()
        self._file.put(rows)
