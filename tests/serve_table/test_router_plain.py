"""The plain ways of a request through the router."""

import json
from pathlib import Path

import pytest
from router_bench import CHAT, COMPLETIONS, chat_body, router_bench
from stub_engines import DONE, HANDLE, chat_stream, decode_engine, prefill_engine, running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_remote_request_makes_both_legs_and_one_row(tmp_path: Path, path: str, stream: bool) -> None:
    body = (
        chat_body(stream=stream) if path == CHAT else {"model": "m", "prompt": "Hello there. " * 30, "stream": stream}
    )
    async with running(prefill_engine, decode_engine) as (p, d), router_bench(tmp_path, [p], [d]) as bench:
        response = await bench.client.post(path, json=body, headers={"x-request-id": "mine"})
        row = await bench.row()
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "mine"
        assert [r.path for r in p.requests + d.requests] == [path, path]
        assert d.requests[0].json["kv_transfer_params"] == HANDLE
        assert p.requests[0].headers["x-request-id"] == d.requests[0].headers["x-request-id"] != "mine"
        assert bench.idle()
    assert (row.action, row.executed, row.status, row.attempts) == ("remote", "remote", "ok", 1)
    assert (row.executed_prefill_engine, row.executed_decode_engine) == (p.url, d.url)
    assert (row.client_id, row.stream, row.http_status) == ("mine", stream, 200)
    assert (row.usage_prompt_tokens, row.output_tokens, row.cached_tokens) == (40, 3, 32)
    assert row.finish_reason == "stop"
    assert (row.ttft_s is None) == (row.slo_met is None) == (not stream)
    if stream and path == CHAT:
        assert response.content == b"".join(chat_stream(with_usage=False))


async def test_local_request_reaches_only_decode(tmp_path: Path) -> None:
    async with (
        running(prefill_engine, decode_engine) as (p, d),
        router_bench(tmp_path, [p], [d], "always_local") as bench,
    ):
        answer = await bench.stream(CHAT, chat_body(stream=True))
        row = await bench.row()
    assert answer.endswith(DONE)
    assert p.requests == []
    assert "kv_transfer_params" not in d.requests[0].json
    assert (row.action, row.executed, row.prefill_engine, row.handoff_age_s) == ("local", "local", None, None)


async def test_odd_fields_reach_both_legs_exactly(tmp_path: Path) -> None:
    odd = '"seed": 9007199254740993123456789, "x": {"y": [1.10, "\\u00e9"]}, "top_k": 5'
    text = f'{{"model": "m", {odd}, "messages": [{{"role": "user", "content": "hi"}}]}}'
    async with running(prefill_engine, decode_engine) as (p, d), router_bench(tmp_path, [p], [d]) as bench:
        await bench.client.post(CHAT, content=text)
    for engine in (p, d):
        body = engine.requests[0].json
        assert body["seed"] == 9007199254740993123456789
        assert body["x"] == {"y": [1.1, "é"]}
        assert b'[1.10, "\\u00e9"]' in engine.requests[0].body
    sent = {k: v for k, v in d.requests[0].json.items() if k != "kv_transfer_params"}
    assert sent == json.loads(text)
