"""Result rows of made-up runs."""

from typing import Any

from pipelines.results import ResultRow


def result_row(policy: str, seed: int, goodput: float, **given: Any) -> ResultRow:
    """A run on an emulated 1P+1D cluster that counts; `given` replaces fields."""
    values: dict[str, Any] = {
        "workload": "mixed",
        "prefill_engines": 1,
        "decode_engines": 1,
        "policy": policy,
        "seed": seed,
        "goodput": goodput,
        "ttft_p50_s": 0.1,
        "ttft_p90_s": 0.2,
        "ttft_p99_s": 0.4,
        "tpot_p50_s": 0.01,
        "tpot_p90_s": 0.02,
        "tpot_p99_s": 0.03,
        "cluster_kind": "emulated",
        "dilation": 2.0,
        "requests_per_s": 10.1,
        "requests": 400,
        "failed": 0,
        "kept_schedule": True,
        "kept_pace": True,
        "counted": True,
        "policy_digest": "0" * 16,
    }
    return ResultRow(**{**values, **given})
