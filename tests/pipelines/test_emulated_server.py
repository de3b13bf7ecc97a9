"""The emulated engine's HTTP: what an OpenAI client and a router see."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from emulated_engines import FAST, MODEL, SLOW_STEPS, EngineUnderTest, completion_head, emulated_engine

PROMPT = "Where should this request prefill, and why there?"
COMPLETION = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}


async def test_a_completion_has_text_usage_and_finish_reason() -> None:
    async with emulated_engine() as engine:
        response = await engine.post("/v1/completions", COMPLETION, x_request_id="mine")
    answer = response.json()
    assert answer["id"] == "cmpl-mine"
    assert answer["object"] == "text_completion"
    assert len(answer["choices"][0]["text"]) == 8
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 8,
        "total_tokens": len(PROMPT) + 8,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None},
        "completion_tokens_details": None,
    }


async def test_a_streamed_completion_is_the_same_text_token_by_token() -> None:
    async with emulated_engine() as engine:
        whole = (await engine.post("/v1/completions", COMPLETION)).json()
        *events, done = await engine.events("/v1/completions", COMPLETION)
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert len(chunks) == 8
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 7 + ["length"]
    assert not any("usage" in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_chat_stream_begins_with_the_role_and_ends_with_usage_when_asked() -> None:
    async with emulated_engine() as engine:
        whole = (await engine.post("/v1/chat/completions", CHAT)).json()
        options = {"stream_options": {"include_usage": True}}
        *events, usage, done = await engine.events("/v1/chat/completions", CHAT | options)
    chunks = [json.loads(event) for event in events]
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert whole["object"] == "chat.completion"
    assert not any("usage" in chunk for chunk in chunks)
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["completion_tokens"] == 8


async def test_continuous_usage_counts_up() -> None:
    async with emulated_engine() as engine:
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        events = await engine.events("/v1/completions", COMPLETION | options)
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 8]


async def test_an_answer_ends_itself_unless_told_not_to() -> None:
    async with emulated_engine() as engine:
        body = {**COMPLETION, "max_tokens": 2000}
        first = (await engine.post("/v1/completions", body)).json()
        again = (await engine.post("/v1/completions", body)).json()
        forced = (await engine.post("/v1/completions", {**body, "max_tokens": 900, "ignore_eos": True})).json()
        at_least = (await engine.post("/v1/completions", {**body, "min_tokens": 1500})).json()
    assert first["choices"][0]["finish_reason"] == "stop"
    assert first["choices"][0]["text"] == again["choices"][0]["text"]
    assert 2 <= first["usage"]["completion_tokens"] < 900
    assert forced["usage"]["completion_tokens"] == 900
    assert forced["choices"][0]["text"].startswith(first["choices"][0]["text"])
    assert at_least["usage"]["completion_tokens"] == 1500


async def test_a_limit_that_is_absent_is_16_for_completions_and_the_context_for_chat() -> None:
    profile = replace(FAST, max_model_len_tokens=256)
    async with emulated_engine(profile=profile) as engine:
        completion = await engine.post("/v1/completions", {"prompt": PROMPT, "ignore_eos": True})
        nulled = await engine.post("/v1/completions", {"prompt": PROMPT, "max_tokens": None, "ignore_eos": True})
        chat = await engine.post("/v1/chat/completions", {"messages": CHAT["messages"], "ignore_eos": True})
    assert completion.json()["usage"]["completion_tokens"] == 16
    assert nulled.json()["usage"]["completion_tokens"] == 16
    assert chat.json()["usage"]["total_tokens"] == 256


BAD: list[tuple[str, Any, int, str]] = [
    ("/v1/completions", {**COMPLETION, "max_tokens": 0}, 400, "max_tokens must be at least 1, got 0."),
    ("/v1/completions", {**COMPLETION, "max_tokens": "many"}, 400, "$.max_tokens"),
    ("/v1/completions", {**COMPLETION, "max_tokens": [8]}, 400, "$.max_tokens"),
    ("/v1/completions", {**COMPLETION, "max_tokens": 20_000}, 400, "cannot be greater than max_model_len=16384."),
    ("/v1/completions", {**COMPLETION, "prompt": [5] * 16_385}, 400, "maximum context length is 16384 tokens"),
    ("/v1/completions", {**COMPLETION, "prompt": [5] * 16_384}, 400, "max_tokens must be at least 1, got 0."),
    ("/v1/completions", {**COMPLETION, "min_tokens": 9}, 400, "less than or equal to max_tokens=8, got 9."),
    ("/v1/completions", {**COMPLETION, "min_tokens": -1}, 400, "min_tokens must be greater than or equal to 0"),
    ("/v1/completions", {**COMPLETION, "stream_options": {"include_usage": True}}, 400, "when `stream=True`"),
    ("/v1/completions", {**COMPLETION, "prompt": ""}, 400, "must be provided and non-empty."),
    ("/v1/completions", {**COMPLETION, "prompt": []}, 400, "You must pass at least one prompt"),
    ("/v1/completions", {**COMPLETION, "prompt": [[]]}, 400, "The decoder prompt cannot be empty"),
    ("/v1/completions", {**COMPLETION, "prompt": [1, 99_999]}, 400, "Token id 99999 is out of vocabulary"),
    ("/v1/completions", {**COMPLETION, "prompt": ["a", "b"]}, 400, "more than one prompt"),
    ("/v1/completions", {"max_tokens": 3}, 400, "prompt"),
    ("/v1/completions", {**COMPLETION, "n": 2}, 400, "n is not supported"),
    ("/v1/completions", {**COMPLETION, "echo": True}, 400, "echo is not supported"),
    ("/v1/completions", {**COMPLETION, "logprobs": 1}, 400, "logprobs is not supported"),
    ("/v1/completions", {**COMPLETION, "stop": ["x"]}, 400, "stop is not supported"),
    ("/v1/completions", {**COMPLETION, "model": "other"}, 404, "The model `other` does not exist."),
    ("/v1/completions", {**COMPLETION, "cache_salt": ""}, 400, "cache_salt"),
    ("/v1/completions", {**COMPLETION, "cache_salt": "a/b"}, 400, "must not contain '@', '/'"),
    ("/v1/completions", [1, 2], 400, "1 validation error:"),
    ("/v1/chat/completions", {**CHAT, "messages": []}, 400, "Provide at least one message."),
    ("/v1/chat/completions", {"model": MODEL}, 400, "messages"),
    ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 0}, 400, "max_tokens must be at least 1"),
    (
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "not a multimodal",
    ),
]


@pytest.fixture(scope="module")
def bad_answers() -> list[tuple[int, Any]]:
    async def ask_all() -> list[tuple[int, Any]]:
        async with emulated_engine() as engine:
            answers = [await engine.post(path, body) for path, body, _, _ in BAD]
            await engine.until_idle()
            return [(answer.status_code, answer.json()) for answer in answers]

    return asyncio.run(ask_all())


@pytest.mark.parametrize("case", range(len(BAD)), ids=lambda case: f"{BAD[case][0]} {BAD[case][3]}"[:60])
def test_what_is_refused_and_how(case: int, bad_answers: list[tuple[int, Any]]) -> None:
    _, _, status, message = BAD[case]
    answered, body = bad_answers[case]
    assert answered == status
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert message in body["error"]["message"]
    assert body["error"]["code"] == status


async def test_malformed_json_is_400() -> None:
    async with emulated_engine() as engine:
        response = await engine.client.post("/v1/completions", content=b'{"prompt": "x", ')
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "Bad Request"
        assert (await engine.client.get("/health")).status_code == 200


async def test_tokenize_counts_what_usage_counts_and_detokenize_inverts_it() -> None:
    async with emulated_engine() as engine:
        text = "naïve 서울 🙂"
        tokens = (await engine.post("/tokenize", {"prompt": text})).json()
        usage = (await engine.post("/v1/completions", {"prompt": text})).json()["usage"]
        by_ids = (await engine.post("/v1/completions", {"prompt": tokens["tokens"]})).json()
        by_text = (await engine.post("/v1/completions", {"prompt": [text]})).json()
        chat = (await engine.post("/tokenize", {"messages": CHAT["messages"]})).json()
        chat_usage = (await engine.post("/v1/chat/completions", CHAT)).json()["usage"]
        back = (await engine.post("/detokenize", {"tokens": tokens["tokens"]})).json()
    assert tokens["count"] == len(tokens["tokens"]) == usage["prompt_tokens"]
    assert tokens["max_model_len"] == 16_384
    assert by_ids["choices"][0]["text"] == by_text["choices"][0]["text"]
    assert chat["count"] == chat_usage["prompt_tokens"]
    assert back == {"prompt": text}


async def test_the_prefix_cache_is_real_and_reported() -> None:
    async def cached(engine: EngineUnderTest, prompt: str, **more: Any) -> int:
        body = {"prompt": prompt, "max_tokens": 2, **more}
        answer = (await engine.post("/v1/completions", body)).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    async with emulated_engine() as engine:
        prompt = "x" * 100
        assert await cached(engine, prompt) == 0
        assert await cached(engine, prompt) == 96
        assert await cached(engine, "x" * 40 + "y" * 60) == 32
        assert await cached(engine, "x" * 96) == 80  # the last token is always computed
        assert await cached(engine, prompt, cache_salt="other tenant") == 0
        assert await engine.metric("vllm:prefix_cache_queries_total") == 496
        assert await engine.metric("vllm:prefix_cache_hits_total") == 208
        assert await engine.metric("vllm:kv_cache_usage_perc") == 0
        assert (await engine.post("/reset_prefix_cache", {})).json() == {"success": True}
        assert await cached(engine, prompt) == 0


async def test_the_prefix_cache_is_not_reset_while_blocks_are_in_use() -> None:
    async with emulated_engine() as engine:
        await engine.prefill("x" * 100)
        assert (await engine.post("/reset_prefix_cache", {})).json() == {"success": False}
        again = (await engine.post("/v1/completions", {"prompt": "x" * 100})).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_a_stop_token_ends_the_answer_and_has_no_text() -> None:
    async with emulated_engine() as engine:
        body = {"prompt": PROMPT, "max_tokens": 12, "return_token_ids": True, "ignore_eos": True}
        choice = (await engine.post("/v1/completions", body)).json()["choices"][0]
        token = choice["token_ids"][5]
        first = choice["token_ids"].index(token)
        stopped = (await engine.post("/v1/completions", {**body, "stop_token_ids": [token]})).json()
        late = (await engine.post("/v1/completions", {**body, "stop_token_ids": [token], "min_tokens": 12})).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["stop_reason"] == token
    assert stopped["choices"][0]["text"] == choice["text"][:first]
    assert stopped["usage"]["completion_tokens"] == first + 1
    assert late["choices"][0]["text"] == choice["text"]


async def test_what_only_the_engine_finds_wrong_is_an_event_of_a_stream() -> None:
    async with emulated_engine() as engine:
        event, done = await engine.events("/v1/completions", {"prompt": [1, 99_999]})
        await engine.until_idle()
    assert json.loads(event)["error"]["message"] == "Token id 99999 is out of vocabulary"
    assert json.loads(event)["error"]["code"] == 400
    assert done == "[DONE]"


async def test_metrics_carry_vllms_names_and_count() -> None:
    async with emulated_engine() as engine:
        await engine.post("/v1/completions", COMPLETION)
        await engine.events("/v1/chat/completions", CHAT)
        assert await engine.metric("vllm:generation_tokens_total", model_name=MODEL) == 16
        assert await engine.metric("vllm:request_success_total", finished_reason="length") == 2
        assert await engine.metric("vllm:prompt_tokens_total") > 2 * len(PROMPT)
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total"):
            assert await engine.metric(gauge) == 0
        # The step of the second request's last token is counted after its answer was written.
        assert await engine.metric("rutter_emulator_step_lateness_seconds_count") >= 15


async def test_models_version_and_health() -> None:
    async with emulated_engine() as engine:
        models = (await engine.client.get("/v1/models")).json()
        assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [(MODEL, 16_384)]
        assert (await engine.client.get("/version")).json() == {"version": "rutter-emulated"}
        assert (await engine.client.get("/health")).content == b""


async def test_requests_of_one_connection_are_answered_in_order() -> None:
    async with emulated_engine(profile=SLOW_STEPS) as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        body = json.dumps({"prompt": "abc", "max_tokens": 1}).encode()
        writer.write(completion_head(body) + body + b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        text = (await asyncio.wait_for(reader.read(), 10)).decode()
        writer.close()
        await writer.wait_closed()
    assert text.index("text_completion") < text.index("rutter-emulated")


async def test_what_is_no_http_is_refused() -> None:
    async with emulated_engine() as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 400 ")
        writer.close()
        await writer.wait_closed()


async def test_the_openai_client_reads_all_four_kinds() -> None:
    async with emulated_engine() as engine:
        client = openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", http_client=engine.client)
        messages: Any = CHAT["messages"]
        completion = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8)
        chat = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
        options: Any = {"include_usage": True}
        completion_chunks = [
            chunk
            async for chunk in await client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=8, stream=True, stream_options=options
            )
        ]
        chat_chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=8, stream=True, stream_options=options
            )
        ]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt=PROMPT)
    streamed = "".join(chunk.choices[0].text for chunk in completion_chunks if chunk.choices)
    assert streamed == completion.choices[0].text
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chat_chunks if chunk.choices)
    assert streamed == chat.choices[0].message.content
    assert completion_chunks[-1].usage is not None
    assert completion_chunks[-1].usage.total_tokens == len(PROMPT) + 8
    assert chat_chunks[-1].usage is not None
    assert chat_chunks[-1].usage.completion_tokens == 8
