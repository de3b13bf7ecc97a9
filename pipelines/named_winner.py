"""Whether the simulator names the policy that is best on the live cluster, as far as the live runs can tell."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from pipelines.simulated_runs import SimulatedRun

Floats = npt.NDArray[np.float64]
BOOTSTRAPS = 5000
SEED = 0


@dataclass(frozen=True)
class NamedWinner:
    """The best policy live and in the simulator, over the arrival seeds that all policies have.

    difference, low, high: live goodput of the measured winner minus the simulated one's, with its 95 % interval.
    """

    measured: str
    simulated: str
    difference: float
    low: float
    high: float
    n_seeds: int

    @property
    def named(self) -> bool:
        """Whether the simulated winner is the measured one, or live not significantly worse."""
        return self.measured == self.simulated or self.low <= 0.0


def by_workload(runs: Sequence[SimulatedRun]) -> list[list[SimulatedRun]]:
    """The runs of each workload at one rate on one cluster, whatever their policies and seeds."""
    groups: dict[bytes, list[SimulatedRun]] = {}
    for run in runs:
        config = run.recorded.config
        same = msgspec.structs.replace(config.workload, seed=0, start=0)
        groups.setdefault(msgspec.json.encode((config.cluster, same, config.slo)), []).append(run)
    return list(groups.values())


def named_winner(runs: Sequence[SimulatedRun]) -> NamedWinner | None:
    """Of the runs of one workload; None where there are no two policies with a seed in common."""
    by_policy: dict[str, dict[int, SimulatedRun]] = {}
    for run in runs:
        by_policy.setdefault(run.recorded.config.policy, {})[run.recorded.config.workload.seed] = run
    seeds = sorted(set.intersection(*(set(of_seed) for of_seed in by_policy.values())))
    if len(by_policy) < 2 or not seeds:
        return None
    pairs = {name: [of_seed[seed] for seed in seeds] for name, of_seed in by_policy.items()}
    live = {name: np.concatenate([run.recorded.measured.slo_met for run in found]) for name, found in pairs.items()}
    simulated = {name: np.concatenate([run.simulated.slo_met for run in found]) for name, found in pairs.items()}
    measured_best = max(live, key=lambda name: live[name].mean())
    # Of policies that are level in the simulator, the worst has to stand for it.
    simulated_best = max(simulated, key=lambda name: (simulated[name].mean(), -live[name].mean()))
    paired = live[measured_best].astype(float) - live[simulated_best]
    low, high = paired_interval(paired)
    return NamedWinner(measured_best, simulated_best, float(paired.mean()), low, high, len(seeds))


def paired_interval(differences: Floats, seed: int = SEED) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean of paired differences (n,), one a request (Efron and Tibshirani 1993).

    Requests of one burst share their fate, so the interval is rather too narrow: the stricter side for a claim that
    two policies cannot be told apart.
    """
    rng = np.random.default_rng(seed)
    means = np.array([rng.choice(differences, len(differences)).mean() for _ in range(BOOTSTRAPS)])
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
