"""BurstGPT traces: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type."""

from pathlib import Path

from learn.trace import Trace
from pipelines.imports.csv_columns import numbers, read_columns
from pipelines.imports.options import ImportOptions
from pipelines.imports.report import ImportReport
from pipelines.imports.rows import Tally, check_times, check_tokens, to_trace

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def import_burstgpt(
    path: Path, options: ImportOptions | None = None, *, name: str | None = None
) -> tuple[Trace, ImportReport]:
    """The trace in a BurstGPT CSV; rows without an answer are failed requests and skipped.

    Its first days are nearly idle: choose a slice with `from_s` and `to_s`. TraceError where it cannot be used.
    """
    frame, lines = read_columns(path, COLUMNS)
    tally = Tally(path, lines)
    time_s, prompt_tokens, output_tokens = (numbers(frame[column]) for column in COLUMNS)
    check_times(tally, time_s, "Timestamp")
    tally.reject(output_tokens == 0, "Response tokens are 0: a failed request")
    check_tokens(tally, prompt_tokens, "Request tokens")
    check_tokens(tally, output_tokens, "Response tokens")
    notes = (f"imported from {path.name} (BurstGPT)",)
    columns = (time_s, prompt_tokens, output_tokens)
    return to_trace(name or path.stem, tally, columns, options or ImportOptions(), notes)
