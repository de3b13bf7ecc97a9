"""Cost constants fitted to journals: the simulator replays what was executed until its times are the measured ones.

Replay, rather than regression on single rows, because a journaled time is mostly queueing: the constants show
only through the whole of the load.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from learn.journal_trace import JournalTrace
from learn.simulation import Topology, replay
from learn.table import Costs
from serve_table.slo import SloTargets
from serve_table.step_time import Handoff, HardwareProfile, StepTime

Floats = npt.NDArray[np.float64]

MAX_FACTOR = 20.0
"""Published profiles were up to 13 times off (arXiv 2609.16206)."""

OVERHEAD_UNIT_S = 0.002
ERROR_CAP = 0.7
"""Beyond this log ratio (a factor of 2) a row is an outlier and pulls no harder."""

RIDGE = 1e-3
"""Pull to the profile, too weak to matter where the journal says anything."""


@dataclass(frozen=True)
class CostFit:
    """Fitted constants. ttft_error, tpot_error: median |simulated / measured - 1| of rows, before and after."""

    costs: Costs
    ttft_error_before: float
    ttft_error: float
    tpot_error_before: float
    tpot_error: float
    rows: int

    def lines(self) -> list[str]:
        step, handoff = self.costs.step_time, self.costs.handoff
        return [
            f"costs fitted to {self.rows} rows by replay; median error TTFT {self.ttft_error_before:.1%} -> "
            f"{self.ttft_error:.1%}, TPOT {self.tpot_error_before:.1%} -> {self.tpot_error:.1%}",
            f"  step {step.floor_s * 1e3:.2f} ms + {step.per_token_s * 1e6:.1f} us a token to {step.knee_tokens:.0f}, "
            f"{step.per_token_beyond_s * 1e6:.1f} us beyond, {step.per_context_token_s * 1e9:.0f} ns a context token",
            f"  hand-off {handoff.latency_s * 1e3:.2f} ms + {handoff.per_token_s * 1e6:.2f} us a token; "
            f"a leg's overhead {self.costs.overhead_s * 1e3:.2f} ms",
        ]


def fit_costs(journals: Sequence[JournalTrace], profile: HardwareProfile, slo: SloTargets) -> CostFit:
    """Fit four factors over the profile to one or more runs: decode step, prefill tokens, hand-off, a leg's overhead.

    The error of a row is the capped absolute log ratio of simulated to measured TTFT, and of TPOT.
    """

    def errors(vector: Floats) -> tuple[Floats, Floats]:
        costs = costs_of(vector, profile)
        pairs = [_run_errors(journal, _topology(journal, profile, costs), slo) for journal in journals]
        return np.concatenate([ttft for ttft, _ in pairs]), np.concatenate([tpot for _, tpot in pairs])

    def loss(vector: Floats) -> float:
        ttft, tpot = errors(vector)
        return sum(_capped_mean(error) for error in (ttft, tpot)) + RIDGE * float(np.sum(vector**2))

    start = np.array([0.0, 0.0, 0.0, 0.5])
    before = errors(np.zeros(4))
    simplex = np.vstack([start, start + 0.3 * np.eye(4)])
    found = minimize(
        loss,
        start,
        method="Nelder-Mead",
        options={"initial_simplex": simplex, "maxfev": 300, "xatol": 1e-3, "fatol": 1e-5},
    )
    after = errors(found.x)
    return CostFit(
        costs=costs_of(found.x, profile),
        ttft_error_before=_median_error(before[0]),
        ttft_error=_median_error(after[0]),
        tpot_error_before=_median_error(before[1]),
        tpot_error=_median_error(after[1]),
        rows=sum(len(journal.trace) for journal in journals),
    )


def _run_errors(journal: JournalTrace, topology: Topology, slo: SloTargets) -> tuple[Floats, Floats]:
    """Log ratios of simulated to measured TTFT and TPOT of one run's rows."""
    run = replay(
        journal.trace, topology, slo, journal.predicted_tokens, journal.action, journal.prefill, journal.decode
    )
    return _log_ratio(run.ttft_s, journal.ttft_s), _log_ratio(run.tpot_s, journal.tpot_s)


def costs_of(vector: Floats, profile: HardwareProfile) -> Costs:
    """Constants of a fit's vector (4,): log factors of decode step, prefill tokens, hand-off; overhead's root.

    The overhead is quadratic in its coordinate, so that it is never negative.
    """
    limit = np.log(MAX_FACTOR)
    decode, prefill, handoff = np.exp(np.clip(vector[:3], -limit, limit)).tolist()
    step = profile.step
    return Costs(
        step_time=StepTime(
            floor_s=step.floor_s * decode,
            per_token_s=step.per_token_s * decode,
            knee_tokens=step.knee_tokens,
            per_token_beyond_s=step.per_token_beyond_s * prefill,
            per_context_token_s=step.per_context_token_s * decode,
        ),
        handoff=Handoff(profile.handoff.latency_s * handoff, profile.handoff.per_token_s * handoff),
        overhead_s=float(OVERHEAD_UNIT_S * vector[3] ** 2),
    )


def fitted_topology(prefill_engines: int, decode_engines: int, profile: HardwareProfile, costs: Costs) -> Topology:
    """A cluster with a profile's limits and fitted times."""
    fitted = replace(profile, step=costs.step_time, handoff=costs.handoff)
    return Topology(prefill_engines, decode_engines, fitted, costs.overhead_s)


def _topology(journal: JournalTrace, profile: HardwareProfile, costs: Costs) -> Topology:
    # A pool without engines is possible in a journal of local requests only; the simulator needs one of each.
    n_prefill = max(len(journal.prefill_engines), 1)
    return fitted_topology(n_prefill, len(journal.decode_engines), profile, costs)


def _log_ratio(simulated: Floats, measured: Floats) -> Floats:
    both = np.isfinite(simulated) & np.isfinite(measured) & (simulated > 0) & (measured > 0)
    ratio: Floats = np.log(simulated[both] / measured[both])
    return ratio


def _capped_mean(log_ratio: Floats) -> float:
    return float(np.minimum(np.abs(log_ratio), ERROR_CAP).mean()) if len(log_ratio) else 0.0


def _median_error(log_ratio: Floats) -> float:
    return float(np.median(np.abs(np.expm1(log_ratio)))) if len(log_ratio) else float("nan")
