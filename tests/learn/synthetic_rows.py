"""Synthetic journal rows for tests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from serve_table.journal import FORMAT_VERSION, FleetRow, JournalWriter, Row

PREFILL_ENGINES = ["http://p0", "http://p1"]
DECODE_ENGINES = ["http://d0", "http://d1", "http://d2", "http://d3"]


@dataclass(frozen=True)
class FleetState:
    """What a test sets of a fleet; everything else is idle and up."""

    prefill_tokens: float = 0.0
    decode_requests: float = 0.0
    prefill_cached_tokens: float = 0.0
    decode_cached_tokens: float = 0.0

    def row(self) -> FleetRow:
        n_prefill, n_decode = len(PREFILL_ENGINES), len(DECODE_ENGINES)
        return FleetRow(
            prefill_requests=[0.0] * n_prefill,
            prefill_tokens=[self.prefill_tokens] * n_prefill,
            prefill_up=[1.0] * n_prefill,
            decode_requests=[self.decode_requests] * n_decode,
            decode_tokens=[0.0] * n_decode,
            decode_prefill_tokens=[0.0] * n_decode,
            decode_up=[1.0] * n_decode,
            prefill_cached_tokens=[self.prefill_cached_tokens] + [0.0] * (n_prefill - 1),
            decode_cached_tokens=[self.decode_cached_tokens] + [0.0] * (n_decode - 1),
        )


def journal_row(number: int, **given: Any) -> Row:
    """A good remote row of number `number`; `given` replaces fields, executed ones follow the decided ones."""
    action = given.get("action", "remote")
    values: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "request_id": f"r{number:06d}",
        "client_id": None,
        "time": 1_700_000_000.0 + 0.1 * number,
        "arrival_s": 0.1 * number,
        "endpoint": "/v1/chat/completions",
        "stream": True,
        "cluster_kind": "emulated",
        "dilation": 1.0,
        "policy": "round_robin",
        "policy_digest": "0" * 16,
        "explore": 0.1,
        "rotation": number,
        "draws": [0.5, 0.5, 0.5, 0.5],
        "prompt_tokens": 500.0,
        "prompt_tokens_source": "ids",
        "predicted_output_tokens": 200.0,
        "slo_class": 0,
        "remote_allowed": True,
        "prefix_hashes": [],
        "hash_block_tokens": 64,
        "prefill_engines": PREFILL_ENGINES,
        "decode_engines": DECODE_ENGINES,
        "fleet": FleetState().row(),
        "action": action,
        "prefill_engine": None if action == "local" else PREFILL_ENGINES[number % len(PREFILL_ENGINES)],
        "decode_engine": DECODE_ENGINES[number % len(DECODE_ENGINES)],
        "cluster": None,
        "regime": None,
        "propensity": 0.9,
        "reason": "policy",
        "fallback_reason": None,
        "attempts": 1,
        "status": "ok",
        "http_status": 200,
        "finish_reason": "stop",
        "ttft_s": 0.2,
        "tpot_s": 0.02,
        "e2e_s": 2.0,
        "prefill_leg_s": None if action == "local" else 0.1,
        "handoff_age_s": None if action == "local" else 0.001,
        "usage_prompt_tokens": 500,
        "output_tokens": 90,
        "output_tokens_source": "usage",
        "cached_tokens": 0,
        "ttft_target_s": 0.5,
        "tpot_target_s": 0.03,
        "slo_met": True,
    }
    values.update(given)
    decided = {"executed": "action", "executed_prefill_engine": "prefill_engine"}
    for executed, name in {**decided, "executed_decode_engine": "decode_engine"}.items():
        values.setdefault(executed, values[name])
    return Row(**values)


def varied_rows(n_rows: int, seed: int = 7) -> list[Row]:
    """Rows of three kinds of request (chat, document, reasoning) under varying pressure."""
    rng = np.random.default_rng(seed)
    kinds = ((300.0, 150.0), (8000.0, 60.0), (200.0, 2500.0))
    rows = []
    for number in range(n_rows):
        prompt, output = kinds[int(rng.integers(len(kinds)))]
        prompt_tokens = round(prompt * float(rng.lognormal(0.0, 0.15)))
        state = FleetState(
            prefill_tokens=float(rng.exponential(3000.0)) * float(rng.random() < 0.7),
            decode_requests=float(rng.integers(0, 60)),
            prefill_cached_tokens=float(64 * int(rng.integers(0, 2))),
        )
        given = {
            "prompt_tokens": float(prompt_tokens),
            "usage_prompt_tokens": prompt_tokens,
            "predicted_output_tokens": float(round(output * float(rng.lognormal(0.0, 0.15)))),
            "output_tokens": max(round(output * float(rng.lognormal(0.0, 0.4))), 2),
            "slo_class": int(rng.random() < 0.3),
            "fleet": state.row(),
            "action": "local" if rng.random() < 0.5 else "remote",
            "ttft_s": float(rng.exponential(0.3)),
        }
        rows.append(journal_row(number, **given))
    return rows


def write_journal(folder: Path, rows: list[Row], segment_bytes: int = 2**26) -> list[Path]:
    """The rows as segments in a folder, by the router's own writer."""
    writer = JournalWriter(folder, segment_bytes=segment_bytes)
    for row in rows:
        writer.append(row)
    writer.close()
    return sorted(folder.glob("*.jsonl"))


def line_of(row: Row) -> bytes:
    return msgspec.json.encode(row) + b"\n"
