import numpy as np
import numpy.typing as npt
import pytest

from learn.clusters import DEFAULT_K_RANGE, Clusters, fit_clusters, nearest
from serve_table.errors import ConfigError, JournalError

Floats = npt.NDArray[np.float64]
BLOBS = np.array(
    [[200.0, 200.0, 200.0, 2500.0, 0.0], [300.0, 300.0, 300.0, 120.0, 0.0], [8000.0, 7000.0, 8000.0, 60.0, 0.0]]
)


def blobs(n_rows: int, seed: int = 3) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Features around BLOBS in random order, and which blob each row is of."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, len(BLOBS), n_rows)
    features = BLOBS[truth].copy()
    features[:, :4] *= rng.lognormal(0.0, 0.1, (n_rows, 4))
    return features, truth


def require_sound(clusters: Clusters, features: Floats) -> None:
    """What must hold of every result: no empty or duplicate cluster, finite numbers, labels as `assign` gives them."""
    assert len(np.unique(clusters.centres.round(9), axis=0)) == len(clusters)
    for array in (clusters.centres, clusters.centres_log, clusters.centres_tokens, clusters.scaler.scale):
        assert np.isfinite(array).all()
    assert clusters.scaler.scale.min() > 0
    assert clusters.labels.tolist() == clusters.assign(features).tolist()
    if clusters.counts.sum():
        assert clusters.counts.min() > 0
        assert clusters.counts.sum() + clusters.rows_ignored == len(features)


def test_three_separated_blobs_are_found() -> None:
    features, truth = blobs(600)
    clusters = fit_clusters(features, seed=0)
    require_sound(clusters, features)
    assert len(clusters) == 3
    assert clusters.labels.tolist() == truth.tolist()
    np.testing.assert_allclose(clusters.centres_tokens[:, :4], BLOBS[:, :4], rtol=0.05)
    assert clusters.centres_tokens[:, 4].tolist() == [0.0, 0.0, 0.0]
    assert clusters.note is None


def test_classes_of_equal_lengths_are_told_apart() -> None:
    features = np.tile([500.0, 500.0, 500.0, 100.0, 0.0], (40, 1))
    features[::2, 4] = 1.0
    clusters = fit_clusters(features, seed=0)
    require_sound(clusters, features)
    assert clusters.centres_tokens[:, 4].tolist() == [0.0, 1.0]


def test_a_continuum_is_divided_into_as_many_clusters_as_allowed() -> None:
    rng = np.random.default_rng(5)
    lengths = np.exp(rng.normal(6.0, 1.0, (3000, 4)))
    features = np.column_stack([lengths, np.zeros(3000)])
    clusters = fit_clusters(features, seed=0)
    require_sound(clusters, features)
    assert len(clusters) == DEFAULT_K_RANGE[1]


def test_numbering_is_canonical_and_the_result_repeats() -> None:
    features, _ = blobs(400)
    first = fit_clusters(features, seed=1)
    again = fit_clusters(features, seed=1)
    other_seed = fit_clusters(features[::-1], seed=2)
    assert first.centres.tobytes() == again.centres.tobytes()
    assert np.all(np.diff(first.centres_tokens[:, 0]) > 0)
    np.testing.assert_allclose(other_seed.centres, first.centres)
    assert other_seed.labels[::-1].tolist() == first.labels.tolist()


@pytest.mark.parametrize(
    ("name", "features", "expected"),
    [
        ("all equal", np.tile([800.0, 800.0, 800.0, 150.0, 0.0], (50, 1)), 1),
        ("three distinct rows", np.repeat(BLOBS, 20, axis=0), 3),
        ("one row", BLOBS[:1], 1),
        ("two rows", BLOBS[:2], 2),
    ],
)
def test_f32_k_is_lowered_to_the_distinct_rows(name: str, features: Floats, expected: int) -> None:
    for clusters in (fit_clusters(features, seed=0, k=8), fit_clusters(features, seed=0)):
        require_sound(clusters, features)
        assert len(clusters) == expected, name
        assert (
            clusters.note == f"{len(features)} rows with {expected} distinct feature rows: at most {expected} clusters"
        )


def test_f32_a_constant_column_gets_scale_1() -> None:
    features, truth = blobs(300)
    features[:, 2] = 0.1 + 0.2
    clusters = fit_clusters(features, seed=0)
    require_sound(clusters, features)
    assert clusters.scaler.scale[2] == 1.0
    assert clusters.labels.tolist() == truth.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_f32_rows_with_nan_or_infinity_have_no_part_in_the_fit(bad: float) -> None:
    features, _ = blobs(300)
    damaged = np.vstack([features, features[:5]])
    damaged[300:, 1] = bad
    clusters = fit_clusters(damaged, seed=0)
    require_sound(clusters, damaged)
    assert clusters.rows_ignored == 5
    assert clusters.centres.tobytes() == fit_clusters(features, seed=0).centres.tobytes()


def test_f32_a_column_that_is_never_known_leaves_the_assumed_cluster() -> None:
    features, _ = blobs(50)
    features[:, 3] = np.nan
    clusters = fit_clusters(features, seed=0)
    require_sound(clusters, features)
    assert (len(clusters), clusters.rows_ignored) == (1, 50)
    assert clusters.note == "no usable row among 50: one cluster of assumed lengths for every request"


def test_f32_no_row_leaves_the_assumed_cluster() -> None:
    clusters = fit_clusters(np.empty((0, 5)), seed=0)
    assert (len(clusters), clusters.counts.tolist(), len(clusters.labels)) == (1, [0], 0)
    assert clusters.assign(BLOBS).tolist() == [0, 0, 0]


def test_f32_wild_scales_do_not_drown_the_other_columns() -> None:
    rng = np.random.default_rng(11)
    truth = rng.integers(0, 2, 200)
    features = np.column_stack(
        [
            np.full(200, 1e5) * rng.lognormal(0, 0.05, 200),
            np.full(200, 1e5),
            np.full(200, 1e12),
            truth * 0.9,
            np.zeros(200),
        ]
    )
    clusters = fit_clusters(features, seed=0, k=2)
    require_sound(clusters, features)
    assert np.unique(np.column_stack([clusters.labels, truth]), axis=0).shape == (2, 2)


def test_missing_lengths_are_looked_up_as_zero() -> None:
    features, _ = blobs(300)
    clusters = fit_clusters(features, seed=0)
    strange = np.array([[np.nan, -1.0, -np.inf, np.nan, np.nan], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert clusters.assign(strange)[0] == clusters.assign(strange)[1]
    assert clusters.assign(np.array([[np.inf] * 4 + [1.0]])) == clusters.assign(np.array([[1e12] * 4 + [1.0]]))


def test_nearest_takes_the_first_of_equally_near_centres() -> None:
    centres = np.array([[0.0] * 5, [2.0, 0.0, 0.0, 0.0, 0.0]])
    assert nearest(np.array([[1.0, 0.0, 0.0, 0.0, 0.0], [1.1, 0.0, 0.0, 0.0, 0.0]]), centres).tolist() == [0, 1]


def test_wrong_shape_and_impossible_k_are_refused() -> None:
    with pytest.raises(JournalError, match=r"shape \(3, 4\)"):
        fit_clusters(BLOBS[:, :4], seed=0)
    for k in (0, 65):
        with pytest.raises(ConfigError, match="must be within 1 and 64"):
            fit_clusters(BLOBS, seed=0, k=k)
