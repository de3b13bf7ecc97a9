"""What an answer tells, in the shapes that engines use."""

import json
from pathlib import Path
from typing import Any

import pytest
from router_bench import router_bench
from stub_engines import DONE, Out, StubRequest, prefill_engine, running, sse

from serve_table.answer import AnswerMeter


def observed(*events: bytes) -> AnswerMeter:
    meter = AnswerMeter()
    for now_s, event in enumerate(events):
        meter.observe_event(event, float(now_s))
    return meter


def typed(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


RESPONSE = {
    "status": "completed",
    "usage": {"input_tokens": 12, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 8}},
}
RESPONSE_STREAM = [
    typed("response.created", response={"status": "in_progress", "usage": None}),
    typed("response.output_text.delta", delta="one"),
    typed("response.output_text.delta", delta=" two"),
    typed("response.completed", response=RESPONSE),
]


async def test_responses_are_local_streamed_and_counted(tmp_path: Path) -> None:
    async def decode(request: StubRequest, out: Out) -> None:
        await out.head()
        for event in RESPONSE_STREAM:
            await out.piece(event)
        await out.end()

    body = {"model": "m", "input": "hi " * 300, "stream": True, "max_output_tokens": 9}
    async with running(prefill_engine, decode) as (p, d), router_bench(tmp_path, [p], [d]) as bench:
        assert await bench.stream("/v1/responses", body) == b"".join(RESPONSE_STREAM)
        row = await bench.row()
    assert (p.requests, d.requests[0].json) == ([], body)
    assert (row.status, row.reason, row.predicted_output_tokens) == ("ok", "unsupported_remote", 9.0)
    assert (row.usage_prompt_tokens, row.output_tokens, row.cached_tokens) == (12, 5, 8)
    assert row.ttft_s is not None and row.tpot_s is not None


@pytest.mark.parametrize("kind", ["response.failed", "error"])
def test_failed_responses_are_errors(kind: str) -> None:
    assert observed(RESPONSE_STREAM[1], typed(kind, message="no")).ending == "error"


def choice(**fields: Any) -> bytes:
    return sse({"choices": [{"index": 0, **fields}]})


def test_finish_event_without_text_is_the_last_token() -> None:
    meter = observed(choice(delta={"content": "a"}), choice(delta={}, finish_reason="stop"), DONE)
    assert (meter.first_text_s, meter.last_token_s, meter.ending) == (0.0, 1.0, "complete")


def test_finish_without_any_text_is_complete() -> None:
    meter = observed(choice(delta={"role": "assistant"}), choice(delta={"content": ""}, finish_reason="stop"), DONE)
    assert (meter.first_text_s, meter.output_tokens, meter.ending) == (None, None, "complete")


def test_broken_events_are_passed_over() -> None:
    meter = observed(b"data: {not json\n\n", b"data: [1]\n\n", b": ping\n\n", choice(text=5), choice(text="a"))
    assert (meter.first_text_s, meter.token_events, meter.ending) == (4.0, 1, "cut")


def test_whole_answers() -> None:
    meter = AnswerMeter()
    meter.observe_body(b'{"choices":[{"finish_reason":"length","text":"a"}],"usage":{"completion_tokens":1}}')
    assert (meter.finish_reason, meter.output_tokens, meter.ending) == ("length", 1, "complete")
    broken = AnswerMeter()
    broken.observe_body(b"<html>")
    assert broken.ending == "empty"


@pytest.mark.parametrize(
    ("event", "only_usage"),
    [
        (sse({"choices": [], "usage": {"completion_tokens": 1}}), True),
        (sse({"choices": [], "usage": None}), False),
        (sse({"choices": []}), False),
        (sse({"choices": [{"index": 0}], "usage": {"completion_tokens": 1}}), False),
        (sse({"error": {"message": "x"}, "usage": {"completion_tokens": 1}}), False),
        (DONE, False),
    ],
)
def test_which_event_is_only_usage(event: bytes, only_usage: bool) -> None:
    assert AnswerMeter().observe_event(event, 0.0) is only_usage
