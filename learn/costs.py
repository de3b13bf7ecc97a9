"""Cost constants fitted to journals: the simulator replays what was executed until its times are the measured ones.

Replay, rather than regression on single rows, because a journaled time is mostly queueing: the constants show
only through the whole of the load.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import differential_evolution, minimize

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

FAR_CAP = float(np.log(MAX_FACTOR))
"""The same while the constants may be far off and every row is beyond ERROR_CAP."""

NEIGHBOURHOOD = (0.1, 0.6, 1.2)
"""How far about the first approach to look, as log factors of decode step, prefill tokens and hand-off: a decode step
shows in every TPOT, a hand-off only in how long a request waits for the next step."""

OVERHEAD_RANGE = (0.0, 3.0)
SCAN = 7
"""Points a side of the grid of hand-offs and overheads that is looked through: a request joins with whole steps, so
much of the one can pass for the other, with false optima in between."""
GENERATIONS = 20

RIDGE = 1e-3
"""Pull to the profile, too weak to matter where the journal says anything."""


@dataclass(frozen=True)
class CostFit:
    """Fitted constants. ttft_error, tpot_error: median |simulated / measured - 1| of rows, before and after; NaN
    where no row has that time.
    """

    costs: Costs
    ttft_error_before: float
    ttft_error: float
    tpot_error_before: float
    tpot_error: float
    rows: int

    def lines(self) -> list[str]:
        step, handoff = self.costs.step_time, self.costs.handoff
        return [
            f"costs fitted to {self.rows} rows by replay; median error TTFT {_percent(self.ttft_error_before)} -> "
            f"{_percent(self.ttft_error)}, TPOT {_percent(self.tpot_error_before)} -> {_percent(self.tpot_error)}",
            f"  step {step.floor_s * 1e3:.2f} ms + {step.per_token_s * 1e6:.1f} us a token to {step.knee_tokens:.0f}, "
            f"{step.per_token_beyond_s * 1e6:.1f} us beyond, {step.per_context_token_s * 1e9:.0f} ns a context token",
            f"  hand-off {handoff.latency_s * 1e3:.2f} ms + {handoff.per_token_s * 1e6:.2f} us a token; "
            f"a leg's overhead {self.costs.overhead_s * 1e3:.2f} ms",
        ]


def fit_costs(
    journals: Sequence[JournalTrace],
    profile: HardwareProfile,
    slo: SloTargets,
    seed: int = 0,
    overhead_s: float = OVERHEAD_UNIT_S,
) -> CostFit:
    """Fit four factors over the profile to one or more runs: decode step, prefill tokens, hand-off, a leg's overhead.

    The error of a row is the capped absolute log ratio of simulated to measured TTFT, and of TPOT. It is rough in the
    constants, as queues are, so a simplex that approaches is followed by a scan of hand-off and overhead, differential
    evolution (Storn and Price 1997) about where that came to, and another simplex. seed: of the evolution; equal rows
    give equal constants. profile, overhead_s: where the fit starts.
    """

    def errors(vector: Floats) -> tuple[Floats, Floats]:
        costs = costs_of(vector, profile)
        pairs = [_run_errors(journal, _topology(journal, profile, costs), slo) for journal in journals]
        return np.concatenate([ttft for ttft, _ in pairs]), np.concatenate([tpot for _, tpot in pairs])

    def loss(vector: Floats, cap: float) -> float:
        return sum(_capped_mean(error, cap) for error in errors(vector)) + RIDGE * float(np.sum(vector**2))

    before = errors(np.zeros(4))
    found = _fitted_vector(loss, float(np.sqrt(overhead_s / OVERHEAD_UNIT_S)), seed)
    after = errors(found)
    return CostFit(
        costs=costs_of(found, profile),
        ttft_error_before=_median_error(before[0]),
        ttft_error=_median_error(after[0]),
        tpot_error_before=_median_error(before[1]),
        tpot_error=_median_error(after[1]),
        rows=sum(len(journal.trace) for journal in journals),
    )


def _fitted_vector(loss: Callable[[Floats, float], float], overhead_root: float, seed: int) -> Floats:
    """The vector (4,) of least loss, which takes a vector and the cap of a row's error."""
    found = np.array([0.0, 0.0, 0.0, overhead_root])
    for width in (0.5, 0.2):
        found = _simplex(lambda vector: loss(vector, FAR_CAP), found, width)
    found = _scanned(lambda vector: loss(vector, ERROR_CAP), found)
    around = [(value - reach, value + reach) for value, reach in zip(found, NEIGHBOURHOOD, strict=False)]
    evolved = differential_evolution(
        lambda vector: loss(vector, ERROR_CAP),
        [*around, OVERHEAD_RANGE],
        x0=np.append(found[:3], np.clip(abs(found[3]), *OVERHEAD_RANGE)),
        maxiter=GENERATIONS,
        popsize=8,
        tol=0.0,
        polish=False,
        rng=seed,
    )
    return _simplex(lambda vector: loss(vector, ERROR_CAP), evolved.x, 0.05)


