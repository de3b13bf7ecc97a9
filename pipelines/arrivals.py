"""When requests arrive: a renewal process, steady or alternating between quiet and burst phases."""

from dataclasses import dataclass

import numpy as np

from learn.trace import Floats
from serve_table.errors import ConfigError


@dataclass(frozen=True)
class Bursts:
    """A two-state Markov modulation: phases of exponential length whose rates differ by `rate_ratio`."""

    quiet_s: float
    burst_s: float
    rate_ratio: float

    def __post_init__(self) -> None:
        if not (self.quiet_s > 0 and self.burst_s > 0 and self.rate_ratio >= 1):
            raise ConfigError(f"{self}: phases must be longer than 0 s and the rate ratio at least 1")

    def rates(self, requests_per_s: float) -> tuple[float, float]:
        """The quiet and the burst rate whose mean over the phases is `requests_per_s`."""
        cycle_s = self.quiet_s + self.burst_s
        quiet = requests_per_s * cycle_s / (self.quiet_s + self.rate_ratio * self.burst_s)
        return quiet, quiet * self.rate_ratio

    def dispersion(self, requests_per_s: float, window_s: float) -> float:
        """Variance over mean of the count in a window, for Poisson arrivals within the phases.

        The known result for a Markov-modulated Poisson process of two states (Fischer and Meier-Hellstern,
        The Markov-modulated Poisson process cookbook, 1993).
        """
        quiet, burst = self.rates(requests_per_s)
        leave_quiet, leave_burst = 1.0 / self.quiet_s, 1.0 / self.burst_s
        leave = leave_quiet + leave_burst
        share = leave_quiet * leave_burst * (burst - quiet) ** 2 / leave**2
        excess = 2.0 * share / (quiet * leave_burst + burst * leave_quiet)
        decay = leave * window_s
        return 1.0 + excess * (1.0 - (1.0 - float(np.exp(-decay))) / decay)


@dataclass(frozen=True)
class Arrivals:
    """Gamma-distributed gaps with coefficient of variation `gap_cv` (1 is Poisson), modulated by `bursts`."""

    gap_cv: float = 1.0
    bursts: Bursts | None = None

    def times_s(self, n_requests: int, requests_per_s: float, rng: np.random.Generator) -> Floats:
        """Arrival times (n_requests,), the first at 0, stretched so that the mean rate is exactly as asked."""
        shape = self.gap_cv**-2.0
        # Operational time: one arrival a unit on average; phases then bend it into seconds.
        unit_times = np.cumsum(rng.gamma(shape, 1.0 / shape, n_requests))
        if self.bursts is None:
            times_s: Floats = unit_times / requests_per_s
        else:
            times_s = _modulated(unit_times, self.bursts, requests_per_s, rng)
        times_s -= times_s[0]
        if n_requests > 1:
            times_s *= (n_requests - 1) / (times_s[-1] * requests_per_s)
        return times_s


def _modulated(unit_times: Floats, bursts: Bursts, requests_per_s: float, rng: np.random.Generator) -> Floats:
    """Unit-rate times mapped through the inverse of the integrated rate of random phases."""
    quiet, burst = bursts.rates(requests_per_s)
    starts_in_burst = rng.random() < bursts.burst_s / (bursts.quiet_s + bursts.burst_s)
    rates = np.array([burst, quiet] if starts_in_burst else [quiet, burst])
    means_s = np.array([bursts.burst_s, bursts.quiet_s] if starts_in_burst else [bursts.quiet_s, bursts.burst_s])
    ends_s, expected = [np.zeros(1)], [np.zeros(1)]
    while expected[-1][-1] < unit_times[-1]:
        lengths_s = (rng.exponential(1.0, (64, 2)) * means_s).ravel()
        ends_s.append(ends_s[-1][-1] + np.cumsum(lengths_s))
        expected.append(expected[-1][-1] + np.cumsum(lengths_s * np.tile(rates, 64)))
    times_s: Floats = np.interp(unit_times, np.concatenate(expected), np.concatenate(ends_s))
    return times_s
