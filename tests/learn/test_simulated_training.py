"""Simulated training: what an explored run tells without a journal."""

import numpy as np
from small_training import small_training


def test_lengths_are_of_all_traces() -> None:
    training = small_training()
    assert training.lengths.counts.sum() == 600
    longer = small_training("reasoning").lengths.predictor().predict(400.0, None)
    assert longer > small_training("documents").lengths.predictor().predict(4000.0, None)


def test_clusters_and_regimes_are_of_the_explored_runs() -> None:
    compiled = small_training().compiled
    assert len(compiled.clusters.labels) == 400
    assert 2 <= len(compiled.clusters) <= 8
    assert compiled.regimes.decode_edges_requests[0] > 0.0
    assert compiled.agreement > 0.8
    # Without shared prefixes all three prompt lengths are one.
    centres = compiled.clusters.centres_tokens
    assert np.allclose(centres[:, 0], centres[:, 1])


def test_shared_prefixes_show_in_the_uncached_lengths() -> None:
    centres = small_training("multi-turn").compiled.clusters.centres_tokens
    assert np.any(centres[:, 1] < 0.7 * centres[:, 0])


def test_f20_the_same_seed_learns_the_same() -> None:
    first = small_training().compiled
    small_training.cache_clear()
    again = small_training().compiled
    assert np.array_equal(first.cell_clusters, again.cell_clusters)
    assert first.regimes == again.regimes
