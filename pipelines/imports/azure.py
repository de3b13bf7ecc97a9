"""Azure LLM inference traces (2023): TIMESTAMP, ContextTokens, GeneratedTokens."""

from pathlib import Path

import numpy as np
import pandas as pd

from learn.trace import Floats, Trace
from pipelines.imports.csv_columns import numbers, read_columns
from pipelines.imports.options import ImportOptions
from pipelines.imports.report import ImportReport
from pipelines.imports.rows import Tally, check_tokens, to_trace

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def import_azure(
    path: Path, options: ImportOptions | None = None, *, name: str | None = None
) -> tuple[Trace, ImportReport]:
    """The trace in an Azure CSV; timestamps are UTC with up to 9 decimals. TraceError where it cannot be used."""
    frame, lines = read_columns(path, COLUMNS)
    tally = Tally(path, lines)
    time_s = _seconds(frame["TIMESTAMP"])
    prompt_tokens, output_tokens = numbers(frame["ContextTokens"]), numbers(frame["GeneratedTokens"])
    tally.reject(~np.isfinite(time_s), "TIMESTAMP is missing or no date and time")
    check_tokens(tally, prompt_tokens, "ContextTokens")
    check_tokens(tally, output_tokens, "GeneratedTokens")
    notes = (f"imported from {path.name} (Azure LLM inference trace)",)
    columns = (time_s, prompt_tokens, output_tokens)
    return to_trace(name or path.stem, tally, columns, options or ImportOptions(), notes)


def _seconds(column: "pd.Series[str]") -> Floats:
    """Seconds since the earliest time (n_rows,), NaN where a cell is no time; exact to the microsecond."""
    times = pd.to_datetime(column, format="ISO8601", utc=True, errors="coerce")
    return np.asarray((times - times.min()).dt.total_seconds(), np.float64)
