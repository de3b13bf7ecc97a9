"""Mooncake traces: JSON lines of timestamp, input_length, output_length and hash_ids per 512 tokens."""

import json
import math
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from learn.trace import Floats, Ints, Trace
from pipelines.imports.csv_columns import read_trace_file
from pipelines.imports.hash_chains import build_chains
from pipelines.imports.options import ImportOptions
from pipelines.imports.report import ImportReport
from pipelines.imports.rows import Chains, Tally, check_times, check_tokens, to_trace
from serve_table.errors import ConfigError, TraceError

BLOCK_TOKENS = 512
UNITS_S = {"ms": 1e-3, "s": 1.0}
# A rate outside is no service's: the timestamps are likelier in another unit than the one given.
PLAUSIBLE_REQUESTS_PER_S = (0.05, 500.0)


class Line(msgspec.Struct):
    """One request as written; a field that is absent or of another type is None."""

    timestamp: float | None = None
    input_length: float | None = None
    output_length: float | None = None
    hash_ids: list[int] | None = None


def import_mooncake(
    path: Path,
    options: ImportOptions | None = None,
    *,
    length_divisor: int = 1,
    timestamp_unit: Literal["ms", "s"] = "ms",
    name: str | None = None,
) -> tuple[Trace, ImportReport]:
    """The trace in a Mooncake file, with its shared prefixes.

    length_divisor: prompts are divided by it, and so are the blocks (512 / divisor tokens, a multiple of 16),
    so that the shares of shared prefixes stay; answers stay as they are. Said in the trace's notes. Raises
    ConfigError for a divisor or unit that cannot be, TraceError for a file that cannot be used.
    """
    if length_divisor < 1 or BLOCK_TOKENS % (16 * length_divisor):
        raise ConfigError(f"length_divisor is {length_divisor}: give 1, 2, 4, 8, 16 or 32")
    if timestamp_unit not in UNITS_S:
        raise ConfigError(f"timestamp_unit is {timestamp_unit!r}: give ms or s")
    rows, lines = _read(path)
    tally = Tally(path, lines)
    time_s = _column([row.timestamp for row in rows]) * UNITS_S[timestamp_unit]
    input_tokens = _column([row.input_length for row in rows])
    output_tokens = _column([row.output_length for row in rows])
    check_times(tally, time_s, "timestamp")
    check_tokens(tally, input_tokens, "input_length")
    check_tokens(tally, output_tokens, "output_length")
    if not tally.usable.any():
        raise tally.no_row_left()
    input_tokens = np.where(tally.usable, input_tokens, 0.0)
    full_blocks = input_tokens.astype(np.int64) // BLOCK_TOKENS
    hash_ids = _fitting_ids(tally, rows, input_tokens, full_blocks)
    built = build_chains(hash_ids, tally.usable)
    tally.fix(built.moved, "with a hash id after another prefix than before: taken as other text")

    def chains_of(kept: Ints) -> Chains:
        return built.of(kept, BLOCK_TOKENS // length_divisor)

    notes: tuple[str, ...] = (f"imported from {path.name} (Mooncake)",)
    if length_divisor > 1:
        notes += (f"prompts divided by {length_divisor}, blocks of {BLOCK_TOKENS // length_divisor} tokens",)
    columns = (time_s, np.maximum(input_tokens // length_divisor, 1.0), output_tokens)
    warnings = _unit_warnings(time_s[tally.usable], timestamp_unit)
    return to_trace(name or path.stem, tally, columns, options or ImportOptions(), notes, chains_of, warnings)


def _column(values: list[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _read(path: Path) -> tuple[list[Line], Ints]:
    """The rows and their line numbers (n_rows,); a line that is no JSON object is a TraceError."""
    decode = msgspec.json.Decoder(Line).decode
    rows, numbers = [], []
    for number, text in enumerate(read_trace_file(path).split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            rows.append(decode(text))
        except msgspec.DecodeError:
            rows.append(_lenient(path, number, text))
        numbers.append(number)
    return rows, np.array(numbers, np.int64)


def _lenient(path: Path, number: int, text: bytes) -> Line:
    """A line with NaN or a field of a wrong type, which msgspec refuses whole."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f"{path}: line {number:,}"
        raise TraceError(f"{where}: not JSON ({error}); the file is cut off or damaged, download it again") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{path}: line {number:,}: not an object; a Mooncake trace has one JSON object a line")
    ids = fields.get("hash_ids")
    whole = isinstance(ids, list) and all(type(block) is int for block in ids)
    return Line(
        timestamp=_number(fields.get("timestamp")),
        input_length=_number(fields.get("input_length")),
        output_length=_number(fields.get("output_length")),
        hash_ids=ids if whole else None,
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _fitting_ids(tally: Tally, rows: list[Line], input_tokens: Floats, full_blocks: Ints) -> list[list[int]]:
    """The ids of each row's full blocks; the last, partial block is never shared as a whole."""
    n_ids = np.array([-1 if row.hash_ids is None else len(row.hash_ids) for row in rows], np.int64)
    tally.fix(n_ids < 0, "without usable hash_ids: no shared prefix")
    tally.fix((n_ids >= 0) & (n_ids < full_blocks), "with fewer hash_ids than full blocks: the rest taken as unshared")
    all_blocks = full_blocks + (full_blocks * BLOCK_TOKENS < input_tokens)
    tally.fix(n_ids > all_blocks, "with more hash_ids than blocks: the surplus dropped")
    return [(row.hash_ids or [])[:full] for row, full in zip(rows, full_blocks.tolist(), strict=True)]


def _unit_warnings(time_s: Floats, unit: str) -> tuple[str, ...]:
    span_s = float(time_s.max() - time_s.min())
    n_requests = len(time_s)
    if n_requests < 2:
        return ()
    if span_s <= 0.0:
        return (f"all {n_requests:,} usable rows have the same timestamp",)
    rate = (n_requests - 1) / span_s
    low, high = PLAUSIBLE_REQUESTS_PER_S
    if low <= rate <= high:
        return ()
    other = "s" if unit == "ms" else "ms"
    return (f"{rate:.3g} requests/s is no plausible rate with timestamps in {unit}: are they in {other}?",)
