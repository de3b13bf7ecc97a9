"""How long prompts and answers are: a lognormal law with explicit limits."""

from dataclasses import dataclass

import numpy as np

from learn.trace import Ints
from serve_table.errors import ConfigError


@dataclass(frozen=True)
class LengthLaw:
    """Tokens drawn lognormally around `median` with log-deviation `sigma`, then clipped to [low, high]."""

    median: float
    sigma: float
    low: int
    high: int

    def __post_init__(self) -> None:
        if not (1 <= self.low <= self.median <= self.high and self.sigma >= 0):
            raise ConfigError(f"{self}: needs 1 <= low <= median <= high and sigma >= 0")

    def draw(self, size: int | tuple[int, int], rng: np.random.Generator) -> Ints:
        """Lengths of the given shape."""
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(size))
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)
