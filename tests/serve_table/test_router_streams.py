"""Streams: what counts as the first token, how many tokens there were, and bytes that arrive as they were sent
(F08, F15, F23)."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from router_bench import CHAT, COMPLETIONS, Bench, chat_body, router_bench
from stub_engines import DONE, Behaviour, Out, StubRequest, chat_event, running, text_event, usage_event


async def timed_stream(tmp_path: Path, path: str, pieces: list[tuple[float, bytes]], **config: Any) -> Any:
    """The row of a stream whose pieces come at these times after the request."""

    async def decode(request: StubRequest, out: Out) -> None:
        began = time.monotonic()
        await out.head()
        for at_s, piece in pieces:
            await asyncio.sleep(max(began + at_s - time.monotonic(), 0))
            await out.piece(piece)
        await out.end()

    body = chat_body(stream=True) if path == CHAT else {"model": "m", "prompt": "hello", "stream": True}
    async with running(decode) as (d,), router_bench(tmp_path, [], [d], **config) as bench:
        await bench.stream(path, body)
        return await bench.row()


@pytest.mark.parametrize("content", ["", None])
async def test_f08_ttft_is_the_first_event_with_text(tmp_path: Path, content: str | None) -> None:
    pieces = [
        (0.01, chat_event({"role": "assistant", "content": content})),
        (0.05, b": ping\n\n"),
        (0.3, chat_event({"content": "hello"})),
        (0.31, chat_event({}, "stop") + usage_event() + DONE),
    ]
    row = await timed_stream(tmp_path, CHAT, pieces)
    assert row.ttft_s == pytest.approx(0.3, abs=0.08)


async def test_f08_completions_have_no_role_event(tmp_path: Path) -> None:
    row = await timed_stream(tmp_path, COMPLETIONS, [(0.1, text_event("a")), (0.11, text_event("b", "stop") + DONE)])
    assert row.ttft_s == pytest.approx(0.1, abs=0.08)


@pytest.mark.parametrize("delta", [{"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}])
async def test_f08_reasoning_and_tool_calls_are_text(tmp_path: Path, delta: dict[str, Any]) -> None:
    pieces = [(0.05, chat_event(delta)), (0.35, chat_event({"content": "late"}, "stop") + DONE)]
    row = await timed_stream(tmp_path, CHAT, pieces)
    assert row.ttft_s == pytest.approx(0.05, abs=0.08)


async def test_durations_are_divided_by_the_dilation(tmp_path: Path) -> None:
    pieces = [(0.2, chat_event({"content": "hello"}, "stop") + usage_event() + DONE)]
    row = await timed_stream(tmp_path, CHAT, pieces, dilation=4.0)
    assert row.ttft_s == pytest.approx(0.05, abs=0.02)
    assert row.e2e_s == pytest.approx(0.05, abs=0.02)


async def test_f15_tpot_comes_from_usage_not_from_events(tmp_path: Path) -> None:
    usage = usage_event({"prompt_tokens": 5, "completion_tokens": 32})
    pieces = [(0.05 + i * 0.31 / 7, chat_event({"content": "four "}, "length" if i == 7 else None)) for i in range(8)]
    row = await timed_stream(tmp_path, CHAT, [*pieces, (0.37, usage + DONE)])
    assert row.tpot_s == pytest.approx(0.010, abs=0.002)
    assert (row.output_tokens, row.output_tokens_source) == (32, "usage")


async def test_f15_events_are_a_flagged_last_resort(tmp_path: Path) -> None:
    pieces = [(0.01, chat_event({"content": "a"})), (0.02, chat_event({"content": "b"}, "stop") + DONE)]
    row = await timed_stream(tmp_path, CHAT, pieces)
    assert (row.output_tokens, row.output_tokens_source) == (2, "events")


async def test_f15_one_token_has_no_tpot(tmp_path: Path) -> None:
    usage = usage_event({"prompt_tokens": 5, "completion_tokens": 1})
    row = await timed_stream(tmp_path, CHAT, [(0.01, chat_event({"content": "a"}, "length") + usage + DONE)])
    assert (row.status, row.tpot_s, row.slo_met) == ("ok", None, True)


async def test_f15_done_only_is_empty_and_misses_its_slo(tmp_path: Path) -> None:
    row = await timed_stream(tmp_path, CHAT, [(0.01, DONE)])
    assert (row.status, row.ttft_s, row.tpot_s, row.output_tokens, row.slo_met) == ("empty", None, None, None, False)


KOREAN = "안녕하세요 세계 🧭🌊 — 航海書"


def byte_by_byte(text: str) -> Behaviour:
    async def decode(request: StubRequest, out: Out) -> None:
        await out.head()
        for byte in chat_event({"content": text}) + chat_event({"content": text}, "stop") + DONE:
            await out.piece(bytes([byte]))
        await out.end()

    return decode


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
async def test_f23_bytes_are_unchanged_when_cut_anywhere(tmp_path: Path, options: dict[str, Any]) -> None:
    async with running(byte_by_byte(KOREAN)) as (d,), router_bench(tmp_path, [], [d]) as bench:
        answer = await bench.stream(CHAT, chat_body(stream=True, **options))
    assert answer == chat_event({"content": KOREAN}) + chat_event({"content": KOREAN}, "stop") + DONE
    assert KOREAN.encode() in answer


async def test_f23_events_are_passed_on_at_once(tmp_path: Path) -> None:
    async def decode(request: StubRequest, out: Out) -> None:
        await out.head()
        for _ in range(4):
            await out.piece(chat_event({"content": "x"}))
            await asyncio.sleep(0.1)
        await out.piece(chat_event({"content": "x"}, "stop") + DONE)
        await out.end()

    async with running(decode) as (d,), router_bench(tmp_path, [], [d]) as bench:
        times = []
        async with bench.client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
            async for _ in response.aiter_raw():
                times.append(time.monotonic())
    # A busy machine may join two of the five in one read.
    assert len(times) >= 4
    assert times[-1] - times[0] > 0.25


async def test_f23_a_slow_reader_stops_the_engine_not_the_memory(tmp_path: Path) -> None:
    sent = 0

    async def decode(request: StubRequest, out: Out) -> None:
        nonlocal sent
        await out.head()
        event = chat_event({"content": "x" * 60_000})
        for _ in range(1000):
            await out.piece(event)
            sent += len(event)
        await out.piece(DONE)
        await out.end()

    async with running(decode) as (d,), router_bench(tmp_path, [], [d]) as bench:
        _, writer = await slow_reader(bench)
        await asyncio.sleep(0.5)
        before = sent
        await asyncio.sleep(0.3)
        # 60 MB were to come; what is under way is in socket buffers and in the router's bounded ones.
        assert sent == before < 30e6
        writer.transport.abort()
        await bench.until_idle()
        assert (await bench.row()).status == "aborted"


async def slow_reader(bench: Bench) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that sends its request and never reads."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port, limit=1024)
    body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
    await writer.drain()
    return reader, writer
