"""Clusters of requests: k-means on log lengths and the SLO class.

A point is log(1 + tokens) of the four lengths, standardised, and the SLO class times a fixed weight. The number
of clusters is chosen by silhouette, and numbering is canonical, so equal rows and seed give equal clusters.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score
from threadpoolctl import threadpool_limits

from serve_table.artifact import MAX_CLUSTERS
from serve_table.artifact_metadata import FEATURE_NAMES
from serve_table.errors import ConfigError, JournalError
from serve_table.predictor import DEFAULT_OUTPUT_TOKENS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

N_LENGTHS = len(FEATURE_NAMES) - 1
MAX_TOKENS = 1e12
"""As `serve_table.lookup.length_bin` caps a length."""

DEFAULT_K_RANGE = (2, 8)
CLEAR_SILHOUETTE = 0.5
"""From here on a silhouette tells of groups (Kaufman and Rousseeuw 1990 call it a reasonable structure)."""

SILHOUETTE_SHARE = 0.95
"""Of clear silhouettes, the largest k that reaches this share of the best is taken."""

CHOICE_ROWS = 2000
"""Rows sampled to choose k: a silhouette takes time and memory with their square."""

N_INIT = 5
SLO_WEIGHT = 1.0
"""The two classes are as far apart as one standard deviation of a log length."""

SAME = 9
"""Decimals of a scaled coordinate beyond which two points are the same."""

DEFAULT_PROMPT_TOKENS = 1000.0
"""Centre of the single cluster of a journal without rows."""


@dataclass(frozen=True)
class Scaler:
    """Standardisation of log lengths. mean, scale (4,): of log(1 + tokens); scale is 1 where a column is constant."""

    mean: Floats
    scale: Floats
    slo_weight: float

    def points(self, features: Floats) -> Floats:
        """(n, 5) features to (n, 5) points. A length that is missing or negative counts as 0 tokens."""
        lengths = (log_lengths(features[:, :N_LENGTHS]) - self.mean) / self.scale
        tight = (features[:, N_LENGTHS] == 1.0).astype(np.float64)
        return np.column_stack([lengths, self.slo_weight * tight])


@dataclass(frozen=True)
class Clusters:
    """k-means' result, ordered by prompt length, then output length, then the other axes.

    centres (k, 5): points as `Scaler` makes them. centres_log (k, 5): the same as log(1 + tokens) and the share of
    tight requests; centres_tokens (k, 5): in tokens. labels (n_rows,): cluster of every given row. counts (k,):
    of the rows that took part in the fit; rows_ignored had a NaN or infinite feature. silhouettes: (k, score) of
    every k that was tried. note: one line for people where the data allowed less than was asked for.
    """

    scaler: Scaler
    centres: Floats
    centres_log: Floats
    centres_tokens: Floats
    labels: Ints
    counts: Ints
    rows_ignored: int
    silhouettes: tuple[tuple[int, float], ...] = ()
    note: str | None = None

    def __len__(self) -> int:
        return len(self.centres)

    def assign(self, features: Floats) -> Ints:
        """Nearest centre of each row of features (n, 5), the first of equally near ones: labels (n,)."""
        return nearest(self.scaler.points(features), self.centres)


def log_lengths(tokens: Floats) -> Floats:
    """log(1 + tokens) by the router's rule: what is missing or negative counts as 0, above 1e12 as 1e12."""
    logs: Floats = np.log1p(np.clip(np.nan_to_num(tokens, nan=0.0, posinf=MAX_TOKENS, neginf=0.0), 0.0, MAX_TOKENS))
    return logs


def nearest(points: Floats, centres: Floats) -> Ints:
    """Index of the nearest centre (k, 5) of each point (n, 5): (n,)."""
    distances = np.empty((len(points), len(centres)))
    for cluster, centre in enumerate(centres):
        distances[:, cluster] = ((points - centre) ** 2).sum(axis=1)
    labels: Ints = distances.argmin(axis=1).astype(np.int64)
    return labels


def fit_scaler(features: Floats, slo_weight: float = SLO_WEIGHT) -> Scaler:
    """Mean and standard deviation of the log lengths of features (n, 5), n at least 1."""
    logs = log_lengths(features[:, :N_LENGTHS])
    deviation = logs.std(axis=0)
    # Rounding leaves a constant column with a deviation of about 1e-16.
    return Scaler(logs.mean(axis=0), np.where(deviation > 1e-9, deviation, 1.0), slo_weight)


