"""The grid of the compiled table: bins uniform in log(1 + tokens) along each length, times two SLO classes."""

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from learn.clusters import N_LENGTHS, Clusters, log_lengths
from learn.lengths import length_bins

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

N_CLASSES = 2
UNCACHED_AXES = (1, 2)
MAX_CELLS = 30_000
"""Bytes of the compiled table, one a cell: leaves half of an artifact's 64 KiB to everything else."""

LADDER = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 255)
"""Numbers of bins of one length that are tried, about sqrt(2) apart."""

CHOICE_ROWS = 8000
FIT_SHARE = 0.75

CLOSE_AGREEMENT = 0.01
"""Of grids this close to the best the most even one is taken: a length that told nothing in the journal (nothing was
cached, say) may tell something tomorrow."""


@dataclass(frozen=True)
class Grid:
    """scale (4,): bins per unit of log(1 + tokens) of each length; bins (4,): their number. The last is open."""

    scale: tuple[float, ...]
    bins: tuple[int, ...]

    @property
    def n_cells(self) -> int:
        return N_CLASSES * math.prod(self.bins)

    def cells(self, features: Floats) -> Ints:
        """Cell (n,) of each row of features (n, 5), as `serve_table.lookup.cluster_of` indexes its table."""
        axes = [
            length_bins(scale, n, features[:, axis])
            for axis, (scale, n) in enumerate(zip(self.scale, self.bins, strict=True))
        ]
        return self.cells_of_bins(features[:, N_LENGTHS], axes)

    def cells_of_bins(self, slo_class: Floats, axes: list[Ints]) -> Ints:
        """Cell (n,) from the SLO class (n,) and the bins (n,) of each length."""
        index: Ints = (slo_class == 1.0).astype(np.int64)
        for axis, bins in zip(axes, self.bins, strict=True):
            index = index * bins + axis
        return index

    def representatives(self, cells: Ints, typical: Floats) -> Floats:
        """Features (n, 5) of the middle, in log space, of cells (n,).

        Along a length of one bin the middle means nothing: an uncached length is then the prompt's (no cache), any
        other is typical (4,), in log(1 + tokens).
        """
        slo_class, *axes = np.unravel_index(cells, (N_CLASSES, *self.bins))
        logs = np.empty((len(cells), N_LENGTHS))
        for axis, (bins, n) in enumerate(zip(axes, self.bins, strict=True)):
            if n > 1:
                logs[:, axis] = (bins + 0.5) / self.scale[axis]
            else:
                logs[:, axis] = logs[:, 0] if axis in UNCACHED_AXES else typical[axis]
        features: Floats = np.column_stack([np.expm1(logs), slo_class.astype(np.float64)])
        return features


def grid_of(tops: Floats, bins: tuple[int, ...]) -> Grid:
    """A grid whose last bins end at tops (4,), in log(1 + tokens)."""
    return Grid(tuple(n / float(top) for n, top in zip(bins, tops, strict=True)), bins)


def grid_tops(features: Floats) -> Floats:
    """log(1 + tokens) of the longest of each length in features (n, 5), at least that of one token: (4,)."""
    longest = log_lengths(features[:, :N_LENGTHS]).max(axis=0, initial=0.0)
    tops: Floats = np.maximum(longest, math.log(2.0))
    return tops


def fill_cells(grid: Grid, clusters: Clusters, cells: Ints, labels: Ints, wanted: Ints | None = None) -> Bytes:
    """Cluster of the wanted cells (n_wanted,), or of all: the commonest of a cell's rows, else the exact cluster of
    its representative. Of equally common ones the first counts.

    cells, labels (n_rows,): cell and exact cluster of the journal's rows.
    """
    n_clusters = len(clusters)
    if wanted is None:
        wanted = np.arange(grid.n_cells)
    rows = np.bincount(cells * n_clusters + labels, minlength=grid.n_cells * n_clusters)
    rows = rows.reshape(grid.n_cells, n_clusters)[wanted]
    filled = rows.argmax(axis=1)
    empty = rows.sum(axis=1) == 0
    filled[empty] = clusters.assign(grid.representatives(wanted[empty], clusters.scaler.mean))
    table: Bytes = filled.astype(np.uint8)
    return table


def choose_grid(features: Floats, clusters: Clusters, *, seed: int, max_cells: int = MAX_CELLS) -> Grid:
    """The grid of at most max_cells whose table agrees best with exact k-means on rows it was not filled from.

    Tried are all grids with a LADDER step along each length that cannot be refined within max_cells; of those within
    CLOSE_AGREEMENT of the best, the one whose coarsest length is finest. A length that never varies has one bin, and
    so have all lengths where there is one cluster. features (n_rows, 5); a sample of CHOICE_ROWS decides.
    """
    tops = grid_tops(features)
    if len(clusters) == 1 or len(features) == 0:
        return grid_of(tops, (1,) * N_LENGTHS)
    varies = tuple(bool(spread > 0.0) for spread in np.ptp(log_lengths(features[:, :N_LENGTHS]), axis=0))
    sample = features[np.random.default_rng(seed).permutation(len(features))[:CHOICE_ROWS]]
    labels = clusters.assign(sample)
    n_fit = max(int(len(sample) * FIT_SHARE), 1)
    held_out = slice(n_fit if n_fit < len(sample) else 0, None)
    axis_bins = functools.cache(lambda axis, n: length_bins(n / float(tops[axis]), n, sample[:, axis]))
    agreements: dict[tuple[int, ...], float] = {}
    for bins in candidate_bins(varies, max_cells):
        grid = grid_of(tops, bins)
        cells = grid.cells_of_bins(sample[:, N_LENGTHS], [axis_bins(axis, n) for axis, n in enumerate(bins)])
        table = fill_cells(grid, clusters, cells[:n_fit], labels[:n_fit], cells[held_out])
        agreements[bins] = float(np.mean(table == labels[held_out]))
    best = max(agreements.values())
    close = [bins for bins, agreement in agreements.items() if agreement >= best - CLOSE_AGREEMENT]
    coarsest = {bins: min((n for n, varied in zip(bins, varies, strict=True) if varied), default=1) for bins in close}
    return grid_of(tops, max(close, key=lambda bins: (coarsest[bins], agreements[bins])))


def candidate_bins(varies: tuple[bool, ...], max_cells: int) -> list[tuple[int, ...]]:
    """Bins of each length, from LADDER where it varies and 1 where not, that no step up keeps within max_cells."""
    ladders = [LADDER if varied else (1,) for varied in varies]

    def fits(bins: tuple[int, ...]) -> bool:
        return N_CLASSES * math.prod(bins) <= max_cells

    def refinements(bins: tuple[int, ...]) -> list[tuple[int, ...]]:
        steps = [ladder.index(n) + 1 for ladder, n in zip(ladders, bins, strict=True)]
        return [
            bins[:axis] + (ladders[axis][step],) + bins[axis + 1 :]
            for axis, step in enumerate(steps)
            if step < len(ladders[axis])
        ]

    fitting = [bins for bins in itertools.product(*ladders) if fits(bins)]
    return [bins for bins in fitting if not any(fits(finer) for finer in refinements(bins))]
