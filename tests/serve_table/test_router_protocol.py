"""The two legs: what each engine is told (F01, F05, F11)."""

import json
from pathlib import Path
from typing import Any

import pytest
from router_bench import CHAT, COMPLETIONS, chat_body, router_bench
from stub_engines import (
    DONE,
    HANDLE,
    USAGE,
    Out,
    StubRequest,
    chat_event,
    chat_stream,
    decode_engine,
    prefill_engine,
    running,
    sse,
)

HOSTILE = {
    "do_remote_prefill": True,
    "do_remote_decode": True,
    "remote_host": "127.0.0.9",
    "remote_port": 5600,
    "remote_engine_id": "attacker",
    "remote_block_ids": [[1, 2]],
    "remote_request_id": "stolen",
}


@pytest.mark.parametrize("policy_name", ["round_robin", "always_local"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/tokenize"])
async def test_f01_client_kv_params_never_reach_an_engine(tmp_path: Path, path: str, policy_name: str) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi " * 300}],
        "prompt": "hi " * 300,
        "input": "hi " * 300,
        "kv_transfer_params": HOSTILE,
        "vllm_xargs": {"kv_transfer_params": HOSTILE, "deeper": {"kv_transfer_params": HOSTILE}, "kept": 1},
        "extra_args": {"kv_transfer_params": HOSTILE},
    }
    # An escaped spelling of the key is the same key.
    text = json.dumps(body).replace('"extra_args": {"kv_', '"extra_args": {"\\u006bv_')
    async with (
        running(prefill_engine, decode_engine) as (p, d),
        router_bench(tmp_path, [p], [d], policy_name) as bench,
    ):
        response = await bench.client.post(path, content=text)
        assert response.status_code == 200
    assert len(d.requests) == 1
    assert d.requests[0].json["vllm_xargs"] == {"deeper": {}, "kept": 1}
    assert d.requests[0].json["extra_args"] == {}
    for request in p.requests + d.requests:
        assert b"attacker" not in request.body
        assert b"127.0.0.9" not in request.body
        assert request.json.get("kv_transfer_params") in (None, HANDLE) or request in p.requests
    if path in (CHAT, COMPLETIONS) and policy_name == "round_robin":
        assert p.requests[0].json["kv_transfer_params"]["remote_host"] is None
        assert d.requests[0].json["kv_transfer_params"] == HANDLE


@pytest.mark.parametrize(
    "fields",
    [
        {"max_completion_tokens": 500},
        {},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"max_tokens": 500, "min_tokens": 100},
        {"max_tokens": 400, "max_completion_tokens": 500, "min_tokens": 3, "stream": True},
        {"max_output_tokens": 9, "max_tokens": 9, "stop": ["x"]},
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_f05_prefill_leg_makes_one_token_and_decode_gets_the_clients_limits(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    body = chat_body(**fields) if path == CHAT else {"model": "m", "prompt": "hello " * 100, **fields}
    async with running(prefill_engine, decode_engine) as (p, d), router_bench(tmp_path, [p], [d]) as bench:
        response = await bench.client.post(path, json=body)
        assert response.status_code == 200
        row = await bench.row()
    prefill = p.requests[0].json
    limits = {"max_tokens": 1, "max_completion_tokens": 1} if path == CHAT else {"max_tokens": 1}
    assert {name: value for name, value in prefill.items() if name.startswith("max_")} == limits
    assert prefill["stream"] is False
    assert not {"min_tokens", "stream_options"} & set(prefill)
    decode = d.requests[0].json
    assert decode.pop("kv_transfer_params") == HANDLE
    if body.get("stream") and "stream_options" not in body:
        assert decode.pop("stream_options") == {"include_usage": True}
    assert decode == body
    assert row.executed == "remote"


STREAM_OPTIONS = [
    None,
    {"include_usage": False},
    {"include_usage": True},
    {"continuous_usage_stats": True},
    {"include_usage": True, "continuous_usage_stats": True},
]


def vllm_stream(options: dict[str, Any] | None) -> bytes:
    """What an engine streams for these options."""
    wanted = options or {}
    events = chat_stream(with_usage=bool(wanted.get("include_usage")))
    if wanted.get("include_usage") and wanted.get("continuous_usage_stats"):
        events[1] = sse({**json.loads(events[1][6:]), "usage": {**USAGE, "completion_tokens": 1}})
    return b"".join(events)


@pytest.mark.parametrize("piece_bytes", [1, 7, 10**6])
@pytest.mark.parametrize("options", STREAM_OPTIONS)
async def test_f11_client_stream_is_the_engines_own_and_usage_is_journaled(
    tmp_path: Path, options: dict[str, Any] | None, piece_bytes: int
) -> None:
    async def decode(request: StubRequest, out: Out) -> None:
        stream = vllm_stream(request.json.get("stream_options"))
        await out.head()
        for start in range(0, len(stream), piece_bytes):
            await out.piece(stream[start : start + piece_bytes])
        await out.end()

    body = chat_body(stream=True, **({} if options is None else {"stream_options": options}))
    async with running(prefill_engine, decode) as (p, d), router_bench(tmp_path, [p], [d]) as bench:
        assert await bench.stream(CHAT, body) == vllm_stream(options)
        row = await bench.row()
    assert (row.usage_prompt_tokens, row.output_tokens, row.output_tokens_source) == (40, 3, "usage")
    assert row.cached_tokens == 32  # the prefill leg's


async def test_f11_a_usage_event_with_choices_is_kept(tmp_path: Path) -> None:
    both = sse({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}], "usage": USAGE})

    async def decode(request: StubRequest, out: Out) -> None:
        await out.head()
        await out.piece(b": ping\n\n" + chat_event({"role": "assistant"}) + both + DONE)
        await out.end()

    async with running(decode) as (d,), router_bench(tmp_path, [], [d]) as bench:
        answer = await bench.stream(CHAT, chat_body(stream=True))
        row = await bench.row()
    assert answer == b": ping\n\n" + chat_event({"role": "assistant"}) + both + DONE
    assert row.output_tokens == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3},
        {"best_of": 2},
        {"echo": True, "logprobs": 5},
        {"prompt_logprobs": 1},
        {"use_beam_search": True},
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2], [3, 4]]},
    ],
)
async def test_requests_that_no_handle_expresses_go_local(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with running(prefill_engine, decode_engine) as (p, d), router_bench(tmp_path, [p], [d]) as bench:
        response = await bench.client.post(COMPLETIONS, json={"model": "m", "prompt": "hello " * 100, **fields})
        assert response.status_code == 200
        row = await bench.row()
    assert p.requests == []
    assert (row.executed, row.reason, row.remote_allowed) == ("local", "unsupported_remote", False)


async def test_pictures_go_local_and_keep_prefixes_apart(tmp_path: Path) -> None:
    def body(picture: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": picture * 500}}]
        return {"model": "m", "messages": [{"role": "user", "content": parts}, {"role": "user", "content": "y" * 600}]}

    async with running(prefill_engine, decode_engine) as (p, d), router_bench(tmp_path, [p], [d]) as bench:
        for picture in ("a", "b"):
            await bench.client.post(CHAT, json=body(picture))
        rows = await bench.rows(2)
    assert p.requests == []
    assert rows[0].prefix_hashes and not set(rows[0].prefix_hashes) & set(rows[1].prefix_hashes)
    assert rows[0].prompt_tokens < 300  # the picture's bytes are not text
