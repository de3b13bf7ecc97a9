"""The curve of a saturation search: its probes, where the next one belongs, and the rate that they point to."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from serve_table.artifact import write_atomically
from serve_table.errors import RunError

Floats = npt.NDArray[np.float64]

NEAR, FAR = 1.2, 1.6
"""Factors of rate from one probe to the next while all lie on one side: a goodput within FAR_GOODPUT, and beyond."""
FAR_GOODPUT = 0.1
INNER_SHARE = 0.15
"""A probe inside a bracket keeps this share of its logarithmic width from both ends."""
SETTLED_FACTOR, SETTLED_GOODPUT = 1.05, 0.01
"""A bracket narrower than this factor of rate, or with an end this near to the goodput, ends the search: from seed to
seed goodput differs more."""
BAR_WIDTH = 40


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One short run of round robin. goodput_low, goodput_high: 95 % interval (Wilson 1927) as if requests met their
    targets independently, which bursts make too narrow. kept_pace: None for engines of a pace of their own.
    """

    workload: str
    requests_per_s: float
    goodput: float
    goodput_low: float
    goodput_high: float
    kept_pace: bool | None
    kept_schedule: bool
    requests: int
    failed: int
    seed: int
    start: int
    cluster_kind: str
    prefill_engines: int
    decode_engines: int
    dilation: float

    @property
    def counted(self) -> bool:
        """Whether the engines and the load kept their times, so that the goodput is one of the asked cluster."""
        return self.kept_schedule and self.kept_pace is not False


def goodput_interval(n_met: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    found = stats.binomtest(n_met, n).proportion_ci(confidence_level=0.95, method="wilson")
    return float(found.low), float(found.high)


@dataclass(frozen=True)
class CurveFile:
    """Probes as JSON lines, whole at any moment."""

    path: Path

    def probes(self) -> list[Probe]:
        """Those so far, in the order made; RunError names a line that cannot be read."""
        if not self.path.exists():
            return []
        probes = []
        for number, line in enumerate(self.path.read_bytes().splitlines(), start=1):
            try:
                probes.append(msgspec.json.decode(line, type=Probe))
            except msgspec.DecodeError as error:
                raise RunError(
                    f"{self.path} line {number} is damaged ({error}): remove that line to go on without its probe"
                ) from error
        return probes

    def append(self, probe: Probe) -> None:
        lines = [msgspec.json.encode(one) + b"\n" for one in (*self.probes(), probe)]
        write_atomically(self.path, b"".join(lines))


@dataclass(frozen=True)
class Bracket:
    """Two rates of the curve. low: the highest where goodput is still at the target or above, high: the lowest where
    it is below; None where there is none. Goodputs are the smoothed curve's.
    """

    low: float | None
    high: float | None
    low_goodput: float
    high_goodput: float

    def settled(self, goodput: float) -> bool:
        """Whether another probe would tell no more: the ends are near each other, or one is at the goodput."""
        if self.low is None or self.high is None:
            return False
        nearest = min(abs(self.low_goodput - goodput), abs(self.high_goodput - goodput))
        return self.high / self.low <= SETTLED_FACTOR or nearest <= SETTLED_GOODPUT


def bracket(probes: Sequence[Probe], goodput: float) -> Bracket:
    """The bracket of the probes that count, after smoothing them to a curve that never rises with the rate."""
    rates, smooth = smoothed(probes)
    above = smooth >= goodput
    n_above = int(above.sum())
    low = float(rates[n_above - 1]) if n_above else None
    high = float(rates[n_above]) if n_above < len(rates) else None
    return Bracket(
        low,
        high,
        float(smooth[n_above - 1]) if low is not None else float("nan"),
        float(smooth[n_above]) if high is not None else float("nan"),
    )


def smoothed(probes: Sequence[Probe]) -> tuple[Floats, Floats]:
    """Rates (n,) and goodputs (n,) by rate: isotonic regression, weighted by requests."""
    counted = sorted((probe for probe in probes if probe.counted), key=lambda probe: probe.requests_per_s)
    rates = np.array([probe.requests_per_s for probe in counted])
    if not len(rates):
        return rates, rates
    goodput = np.array([probe.goodput for probe in counted])
    weights = np.array([float(probe.requests) for probe in counted])
    smooth: Floats = optimize.isotonic_regression(goodput, weights=weights, increasing=False).x
    return rates, smooth


def next_rate(probes: Sequence[Probe], goodput: float, first: float) -> float:
    """Where the next probe belongs: outward by a factor until there is a bracket, then between its ends by the secant
    in log rate. `first` where no probe counts yet.
    """
    found = bracket(probes, goodput)
    if found.low is None and found.high is None:
        return first
    if found.high is None and found.low is not None:
        return found.low * (FAR if found.low_goodput - goodput > FAR_GOODPUT else NEAR)
    if found.low is None and found.high is not None:
        return found.high / (FAR if goodput - found.high_goodput > FAR_GOODPUT else NEAR)
    return _between(found, goodput, INNER_SHARE)


def rate_at(probes: Sequence[Probe], goodput: float) -> float | None:
    """The rate at which the curve passes through the goodput; None where it was not bracketed."""
    found = bracket(probes, goodput)
    return None if found.low is None or found.high is None else _between(found, goodput, 0.0)


def _between(found: Bracket, goodput: float, margin: float) -> float:
    if found.low is None or found.high is None:
        raise ValueError("a rate between the ends of half a bracket was asked for")
    share = (found.low_goodput - goodput) / (found.low_goodput - found.high_goodput)
    share = min(max(share, margin), 1.0 - margin)
    return exp(log(found.low) + share * (log(found.high) - log(found.low)))


def curve_lines(probes: Sequence[Probe], goodput: float) -> list[str]:
    """The curve for people, by rate, with the target's place marked in each bar."""
    lines = [f"{'requests/s':>11}{'goodput':>9}  {'95 % interval':<15}{'failed':>7}"]
    target = min(int(goodput * BAR_WIDTH), BAR_WIDTH - 1)
    for probe in sorted(probes, key=lambda one: one.requests_per_s):
        filled = round(probe.goodput * BAR_WIDTH)
        bar = "".join("|" if i == target else "#" if i < filled else " " for i in range(BAR_WIDTH)).rstrip()
        note = "" if probe.counted else f"  {why_not(probe)}: does not count"
        interval = f"{probe.goodput_low:.3f} - {probe.goodput_high:.3f}"
        lines.append(
            f"{probe.requests_per_s:>11.4g}{probe.goodput:>9.3f}  {interval:<15}{probe.failed:>7}  {bar}{note}"
        )
    return lines


def why_not(probe: Probe) -> str:
    """What spoilt a probe that does not count."""
    return "late engines" if probe.kept_pace is False else "late load"
