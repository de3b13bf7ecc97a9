"""Both legs of the hand-off between emulated engines, as NixlConnector does them."""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from emulated_engines import FAST, SLOW_STEPS, emulated_engine, emulated_pair, leaving_client

from serve_table.step_time import Handoff

PROMPT = "p" * 200
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12}


async def test_the_prefill_leg_answers_one_token_and_a_handle_and_holds_the_blocks() -> None:
    async with emulated_engine() as prefill:
        body = {**BODY, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "remote_host": None}}
        answer = (await prefill.post("/v1/completions", body, x_request_id="one")).json()
        handle = answer["kv_transfer_params"]
        assert answer["usage"]["completion_tokens"] == 1
        assert handle["do_remote_prefill"] is True
        assert handle["do_remote_decode"] is False
        assert (handle["remote_host"], handle["remote_port"]) == ("127.0.0.1", prefill.port)
        assert handle["remote_request_id"].startswith("cmpl-one")
        assert len(handle["remote_block_ids"][0]) == 13
        assert handle["remote_num_tokens"] == 200
        assert prefill.server.engine.loop.kv_usage == pytest.approx(13 / 3750)
        assert await prefill.metric("rutter_emulator_held_requests") == 1
        assert await prefill.metric("vllm:num_requests_running") == 0


async def test_the_decode_leg_gives_the_local_answer_and_frees_the_prefill_engine() -> None:
    async with emulated_pair() as (prefill, decode):
        handle = await prefill.prefill(PROMPT)
        remote = (await decode.post("/v1/completions", {**BODY, "kv_transfer_params": handle})).json()
        local = (await prefill.post("/v1/completions", BODY)).json()
        assert remote["choices"][0]["text"] == local["choices"][0]["text"]
        assert remote["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert local["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
        await prefill.until_idle()
        await decode.until_idle()
        # What was pulled is cached on the decode engine too.
        again = (await decode.post("/v1/completions", BODY)).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
        assert await decode.metric("vllm:nixl_xfer_time_seconds_count") == 1
        assert await decode.metric("vllm:external_prefix_cache_hits_total") == 200


async def test_a_decode_leg_tells_the_cached_tokens_of_its_prefill() -> None:
    async with emulated_pair() as (prefill, decode):
        for cached in (0, 192):
            handle = await prefill.prefill(PROMPT)
            assert handle["remote_prefill_cached_tokens"] == cached
            body = {**BODY, "kv_transfer_params": handle, "cache_salt": f"salt {cached}"}
            usage = (await decode.post("/v1/completions", body)).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached


FAILED = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}


async def test_a_stream_whose_hand_off_fails_has_begun_and_ends_with_an_error_event() -> None:
    async with emulated_pair() as (prefill, decode):
        handle = await prefill.prefill(PROMPT)
        assert (await decode.post("/v1/completions", {**BODY, "kv_transfer_params": handle})).status_code == 200
        event, done = await decode.events("/v1/completions", {**BODY, "kv_transfer_params": handle})
        assert json.loads(event) == {"error": FAILED}
        assert done == "[DONE]"
        messages = [{"role": "user", "content": "hello"}]
        chat = {"messages": messages, "kv_transfer_params": handle}
        role, event, done = await decode.events("/v1/chat/completions", chat)
        assert json.loads(role)["choices"][0]["delta"]["role"] == "assistant"
        assert json.loads(event) == {"error": FAILED}
        await decode.until_idle()


async def test_a_handle_is_good_once(caplog: pytest.LogCaptureFixture) -> None:
    async with emulated_pair(profile=SLOW_STEPS) as (prefill, decode):
        handle = await prefill.prefill(PROMPT)
        body = {**BODY, "max_tokens": 2, "kv_transfer_params": handle}
        answers = await asyncio.gather(*(decode.post("/v1/completions", body) for _ in range(3)))
        assert sorted(answer.status_code for answer in answers) == [200, 500, 500]
        refused = next(answer for answer in answers if answer.status_code == 500)
        assert refused.headers["content-type"] == "application/json"
        assert refused.json()["error"] == FAILED
        assert "the handle was used before" in caplog.text
        assert (await decode.post("/v1/completions", body)).status_code == 500
        await prefill.until_idle()
        await decode.until_idle()
        assert await decode.metric("vllm:nixl_num_failed_transfers_total") == 3


