"""`rutter check-journal`: what a journal holds, and every line of it that cannot be used."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from serve_table.artifact import load
from serve_table.errors import JournalError
from serve_table.journal import JournalReader, Row
from serve_table.policy import Policy, policies_of
from serve_table.replay import decode_candidates, redecide
from serve_table.situation import ACTION_NAMES, NO_ENGINE

SHOWN_BROKEN_LINES = 20


class Summary(msgspec.Struct):
    """Counts over a journal's rows; a key is the row's value, or 'none' where it is null."""

    segments: int = 0
    rows: int = 0
    decided: int = 0
    slo_met: int = 0
    slo_judged: int = 0
    status: Counter[str] = msgspec.field(default_factory=Counter)
    policy: Counter[str] = msgspec.field(default_factory=Counter)
    action: Counter[str] = msgspec.field(default_factory=Counter)
    executed: Counter[str] = msgspec.field(default_factory=Counter)
    fallback_reason: Counter[str] = msgspec.field(default_factory=Counter)
    endpoint: Counter[str] = msgspec.field(default_factory=Counter)
    cluster_kind: Counter[str] = msgspec.field(default_factory=Counter)
    prompt_tokens_source: Counter[str] = msgspec.field(default_factory=Counter)
    repeated_request_ids: int = 0
    redecided_alike: int = 0
    redecided_otherwise: list[str] = []
    not_redecided: int = 0
    broken: list[str] = []

    def add(self, row: Row) -> None:
        self.rows += 1
        self.decided += row.fleet is not None
        self.slo_judged += row.slo_met is not None
        self.slo_met += row.slo_met is True
        for name in COUNTED:
            getattr(self, name)[getattr(row, name) or "none"] += 1


COUNTED = (
    "status",
    "policy",
    "action",
    "executed",
    "fallback_reason",
    "endpoint",
    "cluster_kind",
    "prompt_tokens_source",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("journal", nargs="+", type=Path, help="folder of .jsonl segments, or one such file")
    parser.add_argument(
        "--artifact",
        type=Path,
        metavar="FILE",
        help="decide again what this artifact decided, from what is journaled",
    )
    parser.add_argument("--strict", action="store_true", help="fail at the first broken line")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object")


def run(args: argparse.Namespace) -> int:
    again = () if args.artifact is None else policies_of(load(args.artifact))
    summary = summarise(args.journal, args.strict, again)
    print(msgspec.json.encode(summary).decode() if args.json else "\n".join(text_lines(summary)))
    if summary.rows == 0 and summary.broken:
        raise JournalError(f"{', '.join(map(str, args.journal))}: no line is a journal row of this program's format")
    return 1 if summary.redecided_otherwise else 0


def summarise(paths: list[Path], strict: bool = False, again: Sequence[Policy] = ()) -> Summary:
    """Counts over these journals; JournalError where there are no segments, or with `strict` any broken line.

    again: policies whose rows are decided again from what they journaled.
    """
    reader = JournalReader(paths, strict)
    summary = Summary(segments=len(reader.segments()))
    if summary.segments == 0:
        raise JournalError(f"no .jsonl segments in {', '.join(map(str, paths))}: give the folder that the router wrote")
    policies = {policy.digest: policy for policy in again}
    seen: set[str] = set()
    for row in reader:
        summary.add(row)
        summary.repeated_request_ids += row.request_id in seen
        seen.add(row.request_id)
        if again:
            decide_again(summary, row, policies.get(row.policy_digest))
    summary.broken = [str(line) for line in reader.broken]
    return summary


def decide_again(summary: Summary, row: Row, again: Policy | None) -> None:
    """Count whether what the row says leads to its own choice; rows of unknown policies are left out."""
    if row.fleet is None or again is None or row.reason == "decision_error":
        summary.not_redecided += 1
        return
    found = redecide(row, again)
    prefill = None if found.prefill == NO_ENGINE else row.prefill_engines[found.prefill]
    choice = (ACTION_NAMES[found.action], prefill, decode_candidates(row)[found.decode])
    if choice == (row.action, row.prefill_engine, row.decode_engine):
        summary.redecided_alike += 1
    else:
        summary.redecided_otherwise.append(row.request_id)


def text_lines(summary: Summary) -> list[str]:
    lines = [f"{summary.rows} rows in {summary.segments} segments, {summary.decided} of them with a decision"]
    if summary.slo_judged:
        share = summary.slo_met / summary.slo_judged
        lines.append(f"SLO met: {summary.slo_met} of {summary.slo_judged} judged rows ({share:.1%})")
    for name in COUNTED:
        counts: Counter[str] = getattr(summary, name)
        if counts:
            values = ", ".join(f"{value} {count}" for value, count in counts.most_common())
            lines.append(f"{name.replace('_', ' ')}: {values}")
    decided_again = summary.redecided_alike + len(summary.redecided_otherwise)
    if decided_again or summary.not_redecided:
        lines.append(
            f"decided again from the journaled features: {summary.redecided_alike} of {decided_again} alike, "
            f"{summary.not_redecided} left out (another policy or artifact, or no decision)"
        )
    if summary.redecided_otherwise:
        lines.append(f"warning: decided otherwise: {', '.join(summary.redecided_otherwise[:SHOWN_BROKEN_LINES])}")
    if summary.repeated_request_ids:
        lines.append(f"warning: {summary.repeated_request_ids} rows repeat a request id: is a segment given twice?")
    if summary.broken:
        lines.append(f"warning: {len(summary.broken)} broken lines, left out:")
        lines.extend(f"  {line}" for line in summary.broken[:SHOWN_BROKEN_LINES])
        if len(summary.broken) > SHOWN_BROKEN_LINES:
            lines.append(f"  and {len(summary.broken) - SHOWN_BROKEN_LINES} more; --json lists all")
    return lines
