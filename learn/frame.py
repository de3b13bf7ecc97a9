"""Journal rows to a typed frame for training; every row that is not used is counted by its reason.

One rule for missing values, equal in router and trainer: a length that is missing counts as 0 tokens when a
cluster is looked up (`serve_table.lookup.length_bin`, `learn.clusters.Clusters.assign`), and rows that miss a
feature are not used to learn. A missing outcome stays null and is ignored by the objectives that need it.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from learn.drops import REASONS, DropReport, require_rows
from serve_table.artifact_metadata import FEATURE_NAMES
from serve_table.errors import JournalError
from serve_table.journal import JournalReader, Row
from serve_table.replay import decode_candidates, request_and_fleet
from serve_table.situation import ACTION_NAMES, Features, features_of

COLUMNS = {
    "request_id": "string",
    "time": "float64",
    "arrival_s": "float64",
    "endpoint": "string",
    "stream": "bool",
    "policy": "string",
    "policy_digest": "string",
    "explore": "float64",
    "prompt_tokens": "float64",
    "uncached_prefill_tokens": "float64",
    "uncached_decode_tokens": "float64",
    "predicted_output_tokens": "float64",
    "slo_class": "int64",
    "prefill_pressure_tokens": "float64",
    "decode_pressure_requests": "float64",
    "action": "int64",
    "executed": "int64",
    "reason": "string",
    "propensity": "float64",
    "prefill_engine": "string",
    "decode_engine": "string",
    "finish_reason": "string",
    "ttft_s": "float64",
    "tpot_s": "float64",
    "e2e_s": "float64",
    "prefill_leg_s": "float64",
    "handoff_age_s": "float64",
    "usage_prompt_tokens": "Int64",
    "output_tokens": "Int64",
    "cached_tokens": "Int64",
    "ttft_target_s": "float64",
    "tpot_target_s": "float64",
    "slo_met": "boolean",
}
"""Column to pandas type. Features are those of `serve_table.situation.Features`; action and executed index
ACTION_NAMES; float columns hold NaN, the others pandas.NA where the journal has null."""

OUTCOMES = ("ttft_s", "tpot_s", "output_tokens", "slo_met")
MEASURED = ("ttft_s", "tpot_s", "prefill_leg_s", "handoff_age_s")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CleanFrame:
    """Usable rows in the order read, with `COLUMNS`, all from one kind of cluster at one dilation.

    digests: sha256 of each segment's content, sorted by segment name; empty where rows came without files.
    """

    rows: pd.DataFrame
    report: DropReport
    cluster_kind: str
    dilation: float
    digests: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def features(self) -> Floats:
        """(n_rows, 5) in the order of FEATURE_NAMES: four lengths in tokens and the SLO class."""
        return self.rows[list(FEATURE_NAMES)].to_numpy(dtype=np.float64)

    def pressures(self) -> Floats:
        """(n_rows, 2): prefill pressure in tokens, decode pressure in requests."""
        return self.rows[["prefill_pressure_tokens", "decode_pressure_requests"]].to_numpy(dtype=np.float64)

    def outcome(self, name: str) -> Floats:
        """(n_rows,) of a numeric or boolean column as float, NaN where it is null."""
        return np.asarray(
            self.rows[name].astype("Float64").to_numpy(dtype=np.float64, na_value=np.nan), dtype=np.float64
        )


def journaled_features(row: Row) -> Features:
    """The features of a row by the router's own function. Raises JournalError for a row without a decision."""
    return features_of(*request_and_fleet(row))


def clean(
    rows: Iterable[Row],
    *,
    cluster_kind: str | None = None,
    dilation: float | None = None,
) -> CleanFrame:
    """The usable rows as a typed frame, with a report of all others.

    cluster_kind, dilation: use rows of these only. Raises JournalError where kinds or dilations are mixed and
    none is selected, and where no row is usable.
    """
    dropped: Counter[str] = Counter()
    kinds: Counter[tuple[str, float]] = Counter()
    seen: set[str] = set()
    columns: list[list[object]] = [[] for _ in COLUMNS]
    rows_read = 0
    for row in rows:
        rows_read += 1
        if row.request_id in seen:
            reason: str | None = "duplicate_request_id"
        elif cluster_kind is not None and row.cluster_kind != cluster_kind:
            reason = "other_cluster_kind"
        elif dilation is not None and row.dilation != dilation:
            reason = "other_dilation"
        else:
            kinds[row.cluster_kind, row.dilation] += 1
            reason = drop_reason(row)
        seen.add(row.request_id)
        if reason is not None:
            dropped[reason] += 1
            continue
        for column, value in zip(columns, _values(row), strict=True):
            column.append(value)
    require_one_kind(kinds)
    frame = _typed(columns)
    nulls = {name: int(frame[name].isna().sum()) for name in OUTCOMES}
    report = DropReport(
        rows_read=rows_read,
        rows_used=len(frame),
        dropped={reason: dropped[reason] for reason in REASONS if dropped[reason]},
        nulls={name: count for name, count in nulls.items() if count},
    )
    require_rows(report)
    ((kind, only_dilation),) = kinds
    return CleanFrame(frame, report, kind, only_dilation)


