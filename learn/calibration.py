"""Step-time, hand-off and overhead constants fitted to direct measurements on a cluster.

Every measured time is linear in the constants but for the knee: a point is some engine steps, perhaps a hand-off,
perhaps the overhead of a leg. So a scan over knees, each a bounded linear fit, is followed by a joint fit from the
best; both weigh relative residuals by the soft L1 loss, which lets a share of points be far off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from learn.costs import OVERHEAD_UNIT_S
from learn.table import Costs
from serve_table.calibration import KINDS, Constant, Constants, Point, Residual
from serve_table.errors import ConfigError
from serve_table.step_time import Handoff, HardwareProfile, StepTime

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NAMES = Constants.__struct_fields__
FLOOR, PER_TOKEN, KNEE, BEYOND, PER_CONTEXT, LATENCY, PER_HANDOFF_TOKEN, OVERHEAD = range(len(NAMES))

SMALLEST_SCALES = (1e-4, 1e-7, 16.0, 1e-7, 1e-10, 1e-4, 1e-8, OVERHEAD_UNIT_S)
"""What counts as a small constant where the profile's is zero: a fit needs a unit for each."""

FIRST_LOSS_SCALE = 0.02
LOSS_SCALES = (0.002, 0.1)
"""Bounds of the relative residual beyond which a point is an outlier; in between it follows the points' own noise."""

MIN_NOISE = 0.003
KNEES = 24
BOOTSTRAPS = 200
NORMAL_MAD = 1.4826
WIDEST_INTERVAL = 1.0
"""A constant whose 95 % interval reaches further than this share of it to each side was not measured."""


@dataclass(frozen=True)
class CalibrationFit:
    """values (8,) in the order of NAMES; low, high (8,): their 95 % intervals; measured (8,): False where the
    profile's constant stands. fitted_s (n_points,).
    """

    values: Floats
    low: Floats
    high: Floats
    measured: Bools
    fitted_s: Floats
    notes: tuple[str, ...]

    def constants(self) -> Constants:
        rows = zip(self.values.tolist(), self.low.tolist(), self.high.tolist(), self.measured.tolist(), strict=True)
        return Constants(*(Constant(v, low, high, "measured" if m else "profile") for v, low, high, m in rows))

    def costs(self) -> Costs:
        values = self.values.tolist()
        return Costs(StepTime(*values[:LATENCY]), Handoff(*values[LATENCY:OVERHEAD]), values[OVERHEAD])


class Design:
    """The points as sums over the steps that they are made of: what each constant counts in each point."""

    def __init__(self, points: Sequence[Point], max_num_batched_tokens: int) -> None:
        steps = [steps_of(point, max_num_batched_tokens) for point in points]
        self.n_points = len(points)
        self.measured_s: Floats = np.array([point.measured_s for point in points], np.float64)
        self._owner = np.repeat(np.arange(self.n_points), [len(own) for own in steps])
        self._tokens: Floats = np.array([tokens for own in steps for tokens, _ in own], np.float64)
        self._context: Floats = np.array([context for own in steps for _, context in own], np.float64)
        handed = [float(point.kind == "handoff") for point in points]
        self._handed: Floats = np.array(handed)
        self._handed_tokens = self._handed * np.array([point.prompt_tokens for point in points])
        self._overhead = np.array([float(point.kind in ("prefill", "handoff")) for point in points])

    @cached_property
    def knees(self) -> Floats:
        """Knees to try, between the fewest and the most tokens of a step."""
        low, high = max(float(self._tokens.min()), 1.0), float(self._tokens.max())
        return np.geomspace(low, high, KNEES) if high > low else np.array([low])

    def columns(self, knee: float) -> Floats:
        """(n_points, 8): what each constant is multiplied by; the knee's column is zero."""
        columns = np.zeros((self.n_points, len(NAMES)))
        columns[:, FLOOR] = self._sums(np.ones_like(self._tokens))
        columns[:, PER_TOKEN] = self._sums(np.minimum(self._tokens, knee))
        columns[:, BEYOND] = self._sums(np.maximum(self._tokens - knee, 0.0))
        columns[:, PER_CONTEXT] = self._sums(self._context)
        columns[:, LATENCY] = self._handed
        columns[:, PER_HANDOFF_TOKEN] = self._handed_tokens
        columns[:, OVERHEAD] = self._overhead
        return columns

    def predicted_s(self, values: Floats) -> Floats:
        return np.asarray(self.columns(values[KNEE]) @ np.where(np.arange(len(NAMES)) == KNEE, 0.0, values))

    def jacobian(self, values: Floats) -> Floats:
        """Derivatives of `predicted_s`, (n_points, 8)."""
        columns = self.columns(values[KNEE])
        beyond = self._sums((self._tokens > values[KNEE]).astype(np.float64))
        columns[:, KNEE] = (values[PER_TOKEN] - values[BEYOND]) * beyond
        return columns

    def _sums(self, of_steps: Floats) -> Floats:
        return np.bincount(self._owner, of_steps, self.n_points).astype(np.float64)


