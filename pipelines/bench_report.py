"""What `rutter bench` reports: the keys of its result file, and the same for people, with the targets beside them."""

from types import MappingProxyType
from typing import Literal

import msgspec

from pipelines.bench_dynamo import Comparison, installation_hint
from pipelines.bench_simulator import Speed
from pipelines.bench_timing import Machine, Spread


class DecisionDetail(msgspec.Struct, frozen=True):
    """remote_share: of the decisions measured; these place a prefill engine too."""

    fleet: str
    time_us: Spread
    remote_share: float


class Conditions(msgspec.Struct, frozen=True):
    """What was measured. saturated_requests_per_s: the rate of the simulated traces. compiled: false where numba's
    compiler was turned off.
    """

    quick: bool
    artifact: str
    artifact_digest: str
    table_cells: int
    decisions_a_block: int
    workload: str
    topology: str
    hardware: str
    saturated_requests_per_s: float
    requests_a_run: int
    traces: int
    rounds: int
    compiled: bool


class Detail(msgspec.Struct, frozen=True):
    """dynamo_replay: null where the peer is not installed or failed, which dynamo_replay_error tells."""

    lookup_us: Spread
    decision_8_engines: DecisionDetail
    decision_64_engines: DecisionDetail
    price_8_engines: DecisionDetail
    price_64_engines: DecisionDetail
    artifact_load_ms: Spread
    simulator: dict[str, Speed]
    dynamo_replay: Comparison | None
    dynamo_replay_error: str | None


class Report(msgspec.Struct, frozen=True):
    """Medians, and what is behind them. dynamo_replay_ratio: null where the peer was not measured."""

    lookup_us: float
    decision_8_engines_us: float
    decision_64_engines_us: float
    price_8_engines_us: float
    price_64_engines_us: float
    artifact_bytes: int
    artifact_load_ms: float
    simulator_requests_per_s: dict[str, float]
    dynamo_replay_ratio: float | None
    machine: Machine
    conditions: Conditions
    detail: Detail


class Target(msgspec.Struct, frozen=True):
    """What a figure should be: under, at most or at least the limit."""

    bound: Literal["under", "at most", "at least"]
    limit: float

    def judged(self, value: float) -> str:
        if self.bound == "under":
            met = value < self.limit
        else:
            met = value <= self.limit if self.bound == "at most" else value >= self.limit
        return f"target: {self.bound} {self.limit:,g}, {'met' if met else 'missed'}"


TARGETS = MappingProxyType(
    {
        "lookup_us": Target("under", 2.0),
        "decision_8_engines_us": Target("under", 25.0),
        "decision_64_engines_us": Target("under", 100.0),
        "price_8_engines_us": Target("under", 150.0),
        "price_64_engines_us": Target("under", 1000.0),
        "artifact_bytes": Target("at most", 64 * 1024),
        "artifact_load_ms": Target("under", 5.0),
        "dynamo_replay_ratio": Target("at least", 50.0),
    }
)
SIMULATOR_TARGETS = MappingProxyType(
    {"round_robin": Target("at least", 300_000.0), "table": Target("at least", 50_000.0)}
)


def text_lines(report: Report) -> list[str]:
    """The report for people; every figure is a median, its range in brackets."""
    detail, given = report.detail, report.conditions
    lines = machine_lines(report)
    lines.append(f"artifact: {given.artifact}, digest {given.artifact_digest}, {given.table_cells:,} cells")
    per_block = f"blocks of {given.decisions_a_block}"
    small, large = detail.decision_8_engines, detail.decision_64_engines
    lines += [
        figure_line("look-up", detail.lookup_us, "us", per_block, TARGETS["lookup_us"]),
        figure_line(f"decision, {small.fleet}", small.time_us, "us", per_block, TARGETS["decision_8_engines_us"]),
        figure_line(f"decision, {large.fleet}", large.time_us, "us", per_block, TARGETS["decision_64_engines_us"]),
        f"remote decisions among these: {small.remote_share:.0%} and {large.remote_share:.0%}",
        *(
            figure_line(f"price, {one.fleet}", one.time_us, "us", per_block, TARGETS[name])
            for name, one in (
                ("price_8_engines_us", detail.price_8_engines),
                ("price_64_engines_us", detail.price_64_engines),
            )
        ),
        f"artifact size: {report.artifact_bytes:,} bytes; " + TARGETS["artifact_bytes"].judged(report.artifact_bytes),
        figure_line("artifact load", detail.artifact_load_ms, "ms", "loads", TARGETS["artifact_load_ms"]),
    ]
    return lines + simulator_lines(report) + peer_lines(report)


