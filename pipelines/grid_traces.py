"""The requests of a simulated comparison: what is trained on and what is judged on, which never mix."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from learn.resample import resampled
from learn.trace import Trace, joined
from learn.training import LOAD_FACTORS
from pipelines.traces import trace_by_name
from pipelines.workload_spec import HELD_OUT_SEED, LENGTH_DIVISORS, WorkloadSpec, requests_of
from serve_table.errors import ConfigError

TRAINING_SEEDS = 8
TRAINING_WINDOWS = 6
FIRST_RESAMPLED_SEED = 1000


@dataclass(frozen=True)
class Windows:
    """First requests of windows of an imported trace, none of which overlap."""

    training: tuple[int, ...]
    tests: tuple[int, ...]


def windows_of(name: str, n_trace: int, n_requests: int, n_tests: int) -> Windows:
    """At most n_tests windows spread over the trace's end, after at least one and at most TRAINING_WINDOWS.

    Fewer tests where the trace is too short for more; ConfigError where it is too short for one.
    """
    n_windows = n_trace // n_requests
    if n_windows < 2:
        raise ConfigError(
            f"trace {name}: its {n_trace} requests are not one window of {n_requests} to train on and another to judge "
            "on: take a smaller --requests"
        )
    n_tests = min(n_tests, n_windows - 1)
    n_training = min(n_windows - n_tests, TRAINING_WINDOWS)
    after = n_training * n_requests
    tests = np.linspace(after, n_trace - n_requests, n_tests).astype(int)
    return Windows(tuple(range(0, after, n_requests)), tuple(tests.tolist()))


@dataclass(frozen=True)
class Requests:
    """A workload's requests. spec: their number and the SLO classes' share; its seed, start and rate stay unused.

    imported: the whole trace, as training and as tests see its SLO classes, and its windows; None where synthetic.
    """

    spec: WorkloadSpec
    test_seeds: tuple[int, ...]
    imported: tuple[Trace, Trace, Windows] | None

    def training(self, requests_per_s: float) -> list[Trace]:
        """Traces at one rate: what the rate is found on, and lengths and clusters are learned from."""
        if self.imported is None:
            return [self._made(seed, requests_per_s) for seed in range(TRAINING_SEEDS)]
        whole, _, windows = self.imported
        return [self._window(whole, start, requests_per_s) for start in windows.training]

    def searched(self, requests_per_s: float, loads: Sequence[float] = LOAD_FACTORS, first: int = 0) -> list[Trace]:
        """What policies are tuned on: other arrivals of the training requests, at the rate and around it.

        first: number of the first of them; those of other numbers are other arrivals.
        """
        rates = [requests_per_s * factor for factor in loads]
        if self.imported is None:
            return [self._made(TRAINING_SEEDS + k, rate) for k, rate in enumerate(rates, first)]
        whole = joined(self.training(requests_per_s))
        seeds = range(FIRST_RESAMPLED_SEED + first, FIRST_RESAMPLED_SEED + first + len(rates))
        return [
            resampled(whole, seed, self.spec.n_requests).scaled_to(rate)
            for seed, rate in zip(seeds, rates, strict=True)
        ]

    def tests(self, requests_per_s: float) -> dict[int, Trace]:
        """Held-out traces by seed: later windows, by their number, where imported."""
        if self.imported is None:
            return {seed: self._made(seed, requests_per_s) for seed in self.test_seeds}
        _, whole, windows = self.imported
        return {
            seed: self._window(whole, start, requests_per_s)
            for seed, start in zip(self.test_seeds, windows.tests, strict=False)
        }

    def _made(self, seed: int, requests_per_s: float) -> Trace:
        return requests_of(msgspec.structs.replace(self.spec, seed=seed, requests_per_s=requests_per_s))

    def _window(self, whole: Trace, start: int, requests_per_s: float) -> Trace:
        return whole.window(start, start + self.spec.n_requests).scaled_to(requests_per_s)


def requests_for(spec: WorkloadSpec, test_seeds: Sequence[int]) -> Requests:
    """The workload's requests. Raises ConfigError for an unknown one, TraceError for one that is not at hand."""
    if test_seeds and min(test_seeds) < HELD_OUT_SEED:
        raise ConfigError(f"seed {min(test_seeds)} could be training's: judge on seeds from {HELD_OUT_SEED} on")
    if spec.is_synthetic:
        return Requests(spec, tuple(test_seeds), None)
    training, tests = _imported(spec, 0), _imported(spec, HELD_OUT_SEED)
    windows = windows_of(spec.name, len(training), spec.n_requests, len(test_seeds))
    return Requests(spec, tuple(test_seeds), (training, tests, windows))


def _imported(spec: WorkloadSpec, seed: int) -> Trace:
    return trace_by_name(
        spec.name,
        None,
        seed,
        max_model_len_tokens=spec.max_model_len_tokens,
        length_divisor=LENGTH_DIVISORS.get(spec.name, 1),
        tight_share=spec.tight_share,
    )
