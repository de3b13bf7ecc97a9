"""Result files: one row a run, of one kind of cluster a file, as CSV."""

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from serve_table.artifact import write_atomically
from serve_table.errors import ConfigError

RESULTS_FOLDER = Path("data/results")


class ResultRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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

    def rows(self) -> list[ResultRow]:
        """Those in the file; none where there is no file. ConfigError where it is none of ours, or of another kind."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the results {self.path}: {error}") from error
        reader = csv.reader(io.StringIO(text, newline=""))
        header = next(reader, [])
        if tuple(header) != COLUMNS:
            raise ConfigError(f"{self.path} is no file of live results (its columns differ): name another --out")
        rows = [self._row(cells, reader.line_num) for cells in reader]
        other = next((row for row in rows if row.cluster_kind != self.cluster_kind), None)
        if other is not None:
            raise ConfigError(
                f"{self.path} holds results of a cluster {other.cluster_kind!r}, these are of {self.cluster_kind!r}: "
                "kinds are never mixed in one file, name another --out"
            )
        return rows

    def put(self, rows: Iterable[ResultRow]) -> None:
        """Replace the rows of the same keys and keep all others; the file is whole at any moment."""
        by_key = {row.key: row for row in (*self.rows(), *rows)}
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for key in sorted(by_key):
            writer.writerow([_cell(value) for value in msgspec.structs.astuple(by_key[key])])
        write_atomically(self.path, text.getvalue().encode())

    def _row(self, cells: list[str], line: int) -> ResultRow:
        try:
            if len(cells) != len(COLUMNS):
                raise msgspec.ValidationError(f"{len(cells)} cells instead of {len(COLUMNS)}")
            values = {name: cell if cell else None for name, cell in zip(COLUMNS, cells, strict=True)}
            return msgspec.convert(values, ResultRow, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.path} line {line} is damaged ({error}): mend it or name another --out") from error


def _cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else value
