"""Clients that leave and engines that fail (F02, F03, F04, F06, F07, F12)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from router_bench import CHAT, Bench, chat_body, router_bench
from stub_engines import (
    DONE,
    HANDLE,
    Behaviour,
    Out,
    StubEngine,
    StubRequest,
    chat_event,
    decode_engine,
    invalid,
    prefill_engine,
    running,
)

from serve_table.engine_response import EngineTimeouts
from serve_table.health import ProbePolicy

SHORT = EngineTimeouts(connect_s=0.3, first_byte_s=0.3, gap_s=0.3)
NEVER = ProbePolicy(interval_s=30.0)


async def endless_decode(request: StubRequest, out: Out) -> None:
    await out.head()
    while True:
        await out.piece(chat_event({"content": "x"}))
        await asyncio.sleep(0.005)


async def silent(request: StubRequest, out: Out) -> None:
    await asyncio.sleep(60)


async def silent_stream(request: StubRequest, out: Out) -> None:
    await out.head()
    await asyncio.sleep(60)


async def closes(request: StubRequest, out: Out) -> None:
    out.cut()


def answers(status: int, body: bytes = invalid("no"), **headers: str) -> Behaviour:
    async def answer(request: StubRequest, out: Out) -> None:
        await out.whole(status, body, **headers)

    return answer


async def leave(bench: Bench, chunks: int) -> None:
    """Start a stream and close the connection after some chunks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    body = json.dumps(chat_body(stream=True)).encode()
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
    await writer.drain()
    for _ in range(chunks):
        await reader.readuntil(b"\n\n")
    await asyncio.sleep(0.3)
    writer.close()


@pytest.mark.parametrize("phase", ["prefill", "before_first_byte", "after_head", "streaming"])
async def test_f02_a_client_that_leaves_stops_both_engines(tmp_path: Path, phase: str) -> None:
    prefill = silent if phase == "prefill" else prefill_engine
    decode = {"before_first_byte": silent, "after_head": silent_stream}.get(phase, endless_decode)
    async with running(prefill, decode) as (p, d), router_bench(tmp_path, [p], [d]) as bench:
        await asyncio.gather(*(leave(bench, chunks=3 if phase == "streaming" else 0) for _ in range(8)))
        rows = await bench.rows(8)
        for _ in range(1500):
            if p.busy == d.busy == 0:
                break
            await asyncio.sleep(0.01)
        assert (p.busy, d.busy, bench.idle()) == (0, 0, True)
        assert (p if phase == "prefill" else d).left == 8
    assert {row.status for row in rows} == {"aborted"}
    assert {row.slo_met for row in rows} == {None}
    if phase == "streaming":
        assert all(row.output_tokens and row.output_tokens_source == "events" for row in rows)
    if phase == "prefill":
        assert {(row.executed, row.executed_decode_engine) for row in rows} == {("remote", None)}


