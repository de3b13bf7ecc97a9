"""What the load generator measured, of the cluster and of itself."""

from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np

from learn.trace import Trace
from serve_table.slo import SloTargets

LATENESS_LIMIT_S = 0.010


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the client saw it. Durations in seconds of engine time; what was not measured is None.

    scheduled_s: when it was due, from the start. lateness_s: from then until its first byte was written.
    ttft_s, e2e_s: from that byte to the first token and to the end. error: None where the whole answer came.
    """

    index: int
    request_id: str
    scheduled_s: float
    lateness_s: float | None = None
    http_status: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    token_events: int = 0
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Quantiles:
    """Of durations in seconds."""

    p50: float
    p99: float
    max: float

    def __str__(self) -> str:
        return f"p50 {self.p50 * 1e3:.1f}, p99 {self.p99 * 1e3:.1f}, max {self.max * 1e3:.1f} ms"


def quantiles(values_s: list[float]) -> Quantiles | None:
    """None where nothing was measured."""
    if not values_s:
        return None
    p50, p99 = np.quantile(np.array(values_s), [0.5, 0.99])
    return Quantiles(float(p50), float(p99), max(values_s))


@dataclass(frozen=True)
class LoadReport:
    """All requests that were sent, by index, and how well the generator itself kept up.

    complete: False where the run was interrupted. lag: how late the event loop woke for a timer; it blurs TTFT
    and TPOT even where sending was on time. All in engine time: wall time divided by `dilation`.
    """

    n_requests: int
    records: tuple[RequestRecord, ...]
    complete: bool
    duration_s: float
    dilation: float
    lag: Quantiles | None
    lateness_limit_s: float = LATENESS_LIMIT_S

    @property
    def lateness(self) -> Quantiles | None:
        return quantiles([record.lateness_s for record in self.records if record.lateness_s is not None])

    @property
    def kept_schedule(self) -> bool:
        """Whether requests left when they were due; where not, the run measured the generator, not the cluster."""
        lateness = self.lateness
        return self.complete and lateness is not None and lateness.p99 <= self.lateness_limit_s

    @property
    def n_ok(self) -> int:
        return sum(record.error is None for record in self.records)

    @property
    def errors(self) -> Counter[str]:
        """Counts by text."""
        return Counter(record.error for record in self.records if record.error is not None)

    def n_wrong_lengths(self, trace: Trace) -> int:
        """Whole answers whose number of output tokens is not the one asked for."""
        asked = trace.output_tokens
        return sum(record.error is None and record.output_tokens != asked[record.index] for record in self.records)

    def goodput(self, trace: Trace, targets: SloTargets) -> float:
        """Share of the requests sent that met both targets of their class, as this client saw them."""
        met = 0
        for record in self.records:
            target = targets[int(trace.slo_class[record.index])]
            kept = target.met(int(trace.prompt_tokens[record.index]), record.ttft_s, record.tpot_s)
            met += record.error is None and bool(kept)
        return met / len(self.records) if self.records else 0.0

    def lines(self) -> list[str]:
        """The report for people, a line each."""
        sent = len(self.records)
        lines = [f"{sent:,} of {self.n_requests:,} requests sent in {self.duration_s:,.1f} s, {self.n_ok:,} answered"]
        if not self.complete:
            lines.append("interrupted: the results are incomplete")
        for text, count in self.errors.most_common(5):
            lines.append(f"  {count:,} failed: {text}")
        for name, values in (
            ("TTFT", [record.ttft_s for record in self.records if record.ttft_s is not None]),
            ("TPOT", [record.tpot_s for record in self.records if record.tpot_s is not None]),
        ):
            if measured := quantiles(values):
                lines.append(f"  {name}: {measured}")
        lines.append(
            f"  sent late by: {self.lateness or 'not measured'}; event loop late by: {self.lag or 'not measured'}"
        )
        if self.complete and not self.kept_schedule:
            limit_ms = self.lateness_limit_s * 1e3
            lines.append(
                f"  the generator did not keep its schedule (p99 over {limit_ms:.0f} ms): lower the load per core"
            )
        elif self.lag is not None and self.lag.p99 > self.lateness_limit_s:
            lines.append("  the generator's event loop lagged: its TTFT and TPOT are blurred by that much")
        return lines
