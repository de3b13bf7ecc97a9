"""Rows of a trace file on their way to a Trace: checked, sorted, sliced, every loss counted."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from learn.trace import Floats, Ints, Trace
from pipelines.imports.options import ImportOptions
from pipelines.imports.report import Finding, ImportReport, rate_profile
from pipelines.workloads import HASH_BLOCK_TOKENS, draw_slo_classes
from serve_table.errors import TraceError

Mask = npt.NDArray[np.bool_]

# No model reads more and no trace lasts longer; a number beyond is damage, and would not survive arithmetic.
MOST_TOKENS = 100_000_000
MOST_S = 1e12
SLOW_SHARE = 0.5
QUIET_SHARE = 0.2

# Timestamps of so coarse a step are spread, where enough rows tell the step from chance and enough share one time.
COARSE_STEP_S = 1.0
COARSE_ROWS = 100
SHARED_SHARE = 0.1


@dataclass
class Tally:
    """Which rows of a file are still usable, and why the others are not. lines: (n_rows,), line numbers from 1."""

    path: Path
    lines: Ints
    rejected: list[Finding] = field(default_factory=list)
    fixed: list[Finding] = field(default_factory=list)
    usable: Mask = field(init=False)

    def __post_init__(self) -> None:
        self.usable = np.ones(len(self.lines), bool)

    def reject(self, rows: Mask, reason: str) -> None:
        """Drop those of `rows` that were usable; each row is counted once, under its first reason."""
        rows = rows & self.usable
        self._count(self.rejected, rows, reason)
        self.usable &= ~rows

    def fix(self, rows: Mask, reason: str) -> None:
        """Count usable `rows` that are used otherwise than they were written."""
        self._count(self.fixed, rows & self.usable, reason)

    def _count(self, findings: list[Finding], rows: Mask, reason: str) -> None:
        if rows.any():
            findings.append(Finding(reason, int(rows.sum()), int(self.lines[rows].min())))

    def no_row_left(self) -> TraceError:
        why = "; ".join(str(finding) for finding in self.rejected) or "it holds no rows"
        return TraceError(f"{self.path}: no usable row of {len(self.lines):,}: {why}; is this the right file?")


@dataclass(frozen=True)
class Chains:
    """Prefix chains of some rows, as learn.trace.Trace holds them."""

    chain_start: Ints
    chain_length: Ints
    block_ids: Ints
    hash_block_tokens: int


def no_chains(rows: Ints) -> Chains:
    """For formats that tell nothing about shared prefixes."""
    none = np.zeros(len(rows), np.int64)
    return Chains(none, none, np.zeros(0, np.int64), HASH_BLOCK_TOKENS)


def check_tokens(tally: Tally, tokens: Floats, column: str) -> None:
    """Reject rows whose count (n_rows,), NaN where absent or no number, is not a whole number from 1 on."""
    tally.reject(~np.isfinite(tokens), f"{column} is missing or not a number")
    tally.reject(tokens != np.floor(tokens), f"{column} is not a whole number")
    tally.reject(tokens < 1, f"{column} is below 1")
    tally.reject(tokens > MOST_TOKENS, f"{column} is above {MOST_TOKENS:,}")


def check_times(tally: Tally, time_s: Floats, column: str) -> None:
    """Reject rows whose time (n_rows,) is not finite, before 0 or beyond any trace."""
    tally.reject(~np.isfinite(time_s), f"{column} is missing or not a number")
    tally.reject(time_s < 0, f"{column} is negative")
    tally.reject(time_s > MOST_S, f"{column} is beyond {MOST_S:.0e} s")


def to_trace(
    name: str,
    tally: Tally,
    columns: tuple[Floats, Floats, Floats],
    options: ImportOptions,
    notes: tuple[str, ...],
    chains_of: Callable[[Ints], Chains] = no_chains,
    warnings: tuple[str, ...] = (),
) -> tuple[Trace, ImportReport]:
    """A trace of the usable rows and what became of the others.

    columns: time_s, prompt_tokens, output_tokens (n_rows,), checked already. chains_of: makes the chains of the
    rows kept, given their indices in order of arrival.
    """
    if not tally.usable.any():
        raise tally.no_row_left()
    # What is no number, or none that any trace has, would not survive arithmetic.
    time_s, prompt_tokens, output_tokens = (np.where(tally.usable, column, 0.0) for column in columns)
    order, first_s = _in_order(tally, time_s)
    time_s = _spread(tally, time_s, order)
    slo_class = np.zeros(len(time_s), np.int64)
    slo_class[order] = draw_slo_classes(len(order), options.tight_share, np.random.default_rng(options.seed))
    profile = rate_profile(time_s[order] - first_s)
    if options.max_model_len_tokens is not None:
        limit = options.max_model_len_tokens
        tally.reject(prompt_tokens + output_tokens > limit, f"prompt and answer exceed the context of {limit:,} tokens")
        if not tally.usable.any():
            raise tally.no_row_left()
        order = order[tally.usable[order]]
    rows = _sliced(tally, order, time_s - first_s, options)
    arrival_s = time_s[rows] - time_s[rows[0]]
    span_s = float(arrival_s[-1])
    rate = (len(rows) - 1) / span_s if span_s > 0.0 else None
    chains = chains_of(rows)
    report = ImportReport(
        path=tally.path,
        rows_read=len(tally.lines),
        rows_kept=len(rows),
        rows_outside_slice=len(order) - len(rows),
        rejected=tuple(tally.rejected),
        fixed=tuple(tally.fixed),
        warnings=warnings + _warnings(rate, len(rows), profile.requests_per_s, options),
        profile=profile,
        slice_requests_per_s=rate,
    )
    trace = Trace(
        name,
        arrival_s,
        prompt_tokens[rows].astype(np.int64),
        output_tokens[rows].astype(np.int64),
        slo_class[rows],
        chains.chain_start,
        chains.chain_length,
        chains.block_ids,
        chains.hash_block_tokens,
        notes + (f"SLO classes drawn at random: {options.tight_share:.0%} tight, seed {options.seed}",),
    )
    return trace, report


def _in_order(tally: Tally, time_s: Floats) -> tuple[Ints, float]:
    """Indices of the usable rows by time, equal times as in the file; and the first row's time."""
    usable = np.flatnonzero(tally.usable)
    times = time_s[usable]
    late = np.zeros(len(time_s), bool)
    late[usable] = times < np.maximum.accumulate(times)
    tally.fix(late, "out of order: sorted by time")
    order = usable[np.argsort(times, kind="stable")]
    return order, float(time_s[order[0]])