def steps_of(point: Point, max_num_batched_tokens: int) -> list[tuple[int, int]]:
    """(tokens, context tokens) of each engine step that a point's time is made of."""
    if point.kind == "decode":
        return [(point.batch, point.context_tokens)]
    if point.kind == "handoff":
        return [(1, point.prompt_tokens)]
    if point.kind == "interference":
        return [(point.prompt_tokens + point.batch, point.context_tokens)]
    starts = range(0, point.prompt_tokens, max_num_batched_tokens)
    return [(min(point.prompt_tokens - start, max_num_batched_tokens), start) for start in starts]


def fit_calibration(points: Sequence[Point], profile: HardwareProfile, seed: int) -> CalibrationFit:
    """Fit the eight constants; seed: of the bootstrap. Raises ConfigError where there is nothing to fit.

    A constant that the points leave open (see WIDEST_INTERVAL) is set to the profile's, the others are fitted
    again, and a note says so. For the overhead, which a profile does not have, OVERHEAD_UNIT_S is taken.
    """
    if not points:
        raise ConfigError("nothing was measured: there is no point to fit constants to")
    for point in points:
        if not 0.0 < point.measured_s < float("inf") or point.prompt_tokens + point.batch < 1:
            raise ConfigError(f"a {point.kind} point of {point.measured_s} s cannot be fitted: it must be above 0")
    design = Design(points, profile.max_num_batched_tokens)
    start = profile_values(profile)
    free = np.ones(len(NAMES), bool)
    while True:
        solution = _solve(design, start, free)
        open_constant = _least_known(design, solution, start, free)
        if open_constant is None:
            break
        free[open_constant] = False
    values, loss_scale = solution
    low, high = _intervals(design, points, values, free, loss_scale, seed)
    return CalibrationFit(
        values=values,
        low=np.minimum(low, values),
        high=np.maximum(high, values),
        measured=free,
        fitted_s=design.predicted_s(values),
        notes=tuple(f"{name} could not be measured: the profile's stands" for name in np.array(NAMES)[~free]),
    )


def profile_values(profile: HardwareProfile) -> Floats:
    """The constants of a profile, (8,)."""
    return np.array([*profile.step.as_list(), *profile.handoff.as_list(), OVERHEAD_UNIT_S])


def residuals_of(points: Sequence[Point]) -> list[Residual]:
    """The relative residuals of each kind that has points."""
    found = []
    for kind in KINDS:
        relative = np.array([abs(p.fitted_s / p.measured_s - 1.0) for p in points if p.kind == kind])
        if len(relative):
            found.append(Residual(kind, len(relative), float(np.median(relative)), float(relative.max())))
    return found


def uneven_engines(points: Sequence[Point], limit: float = 0.1) -> list[str]:
    """Engines whose prefills take longer or shorter than the fit by more than `limit`, in the median; as lines."""
    lines = []
    for engine in sorted({point.engine for point in points if point.kind == "prefill"}):
        ratios = [p.measured_s / p.fitted_s for p in points if p.kind == "prefill" and p.engine == engine]
        median = float(np.median(ratios))
        if abs(median - 1.0) > limit:
            lines.append(f"{engine} takes {median:.2f} times as long to prefill as the fit of all engines says")
    return lines


def _solve(design: Design, start: Floats, free: Bools) -> tuple[Floats, float]:
    """The best values (8,), those not free as in `start`, and the loss scale used."""
    loss_scale = FIRST_LOSS_SCALE
    values = _best_of_knees(design, start, free, loss_scale)
    for _ in range(2):
        values = _refined(design, values, start, free, loss_scale)
        loss_scale = float(np.clip(3.0 * _noise(_relative(design, values)), *LOSS_SCALES))
    return values, loss_scale


