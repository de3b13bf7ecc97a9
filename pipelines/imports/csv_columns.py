"""Named columns of a CSV trace, or one line saying why not."""

import io
import re
from pathlib import Path

import numpy as np
import pandas as pd

from learn.trace import Floats, Ints
from serve_table.errors import TraceError


def read_trace_file(path: Path) -> bytes:
    """The file's bytes; TraceError where it is absent, unreadable, empty or not text."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(
            f"cannot read the trace {path}: {error.strerror}; data/README.md says where to get it"
        ) from error
    if not data.strip():
        raise TraceError(f"{path}: line 1: the file is empty; download it again")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: {_at(data, error.start)}: not text in UTF-8; unpack it first") from error
    if (nul := data.find(b"\0")) >= 0:
        raise TraceError(f"{path}: {_at(data, nul)}: a NUL byte: the file is not text or damaged; download it again")
    return data


def _at(data: bytes, offset: int) -> str:
    line = data.count(b"\n", 0, offset) + 1
    return f"line {line:,}"


def read_columns(path: Path, required: tuple[str, ...]) -> tuple[pd.DataFrame, Ints]:
    """The required columns as text (n_rows,), absent cells empty, and each row's line number."""
    data = read_trace_file(path)
    try:
        frame = pd.read_csv(
            io.BytesIO(data), dtype=str, keep_default_na=False, skip_blank_lines=False, encoding="utf-8-sig"
        )
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        found = re.search(r"(line|row) (\d+)", str(error))
        line = int(found[2]) + (found[1] == "row") if found else 1
        reason = str(error).removeprefix("Error tokenizing data. C error: ").strip()
        raise TraceError(f"{path}: line {line}: {reason}; the file is damaged there, download it again") from error
    frame.columns = frame.columns.str.strip()
    missing = [column for column in required if column not in frame.columns]
    if missing:
        has = ", ".join(frame.columns[:12])
        raise TraceError(f"{path}: line 1: no column {', '.join(missing)}; it has {has}: is it another format?")
    if frame.empty:
        raise TraceError(f"{path}: line 1: a header and no rows; download it again")
    _require_whole_last_line(path, data)
    lines = np.arange(2, len(frame) + 2, dtype=np.int64)
    blank = (frame == "").all(axis=1).to_numpy()
    return frame.loc[~blank, list(required)], lines[~blank]


def _require_whole_last_line(path: Path, data: bytes) -> None:
    """A cut download ends within a line; a last line with fewer cells than the header shows it."""
    body = data.rstrip()
    last = body[body.rfind(b"\n") + 1 :]
    if last.count(b",") < body[: body.find(b"\n")].count(b",") and b'"' not in body[: body.find(b"\n")]:
        line = body.count(b"\n") + 1
        raise TraceError(f"{path}: line {line:,}: the last line is cut off; download the file again")


def numbers(column: "pd.Series[str]") -> Floats:
    """Numbers (n_rows,), NaN where a cell is none."""
    return pd.to_numeric(column, errors="coerce").to_numpy(np.float64)