def _spread(tally: Tally, time_s: Floats, order: Ints) -> Floats:
    """Times (n_rows,), rows that share a coarse timestamp evenly over its step, as they cannot have come at once.

    Left alone they would collide at any rate that the trace is scaled to.
    """
    times = time_s[order]
    distinct, first, n_sharing = np.unique(times, return_index=True, return_counts=True)
    if len(order) < COARSE_ROWS or len(distinct) < 2 or n_sharing[n_sharing > 1].sum() < SHARED_SHARE * len(order):
        return time_s
    gaps_s = np.diff(distinct)
    step_s = float(np.median(gaps_s))
    if step_s < COARSE_STEP_S:
        return time_s
    room_s = np.minimum(np.append(gaps_s, step_s), step_s)
    position = np.arange(len(order)) - np.repeat(first, n_sharing)
    spread = time_s.copy()
    spread[order] = times + np.repeat(room_s / n_sharing, n_sharing) * position
    tally.fix(spread != time_s, f"sharing a timestamp: spread evenly over the file's step of {step_s:.3g} s")
    return spread


def _sliced(tally: Tally, order: Ints, time_s: Floats, options: ImportOptions) -> Ints:
    """Those of `order` that the options ask for; TraceError where none is left."""
    times = time_s[order]
    asked = np.ones(len(order), bool)
    if options.from_s is not None:
        asked &= times >= options.from_s
    if options.to_s is not None:
        asked &= times < options.to_s
    rows = order[asked][options.start :][: options.n_requests]
    if len(rows) == 0:
        raise TraceError(
            f"{tally.path}: the slice is empty: {asked.sum():,} of {len(order):,} usable rows lie in its time, "
            f"{options.start:,} are to be skipped; the trace spans 0 to {times[-1]:,.0f} s"
        )
    return rows


def _warnings(rate: float | None, n_rows: int, profile: tuple[float, ...], options: ImportOptions) -> tuple[str, ...]:
    warnings = []
    if options.n_requests is not None and n_rows < options.n_requests:
        warnings.append(f"only {n_rows:,} of the {options.n_requests:,} requests asked for: the slice holds no more")
    capacity = options.capacity_requests_per_s
    advice = "every policy will look alike; choose a busier slice (from_s, to_s, start) or scale time"
    if rate is not None and capacity is not None and rate < SLOW_SHARE * capacity:
        warnings.append(f"the slice's {rate:.3g} requests/s are far below the capacity of {capacity:.3g}: {advice}")
    elif rate is not None and profile and rate < QUIET_SHARE * max(profile):
        warnings.append(
            f"the slice's {rate:.3g} requests/s are far below the file's {max(profile):.3g} at best: {advice}"
        )
    return tuple(warnings)