async def test_a_handle_serves_no_other_prompt(caplog: pytest.LogCaptureFixture) -> None:
    async with emulated_pair() as (prefill, decode):
        handle = await prefill.prefill(PROMPT)
        wrong = await decode.post("/v1/completions", {**BODY, "prompt": "q" * 200, "kv_transfer_params": handle})
        assert wrong.status_code == 500
        assert "another prompt" in caplog.text
        assert (await decode.post("/v1/completions", {**BODY, "kv_transfer_params": handle})).status_code == 200


async def test_a_lease_expires_and_frees_the_blocks(caplog: pytest.LogCaptureFixture) -> None:
    async with emulated_pair(lease_s=5.0, dilation=0.2) as (prefill, decode):
        handle = await prefill.prefill(PROMPT)
        began_s = time.monotonic()
        await prefill.until_idle()
        assert 0.8 < time.monotonic() - began_s < 4.0  # five engine seconds are one second here
        assert await prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 1
        late = await decode.post("/v1/completions", {**BODY, "kv_transfer_params": handle})
        assert late.status_code == 500
        assert "has expired" in caplog.text
        await decode.until_idle()


async def test_a_prefill_engine_that_is_gone_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async with emulated_engine() as decode:
        async with emulated_engine() as prefill:
            handle = await prefill.prefill(PROMPT)
        gone = await decode.post("/v1/completions", {**BODY, "kv_transfer_params": handle})
        assert gone.status_code == 500
        assert "cannot be reached" in caplog.text
        await decode.until_idle()


async def test_a_handle_that_points_off_this_machine_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    async with emulated_pair() as (prefill, decode):
        handle = await prefill.prefill(PROMPT)
        for host in ("192.0.2.1", "localhost", "engine.example"):
            body = {**BODY, "kv_transfer_params": {**handle, "remote_host": host}}
            answer = await decode.post("/v1/completions", body)
            assert answer.status_code == 500
            assert f"{host} is no loopback address" in caplog.text


@pytest.mark.parametrize(
    "params",
    [
        "handle",
        {"do_remote_prefill": "perhaps"},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_prefill": True, "remote_host": "127.0.0.1"},
        {"remote_port": "a port"},
        {"remote_block_ids": [1, 2]},
        {
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": 70_000,
            "remote_engine_id": "e",
            "remote_request_id": "r",
        },
    ],
)
async def test_malformed_transfer_params_are_400(params: Any) -> None:
    async with emulated_engine() as engine:
        answer = await engine.post("/v1/completions", {**BODY, "kv_transfer_params": params})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] in ("BadRequestError", "Bad Request")


@pytest.mark.parametrize("dilation", [1.0, 2.0])
async def test_a_pull_takes_the_hand_off_time_of_what_is_not_cached(dilation: float) -> None:
    profile = replace(FAST, handoff=Handoff(latency_s=0.05, per_token_s=0.001))
    async with emulated_pair(profile=profile, dilation=dilation) as (prefill, decode):

        async def pull_s(max_tokens: int) -> float:
            handle = await prefill.prefill(PROMPT)
            began_s = time.monotonic()
            body = {**BODY, "max_tokens": max_tokens, "kv_transfer_params": handle}
            assert (await decode.post("/v1/completions", body)).status_code == 200
            return time.monotonic() - began_s

        assert 0.25 * dilation <= await pull_s(1) < 0.25 * dilation + 1.0
        # 192 of the 200 tokens are there now.
        assert 0.058 * dilation <= min([await pull_s(1) for _ in range(3)]) < 0.25 * dilation


async def test_a_client_that_leaves_after_the_prefill_answer_changes_nothing() -> None:
    async with emulated_pair() as (prefill, decode):
        handle = await prefill.prefill(PROMPT)
        body = {**BODY, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        async with leaving_client(prefill, body) as reader:
            await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.02)
        assert await prefill.metric("rutter_emulator_held_requests") == 2
        assert await prefill.metric("rutter_emulator_aborted_requests_total") == 0
        assert (await decode.post("/v1/completions", {**BODY, "kv_transfer_params": handle})).status_code == 200