def _best_of_knees(design: Design, start: Floats, free: Bools, loss_scale: float) -> Floats:
    knees = design.knees if free[KNEE] else start[[KNEE]]
    linear = free & (np.arange(len(NAMES)) != KNEE)
    found = []
    for knee in knees.tolist():
        at_knee = np.where(np.arange(len(NAMES)) == KNEE, knee, start)
        found.append(_refined(design, at_knee, start, linear, loss_scale))
    losses = [_loss(_relative(design, values), loss_scale) for values in found]
    return found[int(np.argmin(losses))]


def _refined(design: Design, values: Floats, start: Floats, free: Bools, loss_scale: float) -> Floats:
    """A bounded robust fit of the free constants from `values`, each in the unit of its usual size."""
    if not free.any():
        return values
    unit = _units(start)[free]

    def whole(scaled: Floats) -> Floats:
        filled = values.copy()
        filled[free] = scaled * unit
        return filled

    found: Floats = least_squares(
        lambda scaled: _relative(design, whole(scaled)),
        values[free] / unit,
        jac=lambda scaled: design.jacobian(whole(scaled))[:, free] * unit / design.measured_s[:, None],
        bounds=(0.0, np.inf),
        loss="soft_l1",
        f_scale=loss_scale,
        max_nfev=200,
    ).x
    return whole(found)


def _units(start: Floats) -> Floats:
    units: Floats = np.maximum(start, np.array(SMALLEST_SCALES))
    return units


def _relative(design: Design, values: Floats) -> Floats:
    ratio: Floats = design.predicted_s(values) / design.measured_s
    return ratio - 1.0


def _loss(relative: Floats, loss_scale: float) -> float:
    return float(np.sum(np.sqrt(1.0 + (relative / loss_scale) ** 2) - 1.0))


def _noise(relative: Floats) -> float:
    return max(NORMAL_MAD * float(np.median(np.abs(relative))), MIN_NOISE)


def _least_known(design: Design, solution: tuple[Floats, float], start: Floats, free: Bools) -> int | None:
    """The free constant with the widest interval for its size, where that is too wide; None if all are known.

    From the covariance of the linearised fit: what the points can tell at all, whatever the bounds hide.
    """
    values, _ = solution
    names = np.flatnonzero(free)
    if not len(names):
        return None
    unit = _units(start)
    size = np.maximum(values, unit)[names]
    jacobian = design.jacobian(values)[:, names] * size / design.measured_s[:, None]
    # A constant that nothing depends on gets a variance as large as can be, instead of a singular matrix.
    information = jacobian.T @ jacobian + 1e-12 * np.eye(len(names))
    deviation = _noise(_relative(design, values)) * np.sqrt(np.diag(np.linalg.inv(information)))
    worst = int(np.argmax(deviation))
    if 1.96 * deviation[worst] <= WIDEST_INTERVAL:
        return None
    # Where one of them is open, so is which side of the knee the points are on: take the profile's word first.
    of_knee = int(names[worst]) in (PER_TOKEN, KNEE, BEYOND)
    return KNEE if of_knee and free[KNEE] else int(names[worst])


def _intervals(
    design: Design, points: Sequence[Point], values: Floats, free: Bools, loss_scale: float, seed: int
) -> tuple[Floats, Floats]:
    """Percentile bootstrap over points, drawn within each kind (Efron and Tibshirani 1993, chapter 13)."""
    rng = np.random.default_rng(seed)
    kinds = np.array([point.kind for point in points])
    members = [np.flatnonzero(kinds == kind) for kind in KINDS if np.any(kinds == kind)]
    drawn = []
    for _ in range(BOOTSTRAPS):
        rows = np.concatenate([rng.choice(own, len(own)) for own in members])
        drawn.append(_refined(_Resampled(design, rows), values, values, free, loss_scale))
    low, high = np.quantile(np.array(drawn), (0.025, 0.975), axis=0)
    return low, high


class _Resampled(Design):
    """A design's rows drawn with replacement."""

    def __init__(self, design: Design, rows: npt.NDArray[np.int64]) -> None:
        self.n_points = len(rows)
        self.measured_s = design.measured_s[rows]
        self._design = design
        self._rows = rows

    def predicted_s(self, values: Floats) -> Floats:
        return self._design.predicted_s(values)[self._rows]

    def jacobian(self, values: Floats) -> Floats:
        return self._design.jacobian(values)[self._rows]
