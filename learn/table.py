"""The compiled table: clusters and regimes as arrays that the router looks up, and the artifact around them."""

from dataclasses import dataclass
from importlib.metadata import version
from platform import python_version

import numpy as np
import numpy.typing as npt

from learn.clusters import Clusters
from learn.grid import MAX_CELLS, Grid, choose_grid, fill_cells
from learn.regimes import DEFAULT_SHAPE, MIN_ROWS, Regimes, cell_counts, fit_regimes, inherit
from serve_table.decision import Table

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

HELD_OUT_SHARE = 0.2


@dataclass(frozen=True)
class CompiledTable:
    """Everything of the table but its actions, which the search finds.

    cell_clusters (grid.n_cells,): cluster of every grid cell. counts, inherited (n_clusters * n_regimes,), flat,
    regimes minor: rows of each cell, and 1 where they are too few. agreement: share of the journal's rows that the
    table puts in their exact k-means cluster; held_out_agreement: the same, of rows that had no part in choosing
    or filling the grid, None where there were too few.
    """

    clusters: Clusters
    regimes: Regimes
    grid: Grid
    cell_clusters: Bytes
    counts: Ints
    inherited: Bytes
    agreement: float
    held_out_agreement: float | None

    @property
    def n_actions(self) -> int:
        """Number of (cluster, regime) cells."""
        return len(self.inherited)

    def with_inherited(self, actions: npt.ArrayLike) -> Bytes:
        """Actions (n_actions,) with the fallback of `learn.regimes.inherit` where a cell has too few rows."""
        return inherit(np.asarray(actions, dtype=np.uint8), self.inherited, self.counts, len(self.regimes))

    def decision_table(self, actions: npt.ArrayLike) -> Table:
        """The router's table with these actions (n_actions,), inherited cells filled in."""
        return Table(
            grid_scale=list(self.grid.scale),
            grid_bins=list(self.grid.bins),
            clusters=self.cell_clusters.tobytes(),
            actions=self.with_inherited(actions).tobytes(),
            prefill_edges_tokens=self.regimes.prefill_edges_tokens,
            decode_edges_requests=self.regimes.decode_edges_requests,
        )


def compile_table(
    features: Floats,
    pressures: Floats,
    clusters: Clusters,
    *,
    seed: int,
    regime_shape: tuple[int, int] = DEFAULT_SHAPE,
    min_rows: int = MIN_ROWS,
    max_cells: int = MAX_CELLS,
) -> CompiledTable:
    """Compile clusters into a table from a journal's features (n_rows, 5) and pressures (n_rows, 2).

    A share of the rows is set aside to measure the agreement of a table made from the others; the table returned
    has the grid of the latter and is filled from all rows.
    """
    usable = np.isfinite(features).all(axis=1)
    features, pressures = features[usable], pressures[usable]
    labels = clusters.assign(features)
    order = np.random.default_rng(seed).permutation(len(features))
    n_held_out = int(len(features) * HELD_OUT_SHARE)
    held_out, made_from = order[:n_held_out], order[n_held_out:]
    grid = choose_grid(features[made_from], clusters, seed=seed, max_cells=max_cells)
    cells = grid.cells(features)
    partial = fill_cells(grid, clusters, cells[made_from], labels[made_from])
    cell_clusters = fill_cells(grid, clusters, cells, labels)
    regimes = fit_regimes(pressures, regime_shape)
    counts = cell_counts(labels, regimes.of(pressures), len(clusters), len(regimes))
    return CompiledTable(
        clusters=clusters,
        regimes=regimes,
        grid=grid,
        cell_clusters=cell_clusters,
        counts=counts,
        inherited=(counts < min_rows).astype(np.uint8),
        agreement=float(np.mean(cell_clusters[cells] == labels)) if len(labels) else 1.0,
        held_out_agreement=float(np.mean(partial[cells[held_out]] == labels[held_out])) if n_held_out else None,
    )
