"""What `rutter bench-router` reports: the keys of its result file, and the same for people, with the targets."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Self

import msgspec

from pipelines.bench_report import Target, figure_line, machine_line, shown
from pipelines.bench_timing import Machine, Spread, spread
from pipelines.stream_client import Counted


class LoadFigures(msgspec.Struct, frozen=True):
    """One router under one load."""

    events_per_s: float
    requests_per_s: float
    cpu_s_per_1000_events: float
    cpu_ms_per_request: float

    @classmethod
    def of(cls, parts: Sequence[Counted]) -> Self:
        """Of all turns together."""
        events, requests = sum(part.events for part in parts), sum(part.requests for part in parts)
        wall_s, cpu_s = sum(part.wall_s for part in parts), sum(part.cpu_s for part in parts)
        return cls(
            events / wall_s,
            requests / wall_s,
            1000.0 * cpu_s / max(events, 1),
            1000.0 * cpu_s / max(requests, 1),
        )


class Side(msgspec.Struct, frozen=True):
    """One router in one round. first_event_s: median time to the first event, one stream at a time."""

    loads: dict[str, LoadFigures]
    first_event_s: float
    peak_memory_bytes: int


class Round(msgspec.Struct, frozen=True):
    """turns: who was measured when, under each load. direct_first_event_s: from an engine itself. local_shares: of
    Rutter's requests, by load, those that it served with one leg; the peer sends two for each.
    """

    turns: tuple[str, ...]
    rutter: Side
    peer: Side
    direct_first_event_s: float
    local_shares: dict[str, float]


class Conditions(msgspec.Struct, frozen=True):
    """What was measured. paced_event_s: between a stream's events under the load that is paced."""

    peer: str
    policy: str
    artifact: str
    artifact_digest: str
    engines: str
    events_a_write: int
    streams: int
    prompt_bytes: int
    paced_event_s: float
    turn_s: float
    first_events: int
    rounds: int
    cores: str


class Report(msgspec.Struct, frozen=True):
    """Rutter over the peer: medians of the rounds' own ratios. cpu_per_event_ratio: over as many events of the long
    streams as of the short ones; cpu_per_paced_event_ratio: where each event comes by itself. added_ttft_ratio: null
    where the peer's added time drowned in the noise.
    """

    events_ratio_256: float
    events_ratio_32: float
    added_ttft_ratio: float | None
    cpu_per_event_ratio: float
    cpu_per_paced_event_ratio: float
    peak_memory_ratio: float
    ratios: dict[str, Spread]
    local_shares: dict[str, float]
    machine: Machine
    conditions: Conditions
    rounds: tuple[Round, ...]


TARGETS = MappingProxyType(
    {
        "events_ratio_256": Target("at least", 1.3),
        "events_ratio_32": Target("at least", 1.5),
        "added_ttft_ratio": Target("at most", 0.8),
        "cpu_per_event_ratio": Target("at most", 0.8),
        "peak_memory_ratio": Target("at most", 1.5),
    }
)


def report_of(rounds: Sequence[Round], machine: Machine, conditions: Conditions) -> Report:
    """Of at least one round."""
    told = [one for one in rounds if _added_s(one, one.peer) > 0.0]
    ratios = {
        "events_ratio_256": _ratio(rounds, lambda side: side.loads["256"].events_per_s),
        "events_ratio_32": _ratio(rounds, lambda side: side.loads["32"].events_per_s),
        "cpu_per_event_ratio": _ratio(rounds, _cpu_of_both),
        "cpu_per_paced_event_ratio": _ratio(rounds, lambda side: side.loads["paced"].cpu_s_per_1000_events),
        "peak_memory_ratio": _ratio(rounds, lambda side: side.peak_memory_bytes),
    }
    if told:
        ratios["added_ttft_ratio"] = spread([_added_s(one, one.rutter) / _added_s(one, one.peer) for one in told])
    added = ratios.get("added_ttft_ratio")
    names = rounds[0].local_shares
    return Report(
        events_ratio_256=ratios["events_ratio_256"].median,
        events_ratio_32=ratios["events_ratio_32"].median,
        added_ttft_ratio=None if added is None else added.median,
        cpu_per_event_ratio=ratios["cpu_per_event_ratio"].median,
        cpu_per_paced_event_ratio=ratios["cpu_per_paced_event_ratio"].median,
        peak_memory_ratio=ratios["peak_memory_ratio"].median,
        ratios=ratios,
        local_shares={name: sum(one.local_shares[name] for one in rounds) / len(rounds) for name in names},
        machine=machine,
        conditions=conditions,
        rounds=tuple(rounds),
    )


def _ratio(rounds: Sequence[Round], figure: Callable[[Side], float]) -> Spread:
    return spread([figure(one.rutter) / figure(one.peer) for one in rounds])


def _added_s(one: Round, side: Side) -> float:
    return side.first_event_s - one.direct_first_event_s


def _cpu_of_both(side: Side) -> float:
    return side.loads["256"].cpu_s_per_1000_events + side.loads["32"].cpu_s_per_1000_events


def text_lines(report: Report) -> list[str]:
    """The report for people: ratios are medians of the rounds, their range in brackets, then both sides' medians."""
    given = report.conditions
    shares = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in report.local_shares.items())
    return [
        machine_line(report.machine),
        f"peer: {given.peer}, round robin; Rutter: policy {given.policy} of {given.artifact} (digest "
        f"{given.artifact_digest}), journal, features and metrics on",
        f"engines: {given.engines} without work, {given.events_a_write} events a write; {given.streams} streams; "
        f"prompts of {given.prompt_bytes} bytes that share no prefix; usage not asked for",
        f"cores: {given.cores}; {len(report.rounds)} rounds, two turns of {given.turn_s:g} s each under every load",
        f"prefilled locally by Rutter, so with one leg where the peer always sends two: {shares}",
        _events_line(report, "256"),
        _events_line(report, "32"),
        _line(report, "added_ttft_ratio", "added TTFT, one stream", "us", lambda one, side: 1e6 * _added_s(one, side)),
        _line(report, "cpu_per_event_ratio", "CPU per 1,000 events", "ms", lambda _, side: 500.0 * _cpu_of_both(side)),
        _line(
            report,
            "cpu_per_paced_event_ratio",
            f"CPU per 1,000 events that come one by one, each {1000.0 * given.paced_event_s:g} ms",
            "ms",
            lambda _, side: 1000.0 * side.loads["paced"].cpu_s_per_1000_events,
        ),
        _line(report, "peak_memory_ratio", "peak memory", "MB", lambda _, side: side.peak_memory_bytes / 1e6),
    ]


def _events_line(report: Report, load: str) -> str:
    what = f"SSE events/s, streams of {load} tokens"
    return _line(report, f"events_ratio_{load}", what, "events/s", lambda _, side: side.loads[load].events_per_s)


def _line(report: Report, key: str, what: str, unit: str, figure: Callable[[Round, Side], float]) -> str:
    ratio = report.ratios.get(key)
    if ratio is None:
        return f"{what}: not told, the machine was too noisy"
    ours = spread([figure(one, one.rutter) for one in report.rounds]).median
    theirs = spread([figure(one, one.peer) for one in report.rounds]).median
    over = f"rounds; {shown(ours)} against {shown(theirs)} {unit}"
    return figure_line(what, ratio, "times the peer's", over, TARGETS.get(key))
