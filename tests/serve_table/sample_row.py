"""A journal row with known contents."""

from typing import Any

import msgspec

from serve_table.journal import FORMAT_VERSION, FleetRow, Row

SAMPLE = Row(
    version=FORMAT_VERSION,
    request_id="r0",
    client_id=None,
    time=1_700_000_000.0,
    arrival_s=1.5,
    endpoint="/v1/chat/completions",
    stream=True,
    cluster_kind="emulated",
    dilation=1.0,
    policy="round_robin",
    policy_digest="0123456789abcdef",
    explore=0.0,
    rotation=3,
    draws=[0.1, 0.2, 0.3, 0.4],
    prompt_tokens=1000.0,
    prompt_tokens_source="bytes",
    predicted_output_tokens=100.0,
    slo_class=0,
    remote_allowed=True,
    prefix_hashes=[1, 2**63 - 1],
    hash_block_tokens=64,
    prefill_engines=["http://p0", "http://p1"],
    decode_engines=["http://d0", "http://d1", "http://d2"],
    fleet=FleetRow(
        prefill_requests=[0.0, 1.0],
        prefill_tokens=[0.0, 1000.0],
        prefill_up=[1.0, 1.0],
        decode_requests=[1.0, 0.0, 2.0],
        decode_tokens=[1100.0, 0.0, 2200.0],
        decode_prefill_tokens=[0.0, 0.0, 0.0],
        decode_up=[1.0, 1.0, 1.0],
        prefill_cached_tokens=[0.0, 640.0],
        decode_cached_tokens=[0.0, 0.0, 128.0],
    ),
    action="remote",
    prefill_engine="http://p1",
    decode_engine="http://d0",
    cluster=None,
    regime=None,
    propensity=1.0,
    reason="policy",
    executed="remote",
    executed_prefill_engine="http://p1",
    executed_decode_engine="http://d0",
    fallback_reason=None,
    attempts=1,
    status="ok",
    http_status=200,
    finish_reason="stop",
    ttft_s=0.12,
    tpot_s=0.011,
    e2e_s=1.3,
    prefill_leg_s=0.1,
    handoff_age_s=0.0001,
    usage_prompt_tokens=1001,
    output_tokens=100,
    output_tokens_source="usage",
    cached_tokens=640,
    ttft_target_s=0.5,
    tpot_target_s=0.02,
    slo_met=True,
)


def sample_row(**fields: Any) -> Row:
    return msgspec.structs.replace(SAMPLE, **fields)
