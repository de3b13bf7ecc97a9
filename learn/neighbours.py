"""Points near the best one of a search space: what a sampler that models the whole space finds last."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, FloatDistribution

CHANGED = 4.0
"""Parameters that a neighbour changes, on average."""
REACH = (0.01, 0.25)
"""Standard deviation of a change in shares of the parameter's range, drawn log-uniformly for each neighbour."""


def neighbour(
    space: Mapping[str, BaseDistribution], point: Mapping[str, Any], rng: np.random.Generator
) -> dict[str, Any]:
    """The point with some of its numbers moved, at least one, by normal steps on their own scale; within the space."""
    numbers = {name: kind for name, kind in space.items() if isinstance(kind, FloatDistribution)}
    reach = math.exp(rng.uniform(math.log(REACH[0]), math.log(REACH[1])))
    moved = rng.random(len(numbers)) < CHANGED / len(numbers)
    moved[rng.integers(len(numbers))] = True
    found = dict(point)
    for (name, kind), is_moved, step in zip(numbers.items(), moved, rng.standard_normal(len(numbers)), strict=True):
        if is_moved:
            found[name] = moved_by(kind, float(point[name]), reach * float(step))
    return found


def moved_by(distribution: FloatDistribution, value: float, share: float) -> float:
    """A value moved by a share of its range, in logarithms where it is searched so; not beyond its borders."""
    low, high = distribution.low, distribution.high
    if distribution.log:
        moved = value * (high / low) ** share
    else:
        moved = value + share * (high - low)
    if distribution.step is not None:
        moved = low + round((moved - low) / distribution.step) * distribution.step
    return float(min(max(moved, low), high))