async def test_f02_one_row_when_the_client_leaves_during_its_body(tmp_path: Path) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        _, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{" % CHAT.encode())
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        row = await bench.row()
    assert (row.status, row.fleet, row.executed, d.requests) == ("aborted", None, None, [])


FAILING_PREFILLS = {
    "status": answers(500),
    "broken": closes,
    "timeout": silent,
    "no_handle": answers(200, b'{"id":"c"}'),
}


@pytest.mark.parametrize("kind", [*FAILING_PREFILLS, "unreachable"])
async def test_f03_failed_prefill_falls_back_to_decode_alone(tmp_path: Path, kind: str) -> None:
    async with (
        running(FAILING_PREFILLS.get(kind, prefill_engine), decode_engine) as (p, d),
        router_bench(tmp_path, [p], [d], timeouts=SHORT, probes=NEVER) as bench,
    ):
        if kind == "unreachable":
            await p.stop()
        response = await bench.client.post(CHAT, json=chat_body())
        assert response.status_code == 200
        row = await bench.row()
        assert bench.context.fleet.prefill[0].up is (kind == "no_handle")
        assert bench.idle()
    assert len(d.requests) == 1
    assert "kv_transfer_params" not in d.requests[0].json
    assert (row.action, row.executed, row.prefill_engine) == ("remote", "local", p.url)
    assert row.fallback_reason == (kind if kind == "no_handle" else f"prefill_{kind}")
    assert (row.executed_prefill_engine, row.attempts, row.status) == (None, 2, "ok")


async def test_f03_a_failed_prefill_engine_comes_back_by_probe(tmp_path: Path) -> None:
    async with running(answers(500), decode_engine) as (p, d), router_bench(tmp_path, [p], [d]) as bench:
        p.healthy = False
        for _ in range(2):
            await bench.client.post(CHAT, json=chat_body())
        first, second = await bench.rows(2)
        assert first.fallback_reason == "prefill_status"
        assert (second.action, second.reason) == ("local", "no_prefill_engine")
        p.healthy, p.behaviour = True, prefill_engine
        for _ in range(1500):
            if bench.context.fleet.prefill[0].up:
                break
            await asyncio.sleep(0.01)
        await bench.client.post(CHAT, json=chat_body())
        assert (await bench.rows(3))[2].executed == "remote"


async def cut_after_head(request: StubRequest, out: Out) -> None:
    await out.head()
    out.cut()


async def test_f04_a_handle_is_never_sent_twice(tmp_path: Path) -> None:
    async with (
        running(prefill_engine, cut_after_head, decode_engine) as (p, bad, good),
        router_bench(tmp_path, [p], [bad, good], probes=NEVER) as bench,
    ):
        response = await bench.client.post(CHAT, json=chat_body(stream=True))
        assert response.status_code == 502
        assert response.json()["error"]["code"] == 502
        row = await bench.row()
    assert (len(bad.requests), good.requests) == (1, [])
    assert (row.status, row.executed, row.http_status) == ("upstream_error", "remote", 502)


async def test_f04_unreached_decode_lets_another_use_the_handle(tmp_path: Path) -> None:
    async with (
        running(prefill_engine, decode_engine, decode_engine) as (p, gone, good),
        router_bench(tmp_path, [p], [gone, good], probes=NEVER) as bench,
    ):
        await gone.stop()
        response = await bench.client.post(CHAT, json=chat_body(stream=True))
        assert response.status_code == 200
        row = await bench.row()
        assert bench.idle()
    assert good.requests[0].json["kv_transfer_params"] == HANDLE
    assert (row.decode_engine, row.executed_decode_engine) == (gone.url, good.url)
    assert (row.executed, row.fallback_reason, row.attempts) == ("remote", "decode_unreachable", 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 500, 503])
async def test_f06_decode_errors_reach_the_client_unchanged(tmp_path: Path, status: int, stream: bool) -> None:
    body = invalid("the context is too long: ä")
    async with running(answers(status, body, retry_after="7")) as (d,), router_bench(tmp_path, [], [d]) as bench:
        response = await bench.client.post(CHAT, json=chat_body(stream=stream))
        row = await bench.row()
        assert bench.context.fleet.decode[0].up
    assert (response.status_code, response.content) == (status, body)
    assert (response.headers["content-type"], response.headers["retry-after"]) == ("application/json", "7")
    assert row.status == ("client_error" if status < 500 else "upstream_error")
    assert row.http_status == status


async def test_f06_prefill_4xx_is_the_clients_own(tmp_path: Path) -> None:
    async with running(answers(422), decode_engine) as (p, d), router_bench(tmp_path, [p], [d]) as bench:
        response = await bench.client.post(CHAT, json=chat_body(stream=True))
        row = await bench.row()
        assert bench.context.fleet.prefill[0].up
        metrics = (await bench.admin.get("/metrics")).text
    assert (response.status_code, response.content, d.requests) == (422, invalid("no"), [])
    assert (row.status, row.executed, row.executed_decode_engine) == ("client_error", "remote", None)
    assert f'rutter_prefill_refusals_total{{engine="{p.url}"}} 1.0' in metrics


