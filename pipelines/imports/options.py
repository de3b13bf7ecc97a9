"""What a user can ask of an import, the same for every format."""

import math
from dataclasses import dataclass

from pipelines.workloads import TIGHT_SHARE
from serve_table.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Which rows to keep, and the SLO classes that traces lack.

    max_model_len_tokens: rows whose prompt and answer exceed it are dropped and counted, never shortened.
    from_s, to_s: time in the file, from its first usable row, to_s exclusive; then `start` rows are skipped and
    `n_requests` kept. tight_share, seed: classes are drawn for the file's rows before slicing, so a row keeps
    its class in every slice. capacity_requests_per_s: what the cluster bears; a much slower slice is warned of.
    """

    max_model_len_tokens: int | None = None
    from_s: float | None = None
    to_s: float | None = None
    start: int = 0
    n_requests: int | None = None
    tight_share: float = TIGHT_SHARE
    seed: int = 0
    capacity_requests_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("from_s", "to_s"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"{name} is {value}: give a finite time in seconds")
        if self.from_s is not None and self.to_s is not None and self.from_s >= self.to_s:
            raise ConfigError(f"from_s {self.from_s:g} is not before to_s {self.to_s:g}: no row can lie between")
        if self.start < 0:
            raise ConfigError(f"start is {self.start}: give 0 or more rows to skip")
        for name in ("n_requests", "max_model_len_tokens", "capacity_requests_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}: it must be above 0")
        if not 0.0 <= self.tight_share <= 1.0:
            raise ConfigError(f"tight_share is {self.tight_share}: it must be between 0 and 1")