def clean_journal(
    paths: list[Path],
    *,
    strict: bool = False,
    cluster_kind: str | None = None,
    dilation: float | None = None,
    progress: Callable[[Iterable[Row]], Iterable[Row]] = iter,
) -> CleanFrame:
    """`clean` of journal files and folders; broken lines are in the report, or raise JournalError if `strict`.

    progress: wraps the rows while they are read, for a progress bar.
    """
    reader = JournalReader(paths, strict=strict)
    digests = journal_digests(reader.segments())
    try:
        frame = clean(progress(reader), cluster_kind=cluster_kind, dilation=dilation)
    except JournalError as error:
        if not reader.broken:
            raise
        raise JournalError(f"{error} ({len(reader.broken)} broken lines, first: {reader.broken[0]})") from error
    report = DropReport(
        frame.report.rows_read,
        frame.report.rows_used,
        frame.report.dropped,
        frame.report.nulls,
        tuple(reader.broken),
    )
    return CleanFrame(frame.rows, report, frame.cluster_kind, frame.dilation, digests)


def journal_digests(segments: list[Path]) -> tuple[str, ...]:
    """sha256 of each segment's content, sorted by segment name, then by content."""
    digests: list[tuple[str, str]] = []
    for path in segments:
        with open(path, "rb") as file:
            digests.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    return tuple(digest for _, digest in sorted(digests))


def require_one_kind(kinds: Counter[tuple[str, float]]) -> None:
    """JournalError where rows of several kinds of cluster or dilations came together."""
    if len(kinds) <= 1:
        return
    found = ", ".join(f"{kind} at dilation {dilation:g} ({n} rows)" for (kind, dilation), n in sorted(kinds.items()))
    raise JournalError(f"the journals mix clusters: {found}; results of these are never mixed, so select one of them")


def drop_reason(row: Row) -> str | None:
    """Why a row cannot be learnt from, the first that applies in the order of `REASONS`; None if it can."""
    if row.status != "ok":
        return row.status
    if row.fleet is None or row.action is None or row.decode_engine is None or row.propensity is None:
        return "no_decision"
    if _fell_back(row):
        return "fallback"
    if row.action == "whole":
        return "whole"
    if not fleet_fits(row):
        return "invalid_fleet"
    features = journaled_features(row)
    if not all(math.isfinite(value) for value in features):
        return "missing_feature"
    lengths = (row.prompt_tokens, row.predicted_output_tokens, row.usage_prompt_tokens, row.output_tokens)
    if any(length is not None and length <= 0 for length in lengths):
        return "non_positive_length"
    if row.slo_class not in (0, 1):
        return "unknown_slo_class"
    times = [row.e2e_s, *(getattr(row, name) for name in MEASURED)]
    if not all(time is None or 0.0 <= time < math.inf for time in times) or not 0.0 < row.propensity <= 1.0:
        return "invalid_outcome"
    if row.stream and row.ttft_s is None:
        return "missing_outcome"
    return None


def _fell_back(row: Row) -> bool:
    decided = (row.action, row.prefill_engine, row.decode_engine)
    executed = (row.executed, row.executed_prefill_engine, row.executed_decode_engine)
    return decided != executed or row.fallback_reason is not None


def fleet_fits(row: Row) -> bool:
    """Whether the journaled fleet has as many engines as the row names, where elastic its prefill engines twice."""
    fleet = row.fleet
    if fleet is None:
        return False
    prefill = (fleet.prefill_requests, fleet.prefill_tokens, fleet.prefill_up, fleet.prefill_cached_tokens)
    decode = (
        fleet.decode_requests,
        fleet.decode_tokens,
        fleet.decode_prefill_tokens,
        fleet.decode_up,
        fleet.decode_cached_tokens,
    )
    return all(len(column) == len(row.prefill_engines) for column in prefill) and all(
        len(column) == len(decode_candidates(row)) for column in decode
    )


def _values(row: Row) -> list[object]:
    """The values of a usable row in the order of `COLUMNS`."""
    values = {**{name: getattr(row, name, None) for name in COLUMNS}, **journaled_features(row)._asdict()}
    values["action"] = ACTION_NAMES.index(str(row.action))
    values["executed"] = ACTION_NAMES.index(str(row.executed))
    if not row.stream:
        # Without a stream the first token's time is unknown: a time to the whole answer is no TTFT.
        values["ttft_s"] = values["tpot_s"] = values["slo_met"] = None
    if row.output_tokens is not None and row.output_tokens <= 1:
        values["tpot_s"] = None
    return [values[name] for name in COLUMNS]


def _typed(columns: list[list[object]]) -> pd.DataFrame:
    """A frame of `COLUMNS` with their types; None becomes the type's missing value."""
    return pd.DataFrame(
        {name: pd.Series(values, dtype=dtype) for (name, dtype), values in zip(COLUMNS.items(), columns, strict=True)}
    )
