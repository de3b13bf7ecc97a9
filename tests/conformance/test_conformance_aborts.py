"""Clients that leave: the engine stops working for them and gives every block back."""

import time

import pytest
from engine_under_test import CHAT, COMPLETIONS, Cluster, Engine, read_events

ABORTED = {"finished_reason": "abort"}
LONG = 1500


def wait_for_running(engine: Engine) -> None:
    deadline_s = time.monotonic() + 20.0
    while engine.metric("vllm:num_requests_running") == 0:
        assert time.monotonic() < deadline_s, "the request never ran"
        time.sleep(0.02)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_f02_a_client_that_leaves_a_stream_frees_everything(engine: Engine, path: str) -> None:
    engine.until_idle()
    finished = engine.metric("vllm:request_success_total", **ABORTED)
    body = engine.chat(max_tokens=LONG) if path == CHAT else engine.completion(300, max_tokens=LONG)
    with engine.leaving_client(path, {**body, "stream": True}) as connection:
        read_events(connection, 3)
        wait_for_running(engine)
        assert engine.metric("vllm:kv_cache_usage_perc") > 0
    engine.until_idle()
    # Nor does vLLM count it: a client that left has no success.
    assert engine.metric("vllm:request_success_total", **ABORTED) == finished


def test_f02_a_client_that_leaves_before_a_whole_answer_frees_everything(engine: Engine) -> None:
    engine.until_idle()
    finished = engine.metric("vllm:request_success_total", **ABORTED)
    with engine.leaving_client(COMPLETIONS, engine.completion(300, max_tokens=LONG)):
        wait_for_running(engine)
    engine.until_idle()
    # Nor does vLLM count it: a client that left has no success.
    assert engine.metric("vllm:request_success_total", **ABORTED) == finished


def test_f02_an_aborted_prompt_stays_cached_and_the_engine_serves_on(engine: Engine) -> None:
    body = engine.completion(300, max_tokens=LONG)
    with engine.leaving_client(COMPLETIONS, {**body, "stream": True}) as connection:
        read_events(connection, 2)
    engine.until_idle()
    usage = engine.answer(COMPLETIONS, {**body, "max_tokens": 2})["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 299 // engine.block_tokens * engine.block_tokens


def test_f02_a_client_that_leaves_a_decode_leg_frees_both_engines(cluster: Cluster) -> None:
    body = cluster.decode.completion(300, max_tokens=LONG)
    handle = cluster.prefill.prefill(body)
    with cluster.decode.leaving_client(COMPLETIONS, {**body, "stream": True, "kv_transfer_params": handle}) as client:
        read_events(client, 2)
    cluster.decode.until_idle()
    cluster.prefill.until_idle()
