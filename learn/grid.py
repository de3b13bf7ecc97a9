"""The grid of the compiled table: bins uniform in log(1 + tokens) along each length, times two SLO classes."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from learn.clusters import N_LENGTHS, Clusters, log_lengths
from learn.lengths import length_bins

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

N_CLASSES = 2
MAX_CELLS = 30_000
"""Bytes of the compiled table, one a cell: leaves half of an artifact's 64 KiB to everything else."""

FIRST_BINS = 4
GROWTH = 1.25
MAX_BINS = 255
CHOICE_ROWS = 8000
FIT_SHARE = 0.75


@dataclass(frozen=True)
class Grid:
    """scale (4,): bins per unit of log(1 + tokens) of each length; bins (4,): their number. The last is open."""

    scale: tuple[float, ...]
    bins: tuple[int, ...]

    @property
    def n_cells(self) -> int:
        return N_CLASSES * math.prod(self.bins)

    def cells(self, features: Floats) -> Ints:
        """Cell (n,) of each row of features (n, 5), as `serve_table.decision.cluster_of` indexes its table."""
        axes = [self.axis_bins(features[:, axis], axis) for axis in range(N_LENGTHS)]
        return self.cells_of_bins(features[:, N_LENGTHS], axes)

    def axis_bins(self, tokens: Floats, axis: int) -> Ints:
        """Bins (n,) of tokens (n,) along one length."""
        return length_bins(self.scale[axis], self.bins[axis], tokens)

    def cells_of_bins(self, slo_class: Floats, axes: list[Ints]) -> Ints:
        """Cell (n,) from the SLO class (n,) and the bins (n,) of each length."""
        index = (slo_class == 1.0).astype(np.int64)
        for axis, bins in zip(axes, self.bins, strict=True):
            index = index * bins + axis
        return index

    def representatives(self) -> Floats:
        """Features (n_cells, 5) of each cell's middle, in log space."""
        middles = [np.expm1((np.arange(n) + 0.5) / scale) for n, scale in zip(self.bins, self.scale, strict=True)]
        mesh = np.meshgrid(np.arange(float(N_CLASSES)), *middles, indexing="ij")
        return np.column_stack([axis.ravel() for axis in (*mesh[1:], mesh[0])])


def grid_of(tops: Floats, bins: tuple[int, ...]) -> Grid:
    """A grid whose last bins end at tops (4,), in log(1 + tokens)."""
    return Grid(tuple(n / float(top) for n, top in zip(bins, tops, strict=True)), bins)


def grid_tops(features: Floats) -> Floats:
    """log(1 + tokens) of the longest of each length in features (n, 5), at least that of one token: (4,)."""
    longest = log_lengths(features[:, :N_LENGTHS]).max(axis=0, initial=0.0)
    return np.maximum(longest, math.log(2.0))


def fill_cells(grid: Grid, clusters: Clusters, cells: Ints, labels: Ints) -> npt.NDArray[np.uint8]:
    """Cluster of every cell (n_cells,): the commonest of its rows, else the exact cluster of its middle.

    cells, labels (n_rows,): cell and exact cluster of the journal's rows. Of equally common ones the first counts.
    """
    n_clusters = len(clusters)
    counts = np.bincount(cells * n_clusters + labels, minlength=grid.n_cells * n_clusters)
    counts = counts.reshape(grid.n_cells, n_clusters)
    exact = clusters.assign(grid.representatives())
    return np.where(counts.sum(axis=1) > 0, counts.argmax(axis=1), exact).astype(np.uint8)


def choose_grid(features: Floats, clusters: Clusters, *, seed: int, max_cells: int = MAX_CELLS) -> Grid:
    """The grid of at most max_cells whose table agrees best with exact k-means on rows it was not filled from.

    From FIRST_BINS a length on, the axis whose refinement agrees best grows by GROWTH until no axis fits; of
    equally good grids the finest is taken. A length that never varies and a single cluster need one bin. features
    (n_rows, 5); a sample of CHOICE_ROWS decides.
    """
    tops = grid_tops(features)
    constant = np.ptp(log_lengths(features[:, :N_LENGTHS]), axis=0) == 0.0 if len(features) else np.full(4, True)
    if len(clusters) == 1:
        return grid_of(tops, (1,) * N_LENGTHS)
    bins = tuple(1 if flat else FIRST_BINS for flat in constant)
    sample = _sample(features, seed)
    labels = clusters.assign(sample)
    best, best_agreement = grid_of(tops, bins), -1.0
    while True:
        grown = [_grown(bins, axis) for axis in range(N_LENGTHS) if not constant[axis]]
        grids = [grid_of(tops, candidate) for candidate in grown if candidate != bins]
        grids = [grid for grid in grids if grid.n_cells <= max_cells]
        if not grids:
            return best
        agreements = [_held_out_agreement(grid, clusters, sample, labels) for grid in grids]
        agreement = max(agreements)
        # Of equally good refinements the coarsest axis grows, so that no axis is left behind on a plateau.
        tied = [grid for grid, reached in zip(grids, agreements, strict=True) if reached == agreement]
        grid = min(tied, key=lambda tied_grid: tied_grid.n_cells * max(tied_grid.bins))
        bins = grid.bins
        if agreement >= best_agreement:
            best, best_agreement = grid, agreement


def _grown(bins: tuple[int, ...], axis: int) -> tuple[int, ...]:
    more = min(math.ceil(bins[axis] * GROWTH), MAX_BINS)
    return bins[:axis] + (more,) + bins[axis + 1 :]


def _sample(features: Floats, seed: int) -> Floats:
    order = np.random.default_rng(seed).permutation(len(features))[:CHOICE_ROWS]
    sample: Floats = features[order]
    return sample


def _held_out_agreement(grid: Grid, clusters: Clusters, features: Floats, labels: Ints) -> float:
    """Agreement on the last rows of a table filled from the first FIT_SHARE of them."""
    n_fit = max(int(len(features) * FIT_SHARE), 1)
    cells = grid.cells(features)
    table = fill_cells(grid, clusters, cells[:n_fit], labels[:n_fit])
    held_out = slice(n_fit if n_fit < len(features) else 0, None)
    return float(np.mean(table[cells[held_out]] == labels[held_out]))
