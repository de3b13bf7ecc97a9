"""Streams: the bytes of their framing, the order of their events, usage within them, and errors within them."""

import json
from typing import Any

import pytest
from engine_under_test import CHAT, COMPLETIONS, DONE, Engine
from shapes import (
    CHAT_CHUNK,
    CHAT_END,
    CHAT_ROLE,
    CHAT_USAGE,
    COMPLETION_CHUNK,
    COMPLETION_END,
    COMPLETION_USAGE,
    FINGERPRINT,
    USAGE,
    assert_shape,
)

BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
WITH_USAGE = {"stream_options": {"include_usage": True}}


def body_for(engine: Engine, path: str, **fields: Any) -> dict[str, Any]:
    return engine.chat(**fields) if path == CHAT else engine.completion(**fields)


def text_of(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])


@BOTH
def test_every_event_is_one_data_line_of_compact_json_and_the_last_is_done(engine: Engine, path: str) -> None:
    response = engine.post(path, {**body_for(engine, path), "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = response.content.split(b"\n\n")
    assert rest == b""
    assert done + b"\n\n" == DONE
    for event in events:
        assert event.startswith(b"data: {")
        assert b"\n" not in event
        document = json.loads(event.removeprefix(b"data: "))
        assert json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() == event.removeprefix(b"data: ")


@BOTH
def test_a_stream_carries_the_text_of_the_whole_answer(engine: Engine, path: str) -> None:
    body = body_for(engine, path, max_tokens=12)
    whole = engine.answer(path, body)["choices"][0]
    chunks = engine.chunks(path, body)
    assert "".join(map(text_of, chunks)) == (whole["message"]["content"] if path == CHAT else whole["text"])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_the_chunks_of_a_completion_have_vllms_fields(engine: Engine) -> None:
    *chunks, end = engine.chunks(COMPLETIONS, engine.completion())
    assert chunks
    for chunk in chunks:
        assert_shape(chunk, COMPLETION_CHUNK)
    assert_shape(end, {**COMPLETION_END, **FINGERPRINT})


def test_the_chunks_of_a_chat_begin_with_the_role_and_have_vllms_fields(engine: Engine) -> None:
    role, *chunks, end = engine.chunks(CHAT, engine.chat())
    assert_shape(role, CHAT_ROLE)
    assert chunks
    for chunk in chunks:
        assert_shape(chunk, CHAT_CHUNK)
    assert_shape(end, {**CHAT_END, **FINGERPRINT})


@pytest.mark.parametrize(
    ("path", "end_shape", "shape"), [(COMPLETIONS, COMPLETION_END, COMPLETION_USAGE), (CHAT, CHAT_END, CHAT_USAGE)]
)
def test_usage_comes_once_after_the_last_choice_where_it_is_asked_for(
    engine: Engine, path: str, end_shape: Any, shape: Any
) -> None:
    body = body_for(engine, path)
    prompt_tokens = engine.answer(path, body)["usage"]["prompt_tokens"]
    *chunks, end, usage = engine.chunks(path, {**body, **WITH_USAGE})
    assert_shape(end, end_shape)
    assert_shape(usage, shape)
    assert usage["usage"]["prompt_tokens"] == prompt_tokens
    assert usage["usage"]["completion_tokens"] == 6
    assert not any("usage" in chunk for chunk in chunks)


@BOTH
@pytest.mark.parametrize("options", [{"include_usage": False}, {"continuous_usage_stats": True}])
def test_no_usage_comes_where_it_is_not_asked_for(engine: Engine, path: str, options: dict[str, bool]) -> None:
    chunks = engine.chunks(path, body_for(engine, path, stream_options=options))
    assert not any("usage" in chunk for chunk in chunks)


@BOTH
def test_continuous_usage_counts_up_in_every_chunk(engine: Engine, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = engine.chunks(path, body_for(engine, path, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == (0 if path == CHAT else counts[0])
    assert counts[-1] == last["usage"]["completion_tokens"] == 6
    more = {"completion_tokens_details": None} if path == CHAT else {}
    for chunk in chunks:
        assert_shape(chunk["usage"], {**USAGE, **more})


@BOTH
def test_only_the_last_choice_has_a_finish_reason(engine: Engine, path: str) -> None:
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in engine.chunks(path, body_for(engine, path))]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]


def test_the_event_of_a_stop_token_has_the_reason_and_no_text(engine: Engine) -> None:
    body = engine.completion(max_tokens=12, return_token_ids=True)
    token = engine.answer(COMPLETIONS, body)["choices"][0]["token_ids"][3]
    del body["return_token_ids"]
    end = engine.chunks(COMPLETIONS, {**body, "stop_token_ids": [token]})[-1]
    choice = end["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    assert choice["text"] == ""


def test_one_token_makes_one_event(engine: Engine) -> None:
    (only,) = engine.chunks(COMPLETIONS, engine.completion(max_tokens=1))
    assert only["choices"][0]["finish_reason"] == "length"


def test_what_only_the_engine_finds_wrong_is_an_event_of_the_stream(engine: Engine) -> None:
    event, done = engine.stream(COMPLETIONS, engine.completion(prompt=[40, 2_000_000]))
    assert event == (
        b'data: {"error": {"message": "Token id 2000000 is out of vocabulary", "type": "BadRequestError", '
        b'"param": null, "code": 400}}\n\n'
    )
    assert done == DONE
