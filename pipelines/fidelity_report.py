"""The simulator beside compared runs, for people: residuals, times, winners and the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.fidelity_results import FidelityRow, fidelity_row
from pipelines.named_winner import NamedWinner, named_winner
from pipelines.saturate import cluster_text
from pipelines.simulated_runs import SimulatedRun
from pipelines.text_table import aligned

RESIDUAL_LIMIT = 0.03
TIMES = (("P50 TTFT", "ttft_p50_s"), ("P90 TTFT", "ttft_p90_s"), ("P50 TPOT", "tpot_p50_s"), ("P90 TPOT", "tpot_p90_s"))
HEADER = ("policy", "seed", "live", "simulated", "residual", "replayed", *(f"{title}, ms" for title, _ in TIMES))


@dataclass(frozen=True)
class WorkloadFidelity:
    """One workload's runs by policy and seed. winner: None where there is nothing to choose between."""

    title: str
    rows: tuple[FidelityRow, ...]
    residuals: tuple[float, ...]
    winner: NamedWinner | None


@dataclass(frozen=True)
class Verdict:
    """residual: mean absolute goodput residual of all runs. named: on how many workloads it names the winner."""

    residual: float
    runs: int
    named: int
    workloads: int

    @property
    def within_limits(self) -> bool:
        return self.residual <= RESIDUAL_LIMIT and self.named == self.workloads

    def lines(self) -> list[str]:
        residual = "within" if self.residual <= RESIDUAL_LIMIT else "OUT OF"
        named = "as it should" if self.named == self.workloads else "NOT ALL"
        return [
            f"Mean absolute goodput residual {self.residual:.3f} over {self.runs} runs: {residual} the limit of "
            f"{RESIDUAL_LIMIT:g}.",
            f"The simulator names the measured winner on {self.named} of {self.workloads} workloads: {named}.",
        ]


def workload_fidelity(runs: Sequence[SimulatedRun]) -> WorkloadFidelity:
    """Of the runs of one workload on one cluster."""
    ordered = sorted(runs, key=lambda run: (run.recorded.config.workload.seed, -run.live_goodput))
    config = ordered[0].recorded.config
    title = (
        f"{config.workload.name} at {config.workload.requests_per_s:g} requests/s on {cluster_text(config.cluster)}, "
        f"{config.workload.n_requests} requests a run"
    )
    rows = tuple(fidelity_row(run) for run in ordered)
    return WorkloadFidelity(title, rows, tuple(run.residual for run in ordered), named_winner(ordered))


def verdict(found: Sequence[WorkloadFidelity]) -> Verdict:
    """Over all workloads."""
    residuals = np.concatenate([workload.residuals for workload in found])
    winners = [workload.winner for workload in found if workload.winner is not None]
    return Verdict(
        residual=float(np.abs(residuals).mean()),
        runs=len(residuals),
        named=sum(winner.named for winner in winners),
        workloads=len(found),
    )


def cells(row: FidelityRow) -> tuple[str, ...]:
    """A run's cells in the order of HEADER."""
    times = (
        f"{_ms(getattr(row, f'live_{column}'))} / {_ms(getattr(row, f'simulated_{column}'))}" for _, column in TIMES
    )
    return (
        row.policy,
        str(row.seed),
        f"{row.live_goodput:.3f}",
        f"{row.simulated_goodput:.3f}",
        f"{row.simulated_goodput - row.live_goodput:+.3f}",
        f"{row.replayed_goodput:.3f}",
        *times,
    )


def text_lines(found: WorkloadFidelity) -> list[str]:
    """One workload's table and winner in plain text; times are live / simulated."""
    table = [HEADER, *(cells(row) for row in found.rows)]
    return ["", found.title, *aligned(table), winner_line(found.winner)]


def markdown_lines(found: WorkloadFidelity) -> list[str]:
    """The same as a Markdown table."""
    lines = ["", f"{found.title}:", "", f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    lines += [f"| {' | '.join(cells(row))} |" for row in found.rows]
    return [*lines, "", winner_line(found.winner)]


def winner_line(winner: NamedWinner | None) -> str:
    """Who won where, and whether the live runs can tell them apart."""
    if winner is None:
        return "No winner: there are no two policies with a seed in common."
    if winner.measured == winner.simulated:
        return f"Measured and simulated winner: {winner.measured}."
    what = "named within the interval" if winner.named else "NOT NAMED"
    return (
        f"Measured winner {winner.measured}, simulated {winner.simulated}: {what}, live goodput "
        f"{winner.difference:+.3f} [{winner.low:+.3f}, {winner.high:+.3f}] between them."
    )


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:,.1f}"
