"""A small artifact with known contents."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from serve_table.artifact import Artifact, validated
from serve_table.artifact_metadata import FEATURE_NAMES, FORMAT_VERSION, LearnedForm, Metadata, SloMetadata
from serve_table.situation import LOCAL, REMOTE


def sample_arrays() -> dict[str, Any]:
    """Two clusters by prompt length (border at 99 tokens) and four regimes; cluster 0 local, cluster 1 remote until
    the prefill pool has 4,000 tokens an engine."""
    bins = [2, 1, 1, 1]
    # One bin a unit of log(1 + tokens) times this scale: the second begins at 99 tokens.
    scale = 1.0 / np.log(100.0)
    return {
        "grid_scale": np.array([scale, 1.0, 1.0, 1.0]),
        "grid_bins": np.array(bins),
        "clusters": np.array([0, 1, 0, 1], dtype=np.uint8),
        "actions": np.array([LOCAL] * 4 + [REMOTE, REMOTE, LOCAL, LOCAL], dtype=np.uint8),
        "inherited": np.array([0, 0, 0, 1] + [0] * 4, dtype=np.uint8),
        "prefill_edges_tokens": np.array([4000.0]),
        "decode_edges_requests": np.array([10.0]),
        "placement": np.array([0.5, 1.0, 1.0, 1.0, 0.0, 2.0, 1.0]),
        "length_scale": np.array([1.0]),
        "length_levels": np.array([0.5, 0.9]),
        "length_quantiles_tokens": np.array([[50.0, 90.0], [200.0, 400.0]]),
        "step_time": np.array([0.01, 0.000025, 150.0, 0.00005, 0.0000002]),
        "handoff": np.array([0.005, 0.000008]),
        "overhead_s": np.array([0.001]),
        "engine_limits": np.array([60_000, 256, 8192]),
        "price": np.array(
            [0.5, 0.06, 0.03, 0.5, 0.7, 0.02, 0.1, 0.03, 0.01, 0.02, 0.04, 0.7, 1.0, 0.02, 0.0, 3.0, 1.0, 1.0, 1.0]
        ),
        "centres_tokens": np.array([[40.0, 40.0, 40.0, 50.0, 0.0], [900.0, 900.0, 700.0, 200.0, 0.0]]),
        "counts": np.array([120, 340]),
    }


def sample_metadata() -> Metadata:
    return Metadata(
        format_version=FORMAT_VERSION,
        feature_names=list(FEATURE_NAMES),
        slo=[SloMetadata("loose", 0.1, 0.0005, 0.025), SloMetadata("tight", 0.05, 0.00025, 0.018)],
        cluster_kind="emulated",
        dilation=1.0,
        prefill_engines=2,
        decode_engines=3,
        workload="mixed",
        journal_rows=460,
        journal_dropped={"aborted": 2},
        journal_digests=["0123456789abcdef"],
        journal_last_time=1_700_000_000.0,
        seed=7,
        sampler="tpe",
        search_jobs=1,
        trials=50,
        study="study",
        table_agreement=0.99,
        held_out=[],
        library_versions={"numpy": "2"},
        policy="table",
    )


def sample_artifact(policy: LearnedForm = "table") -> Artifact:
    return validated(Artifact(sample_arrays(), msgspec.structs.replace(sample_metadata(), policy=policy)))


def changed(**arrays: Callable[[Any], Any]) -> Artifact:
    """The sample with some arrays changed and nothing checked."""
    changed_arrays = sample_arrays()
    for name, change in arrays.items():
        changed_arrays[name] = change(changed_arrays[name].copy())
    return Artifact(changed_arrays, sample_metadata())


def with_metadata(**fields: Any) -> Artifact:
    return Artifact(sample_arrays(), msgspec.structs.replace(sample_metadata(), **fields))
