"""The life of kv_transfer_params: made by a prefill leg, used by a decode leg, used again, expired, made up."""

import json
import time
from typing import Any

import pytest
from differences import EXPIRED, LIFE_CYCLE, MADE_UP, USED_TWICE, expected
from engine_under_test import CHAT, COMPLETIONS, DONE, HOLD, Cluster, Engine, unique
from shapes import CHAT as CHAT_SHAPE
from shapes import COMPLETION, HANDLE, assert_shape

N_PROMPT = 500
FAILED = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
DEAD = {"remote_host": "127.0.0.1", "remote_port": 9, "remote_engine_id": "no-such-engine"}
"""Of a handle whose engine is gone: nothing listens on the discard port."""
EXPIRY_LIMIT_S = 90.0


def status_of(cluster: Cluster, body: dict[str, Any], handle: dict[str, Any]) -> int:
    response = cluster.decode.post(COMPLETIONS, {**body, "kv_transfer_params": handle})
    if response.status_code != 200:
        assert response.json() == {"error": FAILED}
    return response.status_code


def test_a_prefill_leg_answers_one_token_and_a_handle(cluster: Cluster) -> None:
    body = cluster.prefill.completion(N_PROMPT, max_tokens=1, kv_transfer_params=HOLD)
    answer = cluster.prefill.answer(COMPLETIONS, body)
    assert_shape(answer, {**COMPLETION, "kv_transfer_params": HANDLE})
    assert answer["usage"]["completion_tokens"] == 1
    handle = answer["kv_transfer_params"]
    assert handle["remote_num_tokens"] == N_PROMPT
    assert len(handle["remote_block_ids"][0]) == -(-N_PROMPT // cluster.prefill.block_tokens)
    del body["max_tokens"]
    cluster.decode.answer(COMPLETIONS, {**body, "max_tokens": 1, "kv_transfer_params": handle})
    cluster.prefill.until_idle()


def test_a_prefill_leg_that_a_token_stops_has_a_handle_too(cluster: Cluster) -> None:
    body = cluster.prefill.completion(N_PROMPT, max_tokens=1, return_token_ids=True)
    token = cluster.prefill.answer(COMPLETIONS, body)["choices"][0]["token_ids"][0]
    body |= {"stop_token_ids": [token], "max_tokens": 5, "cache_salt": unique(), "kv_transfer_params": HOLD}
    answer = cluster.prefill.answer(COMPLETIONS, body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert_shape(answer["kv_transfer_params"], HANDLE)
    decode = cluster.decode.completion(N_PROMPT, cache_salt=body["cache_salt"])
    assert status_of(cluster, decode, answer["kv_transfer_params"]) == 200


def test_a_handle_without_its_cached_tokens_counts_the_whole_prompt_as_cached(cluster: Cluster) -> None:
    body = cluster.prefill.completion(N_PROMPT)
    handle = cluster.prefill.prefill(body)
    del handle["remote_prefill_cached_tokens"]
    usage = cluster.decode.answer(COMPLETIONS, {**body, "kv_transfer_params": handle})["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == N_PROMPT


def test_a_prefill_leg_of_chat_has_a_handle_too(cluster: Cluster) -> None:
    body = cluster.prefill.chat()
    answer = cluster.prefill.answer(CHAT, {**body, "max_tokens": 1, "kv_transfer_params": HOLD})
    assert_shape(answer, {**CHAT_SHAPE, "kv_transfer_params": HANDLE})
    remote = cluster.decode.answer(CHAT, {**body, "kv_transfer_params": answer["kv_transfer_params"]})
    assert_shape(remote, {**CHAT_SHAPE, "kv_transfer_params": None})
    local = cluster.decode.answer(CHAT, {**body, "cache_salt": unique()})
    assert remote["choices"][0]["message"]["content"] == local["choices"][0]["message"]["content"]


def test_the_handles_request_carries_the_clients_id(cluster: Cluster) -> None:
    body, name = cluster.prefill.completion(N_PROMPT), unique()
    handle = cluster.prefill.prefill(body, x_request_id=name)
    assert handle["remote_request_id"].startswith(f"cmpl-{name}-")
    assert status_of(cluster, body, handle) == 200


def test_blocks_are_held_until_the_decode_engine_has_them(cluster: Cluster) -> None:
    cluster.prefill.until_idle()
    body = cluster.prefill.completion(N_PROMPT)
    handle = cluster.prefill.prefill(body)
    cluster.prefill.step()
    assert cluster.prefill.metric("vllm:kv_cache_usage_perc") > 0
    assert cluster.prefill.metric("vllm:num_requests_running") == 0
    assert status_of(cluster, body, handle) == 200
    cluster.prefill.until_idle()
    cluster.decode.until_idle()


def test_a_remote_prefill_gives_the_local_text_and_counts(cluster: Cluster) -> None:
    body = cluster.decode.completion(N_PROMPT, max_tokens=12)
    handle = cluster.prefill.prefill(body)
    remote = cluster.decode.answer(COMPLETIONS, {**body, "kv_transfer_params": handle})
    local = cluster.decode.answer(COMPLETIONS, {**body, "cache_salt": unique()})
    assert remote["choices"] == local["choices"]
    assert remote["usage"]["prompt_tokens"] == N_PROMPT
    assert remote["usage"]["completion_tokens"] == 12
    assert remote["kv_transfer_params"] is None


def test_a_remote_prefill_is_streamed_like_a_local_one(cluster: Cluster) -> None:
    body = cluster.decode.completion(N_PROMPT, max_tokens=12)
    handle = cluster.prefill.prefill(body)
    remote = cluster.decode.chunks(COMPLETIONS, {**body, "kv_transfer_params": handle})
    local = cluster.decode.chunks(COMPLETIONS, {**body, "cache_salt": unique()})
    assert "".join(c["choices"][0]["text"] for c in remote) == "".join(c["choices"][0]["text"] for c in local)
    assert list(remote[0]) == list(local[0])


def test_the_decode_leg_tells_the_cached_tokens_of_its_prefill(cluster: Cluster) -> None:
    block = cluster.prefill.block_tokens
    body = cluster.prefill.completion(4 * block + 1)
    for cached in (0, 4 * block):
        handle = cluster.prefill.prefill(body)
        assert handle["remote_prefill_cached_tokens"] == cached
        usage = cluster.decode.answer(COMPLETIONS, {**body, "kv_transfer_params": handle})["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


def test_a_transfer_is_counted_with_its_tokens(cluster: Cluster) -> None:
    names = ("vllm:nixl_xfer_time_seconds_count", "vllm:external_prefix_cache_hits_total")
    before = [cluster.decode.metric(name) for name in names]
    body = cluster.prefill.completion(N_PROMPT)
    assert status_of(cluster, body, cluster.prefill.prefill(body)) == 200
    for name, was, more in zip(names, before, (1, N_PROMPT), strict=True):
        cluster.decode.until(name, was + more)


def test_what_was_pulled_is_cached_on_the_decode_engine(cluster: Cluster) -> None:
    body = cluster.prefill.completion(N_PROMPT)
    assert status_of(cluster, body, cluster.prefill.prefill(body)) == 200
    usage = cluster.decode.answer(COMPLETIONS, body)["usage"]
    block = cluster.decode.block_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == (N_PROMPT - 1) // block * block


def test_a_handle_used_twice(cluster: Cluster) -> None:
    body = cluster.prefill.completion(N_PROMPT)
    handle = cluster.prefill.prefill(body)
    assert status_of(cluster, body, handle) == 200
    cluster.prefill.until_idle()
    again = {**body, "cache_salt": unique()}
    assert status_of(cluster, again, handle) == expected(USED_TWICE, LIFE_CYCLE[USED_TWICE], cluster.kind).status
    cluster.decode.until_idle()


def test_a_made_up_request_on_a_live_engine(cluster: Cluster) -> None:
    body = cluster.prefill.completion(N_PROMPT)
    handle = cluster.prefill.prefill(body)
    made_up = {**handle, "remote_request_id": unique()}
    assert status_of(cluster, body, made_up) == expected(MADE_UP, LIFE_CYCLE[MADE_UP], cluster.kind).status
    assert status_of(cluster, {**body, "cache_salt": unique()}, handle) == 200
    cluster.prefill.until_idle()
    cluster.decode.until_idle()


def test_a_handle_expires_and_its_blocks_are_freed(cluster: Cluster) -> None:
    cluster.prefill.until_idle()
    expired = cluster.prefill.metric("vllm:nixl_num_kv_expired_reqs_total")
    body = cluster.prefill.completion(N_PROMPT)
    handle = cluster.prefill.prefill(body)
    began_s = time.monotonic()
    while cluster.prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == expired:
        passed_s = time.monotonic() - began_s
        assert passed_s < EXPIRY_LIMIT_S, "no lease ended: start the cluster with a shorter --lease-s"
        time.sleep(0.3)
        cluster.prefill.step()
    cluster.prefill.until_idle()
    assert status_of(cluster, body, handle) == expected(EXPIRED, LIFE_CYCLE[EXPIRED], cluster.kind).status
    cluster.decode.until_idle()


def dead_handle(cluster: Cluster, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A handle whose engine is gone, and the one that it was made from."""
    handle = cluster.prefill.prefill(body)
    return {**handle, **DEAD, "remote_engine_id": unique()}, handle


def test_a_handle_of_an_engine_that_is_gone_is_an_internal_error(cluster: Cluster) -> None:
    body = cluster.prefill.completion(N_PROMPT)
    dead, handle = dead_handle(cluster, body)
    began_s = time.monotonic()
    assert status_of(cluster, body, dead) == 500
    assert time.monotonic() - began_s < 20.0
    assert status_of(cluster, {**body, "cache_salt": unique()}, handle) == 200
    cluster.decode.until_idle()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_that_cannot_get_its_kv_begins_and_ends_with_an_error_event(cluster: Cluster, path: str) -> None:
    body = cluster.prefill.chat() if path == CHAT else cluster.prefill.completion(N_PROMPT)
    handle = cluster.prefill.prefill(body, path)
    dead = {**handle, **DEAD, "remote_engine_id": unique()}
    *begun, event, done = cluster.decode.stream(path, {**body, "kv_transfer_params": dead})
    assert event == b"data: " + json.dumps({"error": FAILED}).encode() + b"\n\n"
    assert done == DONE
    # Chat sends its role with the first word of the engine, whatever that is.
    assert len(begun) == (1 if path == CHAT else 0)
    cluster.decode.answer(path, {**body, "cache_salt": unique(), "kv_transfer_params": handle})
    cluster.prefill.until_idle()


def test_a_failed_transfer_is_counted(cluster: Cluster) -> None:
    finished = cluster.decode.metric("vllm:request_success_total", finished_reason="error")
    body = cluster.prefill.completion(N_PROMPT)
    dead, handle = dead_handle(cluster, body)
    assert status_of(cluster, body, dead) == 500
    cluster.decode.until("vllm:request_success_total", finished + 1, finished_reason="error")
    assert status_of(cluster, {**body, "cache_salt": unique()}, handle) == 200


def test_either_engine_can_prefill_for_the_other(cluster: Cluster) -> None:
    swapped: tuple[Engine, Engine] = (cluster.decode, cluster.prefill)
    body = swapped[0].completion(N_PROMPT, max_tokens=12)
    handle = swapped[0].prefill(body)
    remote = swapped[1].answer(COMPLETIONS, {**body, "kv_transfer_params": handle})
    local = swapped[1].answer(COMPLETIONS, {**body, "cache_salt": unique()})
    assert remote["choices"] == local["choices"]
