"""Load regimes: borders in the journaled pressures, and the rows of each cell."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DEFAULT_SHAPE = (3, 3)
MIN_ROWS = 20
"""A cell with fewer rows is marked as inherited: its action follows from its cluster's rule alone."""


@dataclass(frozen=True)
class Regimes:
    """Ascending positive borders of the mean pressures of the prefill and the decode pool."""

    prefill_edges_tokens: tuple[float, ...]
    decode_edges_requests: tuple[float, ...]

    def __len__(self) -> int:
        return (len(self.prefill_edges_tokens) + 1) * (len(self.decode_edges_requests) + 1)

    def of(self, pressures: Floats) -> Ints:
        """Regime (n,) of pressures (n, 2) in tokens and requests, as `serve_table.lookup.regime_of`."""
        known = np.nan_to_num(pressures, nan=0.0, posinf=np.inf)
        prefill = np.searchsorted(self.prefill_edges_tokens, known[:, 0], side="right")
        decode = np.searchsorted(self.decode_edges_requests, known[:, 1], side="right")
        regimes: Ints = (prefill * (len(self.decode_edges_requests) + 1) + decode).astype(np.int64)
        return regimes


def fit_regimes(pressures: Floats, shape: tuple[int, int] = DEFAULT_SHAPE) -> Regimes:
    """Borders from the pressures (n_rows, 2) of a journal; shape: regimes wanted of prefill and of decode."""
    return Regimes(pressure_edges(pressures[:, 0], shape[0]), pressure_edges(pressures[:, 1], shape[1]))


def pressure_edges(pressure: Floats, n_regimes: int) -> tuple[float, ...]:
    """At most n_regimes - 1 borders that part the pressures (n_rows,) into equally many rows each.

    Where the least pressure (idle, as a rule) is so common that this cannot be, it is a regime of its own and the
    others part what lies above it. Fewer distinct values give fewer borders; every regime has rows.
    """
    known = pressure[np.isfinite(pressure)]
    if n_regimes <= 1 or len(known) == 0:
        return ()
    # "higher" makes every border a journaled value, so that the regime above it has that row at least.
    edges = np.unique(np.quantile(known, np.arange(1, n_regimes) / n_regimes, method="higher"))
    above = known[known > known.min()]
    if len(above) and (len(edges) < n_regimes - 1 or edges[0] <= known.min()):
        edges = np.unique(np.quantile(above, np.arange(n_regimes - 1) / (n_regimes - 1), method="higher"))
    return tuple(float(edge) for edge in edges if edge > max(known.min(), 0.0))


def cell_counts(labels: Ints, regimes: Ints, n_clusters: int, n_regimes: int) -> Ints:
    """Rows of every cell, flat (n_clusters * n_regimes,), from clusters and regimes of the rows (n_rows,)."""
    return np.bincount(labels * n_regimes + regimes, minlength=n_clusters * n_regimes).astype(np.int64)
