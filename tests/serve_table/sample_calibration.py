"""A small calibration with known contents."""

from typing import Any

from serve_table.artifact_metadata import SloMetadata
from serve_table.calibration import Calibration, Constant, Constants, Point, Residual


def constant(value: float, source: Any = "measured") -> Constant:
    return Constant(value, value * 0.9, value * 1.1, source)


def sample_calibration(**fields: Any) -> Calibration:
    known: dict[str, Any] = {
        "time": 1_700_000_000.0,
        "duration_s": 140.0,
        "cluster_kind": "emulated",
        "dilation": 2.0,
        "prefill_engines": 1,
        "decode_engines": 2,
        "model": "a40-3b",
        "hardware": "a40-3b",
        "max_num_batched_tokens": 2048,
        "seed": 0,
        "http_s": 0.0004,
        "constants": Constants(
            floor_s=constant(0.012),
            per_token_s=constant(0.00003),
            knee_tokens=constant(140.0, "profile"),
            per_token_beyond_s=constant(0.00006),
            per_context_token_s=constant(0.0000002),
            handoff_latency_s=constant(0.007),
            handoff_per_token_s=constant(0.000009),
            overhead_s=constant(0.001),
        ),
        "slo": [SloMetadata("loose", 0.15, 0.0004, 0.025), SloMetadata("tight", 0.075, 0.0002, 0.018)],
        "residuals": [Residual("prefill", 1, 0.01, 0.01)],
        "notes": ["knee_tokens could not be measured: the profile's stands"],
        "points": [Point("prefill", "decode 0", 512, 0, 0, 0.041, 0.0405)],
    }
    return Calibration(**{**known, **fields})
