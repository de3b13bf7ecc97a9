"""What an import read, kept, fixed and rejected, for people."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from learn.trace import Floats

PROFILE_PARTS = 12
LEAST_PART_S = 1e-9


@dataclass(frozen=True)
class Finding:
    """One reason for which rows were fixed or rejected, and the line of the first of them."""

    reason: str
    n_rows: int
    example_line: int

    def __str__(self) -> str:
        return f"{self.n_rows:,} {self.reason} (line {self.example_line:,})"


@dataclass(frozen=True)
class RateProfile:
    """Mean rates over equal parts of the file's time: requests_per_s (n_parts,)."""

    part_s: float
    requests_per_s: tuple[float, ...]

    def __str__(self) -> str:
        rates = " ".join(f"{rate:.2f}" for rate in self.requests_per_s)
        return f"{rates} requests/s in parts of {self.part_s:,.0f} s"


def rate_profile(time_s: Floats, n_parts: int = PROFILE_PARTS) -> RateProfile:
    """The profile of ascending times (n_requests,) from 0."""
    part_s = float(time_s[-1]) / n_parts
    if part_s < LEAST_PART_S:
        return RateProfile(0.0, ())
    parts = np.minimum((time_s / part_s).astype(np.int64), n_parts - 1)
    return RateProfile(part_s, tuple(np.bincount(parts, minlength=n_parts) / part_s))


@dataclass(frozen=True)
class ImportReport:
    """Rows of one file: `rows_read` = `rows_kept` + `rows_outside_slice` + those in `rejected`.

    profile: over all usable rows of the file, to choose a slice by. slice_requests_per_s: None where the
    kept rows span no time.
    """

    path: Path
    rows_read: int
    rows_kept: int
    rows_outside_slice: int
    rejected: tuple[Finding, ...]
    fixed: tuple[Finding, ...]
    warnings: tuple[str, ...]
    profile: RateProfile
    slice_requests_per_s: float | None

    def lines(self) -> list[str]:
        """The report, a line each."""
        rate = "" if self.slice_requests_per_s is None else f" at {self.slice_requests_per_s:.3g} requests/s"
        outside = f", {self.rows_outside_slice:,} outside the slice" if self.rows_outside_slice else ""
        lines = [f"{self.path.name}: {self.rows_read:,} rows read, {self.rows_kept:,} kept{rate}{outside}"]
        lines += [f"  rejected: {finding}" for finding in self.rejected]
        lines += [f"  fixed: {finding}" for finding in self.fixed]
        if self.profile.requests_per_s:
            lines.append(f"  rate over the file: {self.profile}")
        return lines + [f"  warning: {warning}" for warning in self.warnings]
