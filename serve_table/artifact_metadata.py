"""What an artifact says of itself: its format, features, targets, provenance and held-out scores."""

from typing import Literal

import msgspec

FORMAT_VERSION = 4
LearnedForm = Literal["table", "price"]
FEATURE_NAMES = (
    "prompt_tokens",
    "uncached_prefill_tokens",
    "uncached_decode_tokens",
    "predicted_output_tokens",
    "slo_class",
)


class Score(msgspec.Struct, frozen=True):
    """Held-out result of one policy; low and high bound goodput's 95 % interval over seeds."""

    policy: str
    goodput: float
    goodput_low: float
    goodput_high: float
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_p90_s: float | None


class SloMetadata(msgspec.Struct, frozen=True):
    name: str
    ttft_base_s: float
    ttft_per_prompt_token_s: float
    tpot_s: float


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about an artifact that is not an array. No clock time: equal inputs give equal bytes.

    policy: which of its two learned policies met more targets in training; policy 'rutter' is that one.
    journal_last_time: Unix time of the last journal row, so that constants and targets show their age.
    calibrated_time: Unix time of the calibration that the constants and targets began from; None without one.
    table_agreement: share of journal rows that the dense table puts in the same cluster as exact k-means.
    """

    format_version: int
    feature_names: list[str]
    slo: list[SloMetadata]
    cluster_kind: str
    dilation: float
    prefill_engines: int
    decode_engines: int
    workload: str
    journal_rows: int
    journal_dropped: dict[str, int]
    journal_digests: list[str]
    journal_last_time: float | None
    seed: int
    sampler: str
    search_jobs: int
    trials: int
    study: str
    table_agreement: float
    held_out: list[Score]
    library_versions: dict[str, str]
    policy: LearnedForm
    calibrated_time: float | None = None
