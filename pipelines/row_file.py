"""CSV files of records that have a key: rows of the same key are replaced, all others stay."""

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from serve_table.artifact import write_atomically
from serve_table.errors import ConfigError


class KeyedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A record whose fields are a file's columns."""

    @property
    def key(self) -> tuple[str | int, ...]:
        """What a file has one row of."""
        raise NotImplementedError


RowT = TypeVar("RowT", bound=KeyedRow)


@dataclass(frozen=True)
class RowFile(Generic[RowT]):
    """A CSV file of one type of row. what: names the rows to a person."""

    path: Path
    row_type: type[RowT]
    what: str

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.row_type.__struct_fields__)

    def rows(self) -> list[RowT]:
        """Those in the file; none where there is no file. ConfigError where it is none of ours."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the results {self.path}: {error}") from error
        reader = csv.reader(io.StringIO(text, newline=""))
        header = next(reader, [])
        if tuple(header) != self.columns:
            raise ConfigError(f"{self.path} is no file of {self.what} (its columns differ): name another --out")
        return [self._row(cells, reader.line_num) for cells in reader]

    def put(self, rows: Iterable[RowT]) -> None:
        """Replace the rows of the same keys and keep all others; the file is whole at any moment."""
        by_key = {row.key: row for row in (*self.rows(), *rows)}
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        for key in sorted(by_key):
            writer.writerow([_cell(value) for value in msgspec.structs.astuple(by_key[key])])
        write_atomically(self.path, text.getvalue().encode())

    def _row(self, cells: list[str], line: int) -> RowT:
        try:
            if len(cells) != len(self.columns):
                raise msgspec.ValidationError(f"{len(cells)} cells instead of {len(self.columns)}")
            values = {name: cell if cell else None for name, cell in zip(self.columns, cells, strict=True)}
            return msgspec.convert(values, self.row_type, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.path} line {line} is damaged ({error}): mend it or name another --out") from error


def _cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else value