def machine_line(machine: Machine) -> str:
    load = "unknown" if machine.load_average is None else f"{machine.load_average:.2f}"
    return f"machine: {machine.cores} cores of {machine.cpu}, {machine.system}, load average {load}"


def machine_lines(report: Report) -> list[str]:
    machine = report.machine
    lines = [machine_line(machine), f"python {machine.python}, numpy {machine.numpy}, numba {machine.numba}"]
    if report.conditions.quick:
        lines.append("few repetitions (--quick): take the figures as rough")
    if not report.conditions.compiled:
        lines.append("numba's compiler is turned off: the simulator's figures are those of plain Python")
    return lines


def simulator_lines(report: Report) -> list[str]:
    given = report.conditions
    lines = [
        f"simulator, requests/s on one core: {given.workload} at {given.topology} {given.hardware}, "
        f"{given.saturated_requests_per_s:.3g} requests/s (saturation), {given.requests_a_run:,} requests a run, "
        f"{given.traces} traces x {given.rounds} rounds"
    ]
    for name, speed in report.detail.simulator.items():
        over = f"runs; {shown(speed.process.median)} by CPU time; goodput {speed.goodput:.3f}"
        lines.append("  " + figure_line(name, speed.wall, "requests/s", over, SIMULATOR_TARGETS.get(name)))
    return lines


def peer_lines(report: Report) -> list[str]:
    comparison = report.detail.dynamo_replay
    if comparison is None:
        failure = report.detail.dynamo_replay_error
        why = f"failed: {failure}" if failure is not None else f"not installed; to compare: {installation_hint()}"
        return [f"Dynamo's offline replay: {why}"]
    lines = [
        f"Dynamo's offline replay {comparison.version}: {comparison.requests:,} requests with "
        f"{comparison.output_tokens:,} output tokens, {comparison.rounds} rounds in turns; {comparison.time_taken}"
    ]
    for pair in comparison.pairs:
        sides = f"{pair.ours.requests_per_s.median:,.0f} against {pair.theirs.requests_per_s.median:,.0f} requests/s"
        target = TARGETS["dynamo_replay_ratio"] if pair is comparison.pairs[0] else None
        over = f"rounds; {pair.policy} {sides}"
        lines.append("  " + figure_line(pair.router_mode, pair.ratio, "times as fast", over, target))
        lines.append(
            f"    simulated means, ours and theirs: TTFT {pair.ours.mean_ttft_ms:.0f} and "
            f"{pair.theirs.mean_ttft_ms:.0f} ms, TPOT {pair.ours.mean_tpot_ms:.1f} and "
            f"{pair.theirs.mean_tpot_ms:.1f} ms"
        )
    return lines


def figure_line(what: str, values: Spread, unit: str, over: str, target: Target | None) -> str:
    """A figure, its range and its target. over: what there were `values.repetitions` of."""
    spread_out = f"{shown(values.min)} to {shown(values.max)} over {values.repetitions} {over}"
    judged = "" if target is None else f"; {target.judged(values.median)}"
    return f"{what}: {shown(values.median)} {unit} ({spread_out}){judged}"


def shown(value: float) -> str:
    """Three significant digits, whole numbers from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