def fit_clusters(
    features: Floats,
    *,
    seed: int,
    k: int | None = None,
    k_range: tuple[int, int] = DEFAULT_K_RANGE,
    slo_weight: float = SLO_WEIGHT,
) -> Clusters:
    """Cluster features (n_rows, 5) in the order of FEATURE_NAMES.

    k: this many clusters, else chosen within k_range by silhouettes on a sample of CHOICE_ROWS rows: the largest k
    that reaches SILHOUETTE_SHARE of the best if the best is clear; otherwise the lengths are a continuum without
    groups, which k-means merely divides, and the upper end is taken. Either is lowered to the number of distinct
    rows; no cluster is empty and no two have the same centre. Rows with NaN or infinity have no part in the fit.
    Without a usable row the result is one cluster of assumed lengths. `note` says where less was possible than
    asked. Raises JournalError for another shape and ConfigError for an impossible k.
    """
    if features.ndim != 2 or features.shape[1] != len(FEATURE_NAMES):
        raise JournalError(f"features of shape {features.shape}: expected (n, {len(FEATURE_NAMES)})")
    low, high = k_range if k is None else (k, k)
    if not 1 <= low <= high <= MAX_CLUSTERS:
        raise ConfigError(f"number of clusters {low} to {high}: must be within 1 and {MAX_CLUSTERS}")
    usable = features[np.isfinite(features).all(axis=1)]
    if len(usable) == 0:
        return _assumed_cluster(features, slo_weight)
    scaler = fit_scaler(usable, slo_weight)
    points = scaler.points(usable)
    n_distinct = len(np.unique(np.round(points, SAME), axis=0))
    note = None
    if n_distinct < high:
        note = f"{len(usable)} rows with {n_distinct} distinct feature rows: at most {n_distinct} clusters"
    high = min(high, n_distinct)
    low = min(low, high)
    silhouettes: tuple[tuple[int, float], ...] = ()
    if low < high:
        silhouettes = _silhouettes(points, range(low, high + 1), seed)
        high = _chosen_k(silhouettes) if silhouettes else high
    centres = _distinct_centres(points, _kmeans(points, high, seed))
    return _ordered(scaler, points, centres, features, silhouettes, note)


def _kmeans(points: Floats, k: int, seed: int) -> Floats:
    """Centres (k, 5). One thread: the order of a parallel sum would change the last digits from run to run."""
    if k == 1:
        mean: Floats = points.mean(axis=0, keepdims=True)
        return mean
    with threadpool_limits(limits=1):
        fitted = KMeans(n_clusters=k, n_init=N_INIT, random_state=seed).fit(points)
    centres: Floats = np.asarray(fitted.cluster_centers_, dtype=np.float64)
    return centres


def _silhouettes(points: Floats, candidates: range, seed: int) -> tuple[tuple[int, float], ...]:
    """(k, silhouette) of the candidates on a sample; without those that the sample is too small or too equal for."""
    rng = np.random.default_rng(seed)
    sample = points if len(points) <= CHOICE_ROWS else points[np.sort(rng.permutation(len(points))[:CHOICE_ROWS])]
    n_distinct = len(np.unique(np.round(sample, SAME), axis=0))
    scores = []
    for k in candidates:
        # One cluster has no silhouette, nor has every row a cluster of its own.
        if k < 2 or k > n_distinct or k >= len(sample):
            continue
        labels = nearest(sample, _kmeans(sample, k, seed))
        if len(np.unique(labels)) >= 2:
            scores.append((k, float(silhouette_score(sample, labels))))
    return tuple(scores)


def _chosen_k(silhouettes: tuple[tuple[int, float], ...]) -> int:
    """The rule of `fit_clusters`; silhouettes is not empty."""
    best = max(score for _, score in silhouettes)
    wanted = SILHOUETTE_SHARE * best if best >= CLEAR_SILHOUETTE else -1.0
    return max(k for k, score in silhouettes if score >= wanted)


def _distinct_centres(points: Floats, centres: Floats) -> Floats:
    """The centres that have rows, each once, as the means of their rows."""
    labels = nearest(points, centres)
    means = np.array([points[labels == cluster].mean(axis=0) for cluster in np.unique(labels)])
    _, first = np.unique(np.round(means, SAME), axis=0, return_index=True)
    kept = means[np.sort(first)]
    centres_with_rows: Floats = kept[np.unique(nearest(points, kept))]
    return centres_with_rows


def _ordered(
    scaler: Scaler,
    points: Floats,
    centres: Floats,
    features: Floats,
    silhouettes: tuple[tuple[int, float], ...],
    note: str | None,
) -> Clusters:
    """The clusters in canonical order, with centres in all units and every given row labelled."""
    rounded = np.round(centres, SAME)
    centres = centres[np.lexsort((rounded[:, 4], rounded[:, 2], rounded[:, 1], rounded[:, 3], rounded[:, 0]))]
    logs = np.maximum(centres[:, :N_LENGTHS] * scaler.scale + scaler.mean, 0.0)
    share = centres[:, N_LENGTHS] / scaler.slo_weight if scaler.slo_weight > 0 else np.zeros(len(centres))
    centres_log = np.column_stack([logs, share])
    return Clusters(
        scaler=scaler,
        centres=centres,
        centres_log=centres_log,
        centres_tokens=np.column_stack([np.expm1(logs), share]),
        labels=nearest(scaler.points(features), centres),
        counts=np.bincount(nearest(points, centres), minlength=len(centres)).astype(np.int64),
        rows_ignored=len(features) - len(points),
        silhouettes=silhouettes,
        note=note,
    )


def _assumed_cluster(features: Floats, slo_weight: float) -> Clusters:
    """One cluster for every request, for a journal without a usable row."""
    prompt = DEFAULT_PROMPT_TOKENS
    assumed = np.array([[prompt, prompt, prompt, DEFAULT_OUTPUT_TOKENS, 0.0]])
    scaler = fit_scaler(assumed, slo_weight)
    note = f"no usable row among {len(features)}: one cluster of assumed lengths for every request"
    points = scaler.points(assumed)
    return _ordered(scaler, points[:0], points, features, (), note)
