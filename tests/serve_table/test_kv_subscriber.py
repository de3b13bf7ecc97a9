"""The router follows KV events over ZeroMQ, whatever becomes of the messages and the engines."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvloop
import zmq
import zmq.asyncio
from kv_publisher import AllBlocksCleared, Publisher, publisher, removed, stored
from router_bench import CHAT, COMPLETIONS, Bench, chat_body, router_bench
from stub_engines import decode_engine, prefill_engine, running

from serve_table.context import RouterConfig
from serve_table.errors import ConfigError
from serve_table.kv_endpoint import KvEndpoint
from serve_table.kv_subscriber import KvSubscriber
from serve_table.kv_view import KvView
from serve_table.policy import policy
from serve_table.replay import redecide
from serve_table.token_chain import TokenChain

PREFIX = stored([1, 2], range(4))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not happen")


@asynccontextmanager
async def followed(live: str, replay: str | None = None) -> AsyncIterator[KvView]:
    views = {"http://engine": KvView("http://engine", b"salt")}
    subscriber = KvSubscriber({"http://engine": KvEndpoint(live, replay)}, views)
    subscriber.start()
    try:
        yield views["http://engine"]
    finally:
        await subscriber.stop()


async def until_connected(events: Publisher, known: KvView) -> None:
    """Publish until the subscription is there; messages before it are lost."""
    for _ in range(500):
        await events.send(AllBlocksCleared())
        await asyncio.sleep(0.01)
        if known.next_sequence == events.next_sequence:
            return
    raise AssertionError("no message arrives")


def cached(known: KvView) -> int:
    return known.blocks.cached_tokens(TokenChain(b"salt", range(5)))


async def test_live_messages_reach_the_view() -> None:
    async with publisher() as events, followed(events.live) as known:
        await until_connected(events, known)
        await events.send(PREFIX, removed(2))
        await until(lambda: cached(known) == 2)
        assert known.exact


async def test_a_late_router_asks_for_what_it_missed() -> None:
    async with publisher() as events:
        await events.send(PREFIX)
        await events.send(removed(2))
        async with followed(events.live, events.replay) as known:
            await until(lambda: known.exact)
            assert (cached(known), known.next_sequence, events.replays) == (2, 2, [0])


async def test_an_engine_that_has_sent_nothing_is_known_to_hold_nothing() -> None:
    async with publisher() as events, followed(events.live, events.replay) as known:
        await until(lambda: known.exact)
        assert (len(known.blocks), known.next_sequence) == (0, 0)


async def test_a_replay_that_begins_too_late_is_not_exact() -> None:
    async with publisher() as events:
        await events.send(removed(5))
        await events.send(PREFIX)
        events.buffer.pop(0)
        async with followed(events.live, events.replay) as known:
            await until(lambda: known.next_sequence == 2)
            assert (known.usable, known.complete, cached(known)) == (True, False, 4)


async def test_lost_messages_are_asked_for() -> None:
    async with publisher() as events, followed(events.live, events.replay) as known:
        await until_connected(events, known)
        await events.send(PREFIX, lost=True)
        await events.send(removed(2))
        await until(lambda: cached(known) == 2)
        await events.send(stored([7], [2, 3], parent=1))
        await until(lambda: cached(known) == 4)
        assert (known.exact, known.gaps, known.next_sequence) == (True, 1, events.next_sequence)


async def test_without_an_answer_to_a_replay_it_goes_on_with_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_table.kv_subscriber.REPLAY_WAIT_S", 0.05)
    async with publisher(answers_replay=False) as events, followed(events.live, events.replay) as known:
        await until_connected(events, known)
        await events.send(removed(9), lost=True)
        await events.send(PREFIX)
        await until(lambda: cached(known) == 4)
        assert (known.usable, known.exact, known.gaps) == (True, False, 1)


async def test_an_engine_that_restarts_is_followed_again() -> None:
    async with publisher() as events, followed(events.live, events.replay) as known:
        await until_connected(events, known)
        await events.send(PREFIX)
        await until(lambda: cached(known) == 4)
        events.close()
        async with publisher(events.ports) as again:
            for _ in range(500):
                await again.send(stored([7], [0, 1]))
                await asyncio.sleep(0.01)
                if cached(known) == 2:
                    break
            await until(lambda: known.next_sequence == again.next_sequence)
            assert (known.exact, cached(known)) == (True, 2)


async def test_engines_that_connect_to_their_subscriber_are_heard() -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as engine:
        async with followed(f"tcp://*:{port}") as known:
            engine.connect(f"tcp://127.0.0.1:{port}")
            for sequence in range(500):
                await engine.send_multipart([b"", sequence.to_bytes(8, "big"), b"\x92\xcb" + bytes(8) + b"\x90"])
                await asyncio.sleep(0.01)
                if known.usable:
                    break
            assert known.usable
            with pytest.raises(ConfigError, match=f"cannot take the KV events of u from tcp://\\*:{port}: Address"):
                KvSubscriber({"u": KvEndpoint(f"tcp://*:{port}")}, {"u": KvView("u", b"")})


def test_it_works_in_uvloop() -> None:
    async def follow() -> bool:
        async with publisher() as events:
            await events.send(PREFIX)
            async with followed(events.live, events.replay) as known:
                await until(lambda: known.exact)
                await until_connected(events, known)
                await events.send(PREFIX)
                await until(lambda: cached(known) == 4)
                return known.exact

    assert uvloop.run(follow())


async def test_without_pyzmq_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"KV events need the package 'pyzmq': install 'pd-rutter\[kv-events\]'"):
        KvSubscriber({}, {})


def test_serve_says_what_is_wrong_with_its_endpoints() -> None:
    words = ["serve", "--decode", "http://127.0.0.1:1", "http://127.0.0.1:2", "--decode-kv-events", "-"]
    done = subprocess.run([sys.executable, "-m", "pipelines.cli", *words], capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.decode().splitlines() == [
        "rutter: --decode-kv-events needs one endpoint for each of 2 engines, - for none: 1 given"
    ]


def test_two_engines_with_one_endpoint_are_refused() -> None:
    one = "tcp://h:1"
    with pytest.raises(ConfigError, match="two engines cannot have one endpoint"):
        RouterConfig((), ("http://a", "http://b"), decode_kv_events=(one, one))


@asynccontextmanager
async def router_with_events(tmp_path: Path, source: str) -> AsyncIterator[tuple[Bench, Publisher, Publisher]]:
    """A router before one engine of each role; `source`: whether both publish (events), or decode alone (mixed)."""
    async with (
        publisher() as p_events,
        publisher() as d_events,
        running(prefill_engine, decode_engine) as (p, d),
        router_bench(
            tmp_path,
            [p],
            [d],
            "least_loaded",
            explore=0.3,
            prefill_kv_events=(f"{p_events.live},{p_events.replay}" if source == "events" else "-",),
            decode_kv_events=(f"{d_events.live},{d_events.replay}",),
        ) as bench,
    ):
        await until(lambda: all(view.exact for view in bench.context.caches.views.values()))
        yield bench, p_events, d_events


@pytest.mark.parametrize("source", ["events", "mixed"])
async def test_f14_rows_say_the_exact_cached_tokens_and_decide_again(tmp_path: Path, source: str) -> None:
    prompt = list(range(100, 200))
    async with router_with_events(tmp_path, source) as (bench, p_events, d_events):
        await bench.client.post(COMPLETIONS, json={"model": "m", "prompt": prompt})
        await d_events.send(stored([1, 2, 3], prompt[:96]))
        await p_events.send(stored([1], prompt[:32]))
        views = bench.context.caches.views.values()
        await until(lambda: all(len(view.blocks) for view in views))
        await bench.client.post(COMPLETIONS, json={"model": "m", "prompt": prompt})
        await bench.client.post(COMPLETIONS, json={"model": "m", "prompt": prompt[:96]})
        await bench.client.post(COMPLETIONS, json={"model": "m", "prompt": prompt, "cache_salt": "mine"})
        await bench.client.post(COMPLETIONS, json={"model": "m", "prompt": prompt, "truncate_prompt_tokens": 5})
        await bench.client.post(CHAT, json=chat_body())
        rows = sorted(await bench.rows(6), key=lambda row: row.rotation)
        metrics = bench.context.metrics.text().decode()
    seen = [row.fleet.decode_cached_tokens[0] for row in rows if row.fleet is not None]
    assert seen[:4] == [0.0, 96.0, 64.0, 0.0]
    assert [row.cached_tokens_source for row in rows] == [source] * 4 + ["index"] * 2
    if source == "events":
        assert [row.fleet.prefill_cached_tokens[0] for row in rows if row.fleet is not None][:4] == [0.0, 32.0, 32.0, 0]
    least_loaded = policy("least_loaded")
    for row in rows:
        made = redecide(row, least_loaded)
        assert (made.propensity, made.decode) == (row.propensity, 0)
    assert f'rutter_kv_blocks{{engine="{rows[0].decode_engines[0]}"}} 3.0' in metrics
    assert f'rutter_kv_events_total{{engine="{rows[0].decode_engines[0]}"}} 1.0' in metrics
    assert f'rutter_kv_event_gaps_total{{engine="{rows[0].decode_engines[0]}"}} 0.0' in metrics
    assert f'rutter_kv_exact{{engine="{rows[0].decode_engines[0]}"}} 1.0' in metrics


async def test_a_failed_engine_is_not_believed_to_hold_anything(tmp_path: Path) -> None:
    prompt = list(range(100, 200))
    async with router_with_events(tmp_path, "events") as (bench, _, d_events):
        await d_events.send(stored([1, 2, 3], prompt[:96]))
        (url,) = (engine.url for engine in bench.context.fleet.decode)
        view = bench.context.caches.views[url]
        await until(lambda: len(view.blocks) == 3)
        bench.context.caches.forget(url)
        await bench.client.post(COMPLETIONS, json={"model": "m", "prompt": prompt})
        await d_events.send(removed(3))
        await until(lambda: view.exact)
        await bench.client.post(COMPLETIONS, json={"model": "m", "prompt": prompt})
        rows = await bench.rows(2)
    assert [row.fleet.decode_cached_tokens[0] for row in rows if row.fleet is not None] == [0.0, 64.0]
    assert [row.cached_tokens_source for row in rows] == ["mixed", "events"]


async def test_garbage_from_a_publisher_fails_no_request(tmp_path: Path) -> None:
    async with router_with_events(tmp_path, "events") as (bench, p_events, d_events):
        for events in (p_events, d_events):
            await events.send_raw(b"\xff garbage")
        views = bench.context.caches.views.values()
        await until(lambda: all(view.refused for view in views))
        response = await bench.client.post(COMPLETIONS, json={"model": "m", "prompt": list(range(100))})
        row = await bench.row()
    assert (response.status_code, row.status, row.cached_tokens_source) == (httpx.codes.OK, "ok", "index")