def _scanned(loss: Callable[[Floats], float], start: Floats) -> Floats:
    """The best of a grid of hand-offs and overheads, refined by a simplex; the other constants as they are."""
    reach = NEIGHBOURHOOD[2]
    handoffs, overheads = np.linspace(start[2] - reach, start[2] + reach, SCAN), np.linspace(*OVERHEAD_RANGE, SCAN)
    grid = [np.array([start[0], start[1], handoff, root]) for handoff in handoffs for root in overheads]
    return _simplex(loss, min([start, *grid], key=loss), 0.1)


def _simplex(loss: Callable[[Floats], float], start: Floats, width: float) -> Floats:
    found: Floats = minimize(
        loss,
        start,
        method="Nelder-Mead",
        options={
            "initial_simplex": np.vstack([start, start + width * np.eye(4)]),
            "maxfev": 150,
            "xatol": 1e-3,
            "fatol": 1e-5,
        },
    ).x
    return found


def _run_errors(journal: JournalTrace, topology: Topology, slo: SloTargets) -> tuple[Floats, Floats]:
    """Log ratios of simulated to measured TTFT and TPOT of one run's rows."""
    choices = (journal.action, journal.prefill, journal.decode)
    run = replay(journal.trace, topology, slo, journal.predicted_tokens, *choices, held_s=journal.held_s)
    return _log_ratio(run.ttft_s, journal.ttft_s), _log_ratio(run.tpot_s, journal.tpot_s)


def costs_of(vector: Floats, profile: HardwareProfile) -> Costs:
    """Constants of a fit's vector (4,): log factors of decode step, prefill tokens, hand-off; overhead's root.

    The overhead is quadratic in its coordinate, so that it is never negative.
    """
    limit = np.log(MAX_FACTOR)
    decode, prefill, handoff = np.exp(np.clip(vector[:3], -limit, limit)).tolist()
    return Costs(
        step_time=scaled_step(profile.step, decode, prefill),
        handoff=Handoff(profile.handoff.latency_s * handoff, profile.handoff.per_token_s * handoff),
        overhead_s=float(OVERHEAD_UNIT_S * vector[3] ** 2),
    )


def scaled_step(step: StepTime, decode: float, prefill: float) -> StepTime:
    """The step with its times, but not the tokens at which they bend, times a factor; prefill: of those beyond."""
    return StepTime(
        floor_s=step.floor_s * decode,
        per_token_s=step.per_token_s * decode,
        knee_tokens=step.knee_tokens,
        per_token_beyond_s=step.per_token_beyond_s * prefill,
        per_context_token_s=step.per_context_token_s * decode,
    )


def fitted_topology(
    prefill_engines: int, decode_engines: int, profile: HardwareProfile, costs: Costs, elastic: bool = False
) -> Topology:
    """A cluster with a profile's limits and fitted times."""
    fitted = replace(profile, step=costs.step_time, handoff=costs.handoff)
    return Topology(prefill_engines, decode_engines, fitted, costs.overhead_s, elastic)


def _topology(journal: JournalTrace, profile: HardwareProfile, costs: Costs) -> Topology:
    # A pool without engines is possible in a journal of local requests only; the simulator needs one of each.
    n_prefill = max(len(journal.prefill_engines), 1)
    return fitted_topology(n_prefill, len(journal.decode_engines), profile, costs, journal.elastic)


def _log_ratio(simulated: Floats, measured: Floats) -> Floats:
    both = np.isfinite(simulated) & np.isfinite(measured) & (simulated > 0) & (measured > 0)
    ratio: Floats = np.log(simulated[both] / measured[both])
    return ratio


def _capped_mean(log_ratio: Floats, cap: float) -> float:
    return float(np.minimum(np.abs(log_ratio), cap).mean()) if len(log_ratio) else 0.0


def _median_error(log_ratio: Floats) -> float:
    return float(np.median(np.abs(np.expm1(log_ratio)))) if len(log_ratio) else float("nan")


def _percent(error: float) -> str:
    return f"{error:.1%}" if np.isfinite(error) else "unknown"
