"""Journals compacted to Parquet for training, and read back as the same frame."""

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from learn.drops import DropReport
from learn.frame import COLUMNS, CleanFrame, clean_journal, journal_digests
from serve_table.artifact import write_atomically
from serve_table.errors import JournalError
from serve_table.journal import BrokenLine, JournalReader, Row

FORMAT_VERSION = 1
METADATA_KEY = b"rutter"


class BrokenPlace(msgspec.Struct, frozen=True):
    path: str
    offset_bytes: int
    reason: str


class Compacted(msgspec.Struct, frozen=True):
    """What a Parquet file says of itself in its schema's metadata; selected_*: what was asked for."""

    format_version: int
    cluster_kind: str
    dilation: float
    selected_cluster_kind: str | None
    selected_dilation: float | None
    digests: list[str]
    rows_read: int
    dropped: dict[str, int]
    nulls: dict[str, int]
    broken: list[BrokenPlace]


def arrow_schema() -> pa.Schema:
    """Column types of the file; the journal's nulls are Parquet's nulls."""
    types = {
        "string": pa.string(),
        "float64": pa.float64(),
        "int64": pa.int64(),
        "Int64": pa.int64(),
        "bool": pa.bool_(),
        "boolean": pa.bool_(),
    }
    return pa.schema([pa.field(name, types[dtype]) for name, dtype in COLUMNS.items()])


def compact(
    paths: list[Path],
    parquet_path: Path,
    *,
    strict: bool = False,
    cluster_kind: str | None = None,
    dilation: float | None = None,
    progress: Callable[[Iterable[Row]], Iterable[Row]] = iter,
) -> CleanFrame:
    """Clean journals, write them to Parquet and return their frame; parameters as `clean_journal`.

    Where the file already holds exactly these segments (by digest) and selection, it is read instead of written.
    """
    existing = read_metadata(parquet_path) if parquet_path.is_file() else None
    if existing is not None and not (strict and existing.broken):
        selection = (existing.selected_cluster_kind, existing.selected_dilation)
        digests = journal_digests(JournalReader(paths).segments())
        if selection == (cluster_kind, dilation) and tuple(existing.digests) == digests:
            return read_parquet(parquet_path)
    frame = clean_journal(paths, strict=strict, cluster_kind=cluster_kind, dilation=dilation, progress=progress)
    write_atomically(parquet_path, _parquet_bytes(frame, cluster_kind, dilation))
    return frame


def read_parquet(path: Path) -> CleanFrame:
    """The frame that `compact` wrote; JournalError names the file where it is none."""
    metadata = read_metadata(path)
    if metadata is None:
        raise JournalError(f"{path} is not a compacted journal of format {FORMAT_VERSION}: compact the journals again")
    table = pq.read_table(path)
    rows = pd.DataFrame({name: table[name].to_pandas().astype(dtype) for name, dtype in COLUMNS.items()})
    broken = tuple(BrokenLine(Path(place.path), place.offset_bytes, place.reason) for place in metadata.broken)
    report = DropReport(metadata.rows_read, len(rows), metadata.dropped, metadata.nulls, broken)
    return CleanFrame(rows, report, metadata.cluster_kind, metadata.dilation, tuple(metadata.digests))


def read_metadata(path: Path) -> Compacted | None:
    """What the file says of itself; None where it is not a compacted journal of this format."""
    try:
        schema = pq.read_schema(path)
        metadata = msgspec.json.decode((schema.metadata or {})[METADATA_KEY], type=Compacted)
    except (OSError, pa.ArrowException, KeyError, msgspec.DecodeError):
        return None
    same_columns = schema.remove_metadata().equals(arrow_schema())
    return metadata if metadata.format_version == FORMAT_VERSION and same_columns else None


def _parquet_bytes(frame: CleanFrame, cluster_kind: str | None, dilation: float | None) -> bytes:
    metadata = Compacted(
        format_version=FORMAT_VERSION,
        cluster_kind=frame.cluster_kind,
        dilation=frame.dilation,
        selected_cluster_kind=cluster_kind,
        selected_dilation=dilation,
        digests=list(frame.digests),
        rows_read=frame.report.rows_read,
        dropped=frame.report.dropped,
        nulls=frame.report.nulls,
        broken=[BrokenPlace(str(line.path), line.offset_bytes, line.reason) for line in frame.report.broken],
    )
    schema = arrow_schema().with_metadata({METADATA_KEY: msgspec.json.encode(metadata)})
    columns = [pa.array(frame.rows[field.name], type=field.type, from_pandas=True) for field in schema]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(columns, schema=schema), sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content
