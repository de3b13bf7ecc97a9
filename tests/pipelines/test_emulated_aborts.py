"""Clients that leave, and memory that runs out: everything is freed, nothing is lost."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from emulated_engines import FAST, SLOW_STEPS, emulated_engine, emulated_pair, leaving_client

from serve_table.step_time import Handoff

LONG: dict[str, Any] = {"prompt": "l" * 300, "max_tokens": 2000, "ignore_eos": True, "stream": True}


async def test_f02_a_client_that_leaves_while_decoding_frees_everything() -> None:
    async with emulated_engine() as engine:
        async with leaving_client(engine, LONG) as reader:
            for _ in range(3):
                await reader.readuntil(b"\n\n")
            assert engine.server.engine.loop.kv_usage > 0
        await engine.until_idle()
        assert await engine.metric("rutter_emulator_aborted_requests_total") == 1
        assert (await engine.post("/v1/completions", {"prompt": "next"})).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_f02_a_client_that_leaves_while_its_prompt_is_prefilled_frees_everything(stream: bool) -> None:
    profile = replace(SLOW_STEPS, max_num_batched_tokens=128)
    async with emulated_engine(profile=profile) as engine:
        async with leaving_client(engine, {**LONG, "stream": stream}):
            await engine.until(running=1)
        await engine.until_idle()
        again = (await engine.post("/v1/completions", {**LONG, "max_tokens": 1, "stream": False})).json()
        assert again["usage"]["completion_tokens"] == 1


async def test_f02_a_client_that_leaves_while_waiting_frees_everything() -> None:
    profile = replace(FAST, max_num_seqs=1)
    async with emulated_engine(profile=profile) as engine:
        async with leaving_client(engine, LONG) as first:
            await first.readuntil(b"\n\n")
            async with leaving_client(engine, {**LONG, "prompt": "w" * 300}):
                await engine.until(running=1, waiting=1)
            await engine.until(running=1, waiting=0)
        await engine.until_idle()


async def test_f02_a_client_that_leaves_during_the_pull_frees_both_engines() -> None:
    profile = replace(FAST, handoff=Handoff(latency_s=0.2, per_token_s=0.0))
    async with emulated_pair(profile=profile) as (prefill, decode):
        handle = await prefill.prefill(LONG["prompt"])
        async with leaving_client(decode, {**LONG, "kv_transfer_params": handle}):
            await decode.until(waiting=1)
        await decode.until_idle()
        await prefill.until_idle()
        assert await prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 0


async def test_f02_a_client_that_leaves_before_the_pull_gives_its_handle_back() -> None:
    profile = replace(FAST, max_num_seqs=1)
    async with emulated_pair(profile=profile) as (prefill, decode):
        handle = await prefill.prefill("h" * 300)
        async with leaving_client(decode, LONG) as first:
            await first.readuntil(b"\n\n")
            async with leaving_client(decode, {**LONG, "prompt": "h" * 300, "kv_transfer_params": handle}):
                await decode.until(running=1, waiting=1)
            await prefill.until_idle()
        await decode.until_idle()


async def test_f02_many_that_leave_at_any_moment_leave_nothing_behind() -> None:
    profile = replace(FAST, kv_tokens=2048, max_num_seqs=8)
    async with emulated_pair(profile=profile) as (prefill, decode):

        async def one(i: int) -> None:
            body = {**LONG, "prompt": f"{i % 5} " * 100, "max_tokens": 400}
            if i % 2:
                leg = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}, "stream": False}
                response = await prefill.post("/v1/completions", leg)
                body["kv_transfer_params"] = response.json()["kv_transfer_params"]
            async with leaving_client(decode, body):
                await asyncio.sleep(i % 7 * 0.02)

        await asyncio.gather(*(one(i) for i in range(40)))
        await decode.until_idle()
        await prefill.until_idle()
        assert (await decode.post("/v1/completions", {"prompt": "still there"})).status_code == 200


async def test_preemption_under_small_kv_loses_no_token() -> None:
    profile = replace(FAST, kv_tokens=320)
    async with emulated_engine(profile=profile) as engine:
        bodies = [{"prompt": f"{i}" * 60, "max_tokens": 120, "ignore_eos": True} for i in range(4)]
        streams = await asyncio.gather(*(engine.events("/v1/completions", body) for body in bodies))
        assert [len(events) for events in streams] == [121] * 4
        assert await engine.metric("vllm:num_preemptions_total") > 0
        assert await engine.metric("vllm:generation_tokens_total") == 480
        await engine.until_idle()


async def test_a_request_longer_than_the_whole_kv_is_refused_not_queued_for_ever() -> None:
    async with emulated_engine(profile=replace(FAST, kv_tokens=330)) as engine:
        answer = await engine.post("/v1/completions", {"prompt": "x" * 321, "max_tokens": 2})
        assert answer.status_code == 400
        assert "maximum context length is 320 tokens" in answer.json()["error"]["message"]
        body = {"prompt": "x" * 300, "max_tokens": 200, "ignore_eos": True}
        assert (await engine.post("/v1/completions", body)).json()["usage"]["completion_tokens"] == 20
