"""Frontiers for people: what load each policy carries, and what it does on how many engines."""

from collections.abc import Sequence

from learn.carried_load import CARRIED_GOODPUT, carried_load
from learn.contenders import RUTTER
from pipelines.row_file import KeyedRow

LOAD, ENGINES, SPLITS = "load", "engines", "splits"
REFERENCE = "dynamo_style"


class FrontierRow(KeyedRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy's mean goodput over `runs` held-out traces, with its 95 % interval.

    part: LOAD where the rate varies, ENGINES where the cluster does, SPLITS where only its engines' roles do. load: of
    the rate at which round robin is in mid-collapse on the comparison's cluster.
    """

    part: str
    workload: str
    prefill_engines: int
    decode_engines: int
    policy: str
    load: float
    requests_per_s: float
    goodput: float
    goodput_low: float
    goodput_high: float
    runs: int

    @property
    def key(self) -> tuple[str, str, int, int, str, float]:  # type: ignore[override]
        return self.part, self.workload, self.prefill_engines, self.decode_engines, self.policy, self.load


def load_lines(rows: Sequence[FrontierRow]) -> list[str]:
    """The load that each policy carries on one workload, against Dynamo-style's."""
    first = rows[0]
    loads = {name: [row for row in rows if row.policy == name] for name in dict.fromkeys(row.policy for row in rows)}
    carried = {
        name: carried_load([row.load for row in found], [row.goodput for row in found]) for name, found in loads.items()
    }
    lines = [
        f"{first.workload} on {first.prefill_engines}P+{first.decode_engines}D, load at goodput {CARRIED_GOODPUT:.2f} "
        f"(1 is {first.requests_per_s / first.load:g} requests/s):"
    ]
    reference = carried.get(REFERENCE)
    for name, load in carried.items():
        ratio = f", {load / reference:.2f} times {REFERENCE}'s" if load and reference and name != REFERENCE else ""
        lines.append(f"  {name} carries {'no load of these, or all' if load is None else f'{load:.2f}'}{ratio}")
    return lines


def engine_lines(rows: Sequence[FrontierRow]) -> list[str]:
    """Goodput by number of engines, with the fewest on which the learned policy matches round robin on more."""
    first = rows[0]
    lines = [f"{first.workload} at {first.requests_per_s:g} requests/s, goodput by engines:"]
    for row in rows:
        cluster = f"{row.prefill_engines}P+{row.decode_engines}D" if row.prefill_engines else "aggregated"
        engines = row.prefill_engines + row.decode_engines
        lines.append(f"  {engines} engines, {cluster}: {row.policy} {row.goodput:.3f}")
    learned = {count(row): row.goodput for row in rows if row.policy == RUTTER}
    others = {count(row): row.goodput for row in rows if row.policy == "round_robin"}
    for engines, goodput in others.items():
        enough = [fewer for fewer, own in learned.items() if own >= goodput]
        if enough:
            lines.append(f"  {RUTTER} on {min(enough)} engines matches round robin on {engines} ({goodput:.3f})")
    least = min(learned)
    verdict = "below" if learned[least] < others[least] else "not below"
    lines.append(f"  {RUTTER} on {least} engines is {verdict} round robin: {learned[least] - others[least]:+.3f}")
    return lines


def count(row: FrontierRow) -> int:
    return row.prefill_engines + row.decode_engines