def dies(how: str) -> Behaviour:
    async def decode(request: StubRequest, out: Out) -> None:
        await out.head()
        for _ in range(3):
            await out.piece(chat_event({"content": "x"}))
        if how == "half event":
            await out.piece(b'data: {"choi')
        await asyncio.sleep(0.05)
        if how == "clean end":
            await out.end()
        elif how == "silence":
            await asyncio.sleep(60)
        else:
            out.cut()

    return decode


@pytest.mark.parametrize("how", ["reset", "clean end", "half event", "silence"])
async def test_f07_death_in_mid_stream_is_told_by_one_error_event(tmp_path: Path, how: str) -> None:
    async with running(dies(how)) as (d,), router_bench(tmp_path, [], [d], timeouts=SHORT, probes=NEVER) as bench:
        answer = await bench.stream(CHAT, chat_body(stream=True))
        row = await bench.row()
        assert not bench.context.fleet.decode[0].up
    events = answer.split(b"\n\n")[:-1]
    assert events[:3] == [chat_event({"content": "x"})[:-2]] * 3
    assert len(events) == 4
    assert json.loads(events[3].removeprefix(b"data: "))["error"]["code"] == (504 if how == "silence" else 502)
    assert (row.status, row.finish_reason) == ("timeout" if how == "silence" else "upstream_error", None)
    assert (row.output_tokens, row.slo_met) == (3, False)


async def test_engine_error_event_is_relayed_and_journaled(tmp_path: Path) -> None:
    error = b'data: {"error":{"message":"out of memory","code":500}}\n\n'

    async def decode(request: StubRequest, out: Out) -> None:
        await out.head()
        await out.piece(chat_event({"content": "x"}) + error + DONE)
        await out.end()

    async with running(decode) as (d,), router_bench(tmp_path, [], [d]) as bench:
        assert await bench.stream(CHAT, chat_body(stream=True)) == chat_event({"content": "x"}) + error + DONE
        assert (await bench.row()).status == "upstream_error"


async def test_silent_decode_is_a_504(tmp_path: Path) -> None:
    async with running(silent_stream) as (d,), router_bench(tmp_path, [], [d], timeouts=SHORT) as bench:
        response = await bench.client.post(CHAT, json=chat_body(stream=True))
        row = await bench.row()
    assert (response.status_code, row.status, row.http_status) == (504, "timeout", 504)


async def test_no_decode_engine_is_a_503_and_a_suspect_is_tried_before(tmp_path: Path) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d], probes=NEVER) as bench:
        port = d.port
        await d.stop()
        for _ in range(2):
            response = await bench.client.post(CHAT, json=chat_body())
            assert (response.status_code, response.json()["error"]["code"]) == (503, 503)
        again = StubEngine(decode_engine, port=port)
        await again.start()
        assert (await bench.client.post(CHAT, json=chat_body())).status_code == 200
        await again.stop()
        rows = await bench.rows(3)
    assert [row.status for row in rows] == ["unavailable", "unavailable", "ok"]
    assert rows[0].executed is None


async def test_f12_connection_closed_while_idle_is_not_the_clients_trouble(tmp_path: Path) -> None:
    async def answer_and_close(request: StubRequest, out: Out) -> None:
        await decode_engine(request, out)
        # As a server whose keep-alive limit strikes just as the next request is on its way.
        asyncio.get_running_loop().call_later(0.02, out.cut)

    async with running(answer_and_close) as (d,), router_bench(tmp_path, [], [d]) as bench:
        for _ in range(20):
            assert (await bench.client.post(CHAT, json=chat_body())).status_code == 200
            await asyncio.sleep(0.02)
        assert bench.context.fleet.decode[0].failures == 0


BAD_BODIES: list[Any] = [b"", b"[1]", b'{"model": ', b'{"a": \xff}', b'{"a":' + b"[" * 100_000]


@pytest.mark.parametrize("body", BAD_BODIES)
async def test_bad_bodies_are_refused_with_one_row(tmp_path: Path, body: bytes) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        response = await bench.client.post(CHAT, content=body)
        row = await bench.row()
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert (row.status, row.http_status, row.fleet, row.executed) == ("client_error", 400, None, None)
    assert d.requests == []
