"""Whole answers: their documents, counts, finish reasons, ids and cached tokens."""

import pytest
from engine_under_test import CHAT, COMPLETIONS, Cluster, Engine, ids, unique
from shapes import CHAT as CHAT_SHAPE
from shapes import COMPLETION, assert_shape


def test_a_completion_has_vllms_fields(engine: Engine) -> None:
    response = engine.post(COMPLETIONS, engine.completion())
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert_shape(response.json(), COMPLETION)
    assert response.json()["model"] == engine.model


def test_a_chat_answer_has_vllms_fields(engine: Engine) -> None:
    answer = engine.answer(CHAT, engine.chat())
    assert_shape(answer, CHAT_SHAPE)
    assert answer["model"] == engine.model


@pytest.mark.parametrize("n_prompt", [1, 100, 700])
def test_prompt_tokens_are_the_ids_sent_and_output_tokens_the_limit(engine: Engine, n_prompt: int) -> None:
    usage = engine.answer(COMPLETIONS, engine.completion(n_prompt))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (n_prompt, 6, n_prompt + 6)


def test_an_answer_cut_by_its_limit_says_so(engine: Engine) -> None:
    choice = engine.answer(COMPLETIONS, engine.completion())["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_a_stop_token_ends_the_answer_and_has_no_text(engine: Engine) -> None:
    body = engine.completion(max_tokens=12, return_token_ids=True)
    whole = engine.answer(COMPLETIONS, body)["choices"][0]
    assert whole["prompt_token_ids"] == body["prompt"]
    token = whole["token_ids"][5]
    n_tokens = whole["token_ids"].index(token) + 1
    answer = engine.answer(COMPLETIONS, {**body, "stop_token_ids": [token]})
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    assert choice["token_ids"] == whole["token_ids"][:n_tokens]
    assert answer["usage"]["completion_tokens"] == n_tokens
    shorter = engine.answer(COMPLETIONS, {**body, "max_tokens": n_tokens})["choices"][0]
    assert len(choice["text"]) < len(shorter["text"]) or choice["text"] == shorter["text"] == ""


def test_min_tokens_hold_a_stop_token_back(engine: Engine) -> None:
    body = engine.completion(max_tokens=8, return_token_ids=True)
    first = engine.answer(COMPLETIONS, body)["choices"][0]["token_ids"][0]
    answer = engine.answer(COMPLETIONS, {**body, "stop_token_ids": [first], "min_tokens": 8})
    assert answer["usage"]["completion_tokens"] == 8


def test_greedy_text_is_the_same_again_and_on_both_engines(cluster: Cluster) -> None:
    answers = [
        engine.answer(COMPLETIONS, engine.completion(300, max_tokens=12))["choices"][0]["text"]
        for engine in (cluster.prefill, cluster.prefill, cluster.decode)
    ]
    assert answers[0] == answers[1] == answers[2]


def test_the_default_limit_of_completions_is_16(engine: Engine) -> None:
    for fields in ({"max_tokens": None}, {}):
        body = {**engine.completion(), **fields}
        if not fields:
            del body["max_tokens"]
        assert engine.answer(COMPLETIONS, body)["usage"]["completion_tokens"] == 16


def test_max_completion_tokens_wins_over_max_tokens(engine: Engine) -> None:
    usage = engine.answer(CHAT, engine.chat(max_completion_tokens=3))["usage"]
    assert usage["completion_tokens"] == 3


def test_an_answer_is_cut_where_the_context_ends(engine: Engine) -> None:
    answer = engine.answer(COMPLETIONS, engine.completion(engine.max_model_len - 4, max_tokens=50))
    assert answer["usage"]["total_tokens"] == engine.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_request_id_of_the_client_is_in_the_answers_id(engine: Engine) -> None:
    name = unique()
    assert engine.answer(COMPLETIONS, engine.completion(), x_request_id=name)["id"] == f"cmpl-{name}"
    response = engine.post(CHAT, engine.chat(), x_request_id=name)
    assert response.json()["id"] == f"chatcmpl-{name}"
    assert "x-request-id" not in response.headers


def test_without_a_request_id_every_answer_has_one_of_its_own(engine: Engine) -> None:
    found = {engine.answer(COMPLETIONS, engine.completion())["id"] for _ in range(2)}
    assert len(found) == 2
    assert all(name.startswith("cmpl-") for name in found)


@pytest.mark.parametrize("more_tokens", [0, 1, 13])
def test_a_repeat_finds_the_whole_blocks_before_its_last_token(engine: Engine, more_tokens: int) -> None:
    block = engine.block_tokens
    body = engine.completion(4 * block + more_tokens)
    cached = [engine.answer(COMPLETIONS, body)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, (4 * block + more_tokens - 1) // block * block]


def test_another_salt_shares_nothing(engine: Engine) -> None:
    body = engine.completion(200)
    engine.answer(COMPLETIONS, body)
    usage = engine.answer(COMPLETIONS, {**body, "cache_salt": unique()})["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_common_prefix_is_shared_by_whole_blocks(engine: Engine) -> None:
    block, salt = engine.block_tokens, unique()
    prompt = ids(6 * block)
    engine.answer(COMPLETIONS, engine.completion(prompt=prompt, cache_salt=salt))
    other = prompt[: 3 * block + 5] + [125] * 40
    usage = engine.answer(COMPLETIONS, engine.completion(prompt=other, cache_salt=salt))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3 * block


def test_chat_tells_the_tokens_written_to_the_cache_and_completions_do_not(engine: Engine) -> None:
    chat = engine.chat(messages=[{"role": "user", "content": "w" * 300}])
    first, second = (engine.answer(CHAT, chat)["usage"] for _ in range(2))
    whole = first["prompt_tokens"] // engine.block_tokens * engine.block_tokens
    assert first["prompt_tokens_details"]["created_cache_tokens"] == whole
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached == (first["prompt_tokens"] - 1) // engine.block_tokens * engine.block_tokens
    assert second["prompt_tokens_details"]["created_cache_tokens"] == whole - cached
    usage = engine.answer(COMPLETIONS, engine.completion(200))["usage"]
    assert usage["prompt_tokens_details"]["created_cache_tokens"] is None
