"""The table look-up: features to a cluster, cluster and load regime to an action.

In the subset of Python that numba compiles, as all that a decision calls.
"""

from collections.abc import Sequence
from math import log
from typing import NamedTuple

from serve_table.situation import Features


class Table(NamedTuple):
    """The compiled table: quantised features to a cluster, cluster and regime to an action.

    grid_scale (4,): bins per unit of log(1 + tokens) of the four lengths in `Features`. grid_bins (4,):
    number of bins of each. clusters (2 * prod(grid_bins),): flat, SLO class first. actions (n_clusters *
    n_regimes,): flat. prefill_edges_tokens and decode_edges_requests: ascending regime borders.
    """

    grid_scale: Sequence[float]
    grid_bins: Sequence[int]
    clusters: Sequence[int]
    actions: Sequence[int]
    prefill_edges_tokens: Sequence[float]
    decode_edges_requests: Sequence[float]


def length_bin(scale: float, n_bins: int, tokens: float) -> int:
    """Bin of a length on a grid uniform in log(1 + tokens); ends are open, a missing length is bin 0."""
    if not tokens > 0.0:
        return 0
    if tokens > 1e12:  # keeps infinity an integer
        tokens = 1e12
    index = int(log(1.0 + tokens) * scale)
    return index if index < n_bins else n_bins - 1


def cluster_of(table: Table, features: Features) -> int:
    """Cluster of a request by table look-up."""
    scale, bins, clusters, _, _, _ = table
    prompt, uncached_prefill, uncached_decode, output, slo_class, _, _ = features
    index = 1 if slo_class == 1 else 0
    n_bins = bins[0]
    index = index * n_bins + length_bin(scale[0], n_bins, prompt)
    n_bins = bins[1]
    index = index * n_bins + length_bin(scale[1], n_bins, uncached_prefill)
    n_bins = bins[2]
    index = index * n_bins + length_bin(scale[2], n_bins, uncached_decode)
    n_bins = bins[3]
    index = index * n_bins + length_bin(scale[3], n_bins, output)
    return int(clusters[index])


def regime_of(table: Table, features: Features) -> int:
    """Load regime by table look-up: prefill pressure major, decode pressure minor.

    A value equal to a border belongs to the regime above it.
    """
    _, _, _, _, prefill_edges, decode_edges = table
    _, _, _, _, _, prefill_pressure, decode_pressure = features
    prefill = 0
    for edge in prefill_edges:
        if prefill_pressure >= edge:
            prefill += 1
    decode = 0
    for edge in decode_edges:
        if decode_pressure >= edge:
            decode += 1
    return prefill * (len(decode_edges) + 1) + decode


def action_of(table: Table, cluster: int, regime: int) -> int:
    """The learned action of a cluster in a regime."""
    _, _, _, actions, prefill_edges, decode_edges = table
    return int(actions[cluster * (len(prefill_edges) + 1) * (len(decode_edges) + 1) + regime])
