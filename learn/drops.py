"""What became of journal rows on the way to training: used, or dropped for one counted reason."""

from dataclasses import dataclass

from serve_table.errors import JournalError
from serve_table.journal import BrokenLine

REASONS = {
    "duplicate_request_id": "a row of that request id was read before; the first one counts",
    "other_cluster_kind": "from another kind of cluster than the selected one",
    "other_dilation": "from a cluster of another dilation than the selected one",
    "aborted": "the client left",
    "empty": "the answer had no token",
    "client_error": "the request was refused as wrong",
    "upstream_error": "an engine failed",
    "timeout": "no answer in time",
    "unavailable": "no engine was up",
    "no_decision": "no decision or no propensity was journaled",
    "fallback": "executed otherwise than decided, so the outcome is not the chosen action's",
    "whole": "served whole by a prefill engine, which no table chooses",
    "invalid_fleet": "the fleet's lists do not fit the engines",
    "missing_feature": "a feature is NaN or infinite",
    "non_positive_length": "a length is zero or negative",
    "unknown_slo_class": "the SLO class is neither 0 nor 1",
    "invalid_outcome": "a measured time or the propensity is out of range",
    "missing_outcome": "a streamed answer without a TTFT",
}
"""Every reason a row is dropped for, in the order of the checks, and what it means."""

BROKEN_LINE = "broken_line"
SHOWN_BROKEN_LINES = 5


@dataclass(frozen=True)
class DropReport:
    """Counts of rows read, used and dropped, of nulls left in the used ones, and the lines that were no row.

    dropped: reason in `REASONS` to number of rows, without zeros. nulls: column to number of used rows in which
    it is null; an objective ignores them.
    """

    rows_read: int
    rows_used: int
    dropped: dict[str, int]
    nulls: dict[str, int]
    broken: tuple[BrokenLine, ...] = ()

    def counts(self) -> dict[str, int]:
        """Reason to number, broken lines included, as the artifact's metadata has it."""
        broken = {BROKEN_LINE: len(self.broken)} if self.broken else {}
        return {**self.dropped, **broken}

    def lines(self) -> list[str]:
        """The report for people, one fact a line."""
        n_dropped = sum(self.dropped.values())
        lines = [f"journal rows: {self.rows_read} read, {self.rows_used} used, {n_dropped} dropped"]
        lines += [f"  dropped {count}: {reason} ({REASONS[reason]})" for reason, count in self.dropped.items()]
        lines += [f"  used with null {column}: {count}" for column, count in self.nulls.items()]
        if self.broken:
            lines.append(f"  {len(self.broken)} broken lines skipped")
            lines += [f"    {place}" for place in self.broken[:SHOWN_BROKEN_LINES]]
            if len(self.broken) > SHOWN_BROKEN_LINES:
                lines.append(f"    and {len(self.broken) - SHOWN_BROKEN_LINES} more")
        return lines


def require_rows(report: DropReport) -> None:
    """JournalError with the counts where no row is usable."""
    if report.rows_used:
        return
    counts = ", ".join(f"{count} {reason}" for reason, count in report.counts().items())
    raise JournalError(
        f"no usable row among {report.rows_read} journal rows{f': {counts}' if counts else ''}; "
        "collect more with `rutter collect` or give another journal"
    )
