"""The client towards engines: framing, reuse, and every way an engine can break it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from serve_table.engine_client import EngineAddress, EngineClient
from serve_table.engine_response import EngineTimeouts
from serve_table.errors import ConfigError, EngineProtocolError, EngineTimeoutError, EngineUnreachableError

LIMITS = EngineTimeouts(connect_s=1.0, first_byte_s=0.2, gap_s=0.1)
Server = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[tuple[EngineClient, list[int]]]:
    """A client of a raw server, and the number of its connections."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        try:
            await server(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = EngineClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", LIMITS)
    try:
        yield client, connections
    finally:
        client.close()
        listener.close()
        await asyncio.sleep(0.01)


def replies(*parts: bytes, pause_s: float = 0.0, hold_s: float = 0.0) -> Server:
    """Answer every request with these parts; then hold the connection for that long before closing it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause_s)
            if hold_s:
                await asyncio.sleep(hold_s)
                return

    return serve


async def get(client: EngineClient, fresh: bool = False) -> tuple[int, bytes]:
    response = await client.request("GET", "/x", [], b"", LIMITS, fresh)
    try:
        return response.status, await response.body()
    finally:
        response.close()


WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKED = HEAD + b"1\r\no\r\n1\r\nk\r\n0\r\n\r\n"


@pytest.mark.parametrize("reply", [WHOLE, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE])
async def test_connections_are_reused_unless_a_fresh_one_is_asked_for(reply: bytes) -> None:
    async with client_of(replies(reply)) as (client, connections):
        for _ in range(3):
            assert await get(client) == (200, b"ok")
        assert len(connections) == 1
        assert await get(client, fresh=True) == (200, b"ok")
        assert len(connections) == 2


async def test_an_answer_may_end_with_its_connection() -> None:
    async with client_of(replies(b"HTTP/1.1 200 OK\r\n\r\nok", hold_s=0.01)) as (client, connections):
        assert await get(client) == (200, b"ok")
        assert await get(client) == (200, b"ok")
        assert len(connections) == 2


async def test_connection_close_is_obeyed() -> None:
    async with client_of(replies(WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))) as (
        client,
        connections,
    ):
        for _ in range(2):
            await get(client)
        assert len(connections) == 2


BREAKS = {
    "not http": (replies(b"SSH-2.0-OpenSSH\r\n\r\n", hold_s=1.0), "did not answer in HTTP"),
    "closed at once": (replies(b"", hold_s=0.01), "before its answer was complete"),
    "half a head": (replies(b"HTTP/1.1 200", hold_s=0.01), "before its answer was complete"),
    "half a body": (replies(WHOLE[:-1], hold_s=0.01), "before its answer was complete"),
    "half a chunk": (replies(CHUNKED[:-9], hold_s=0.01), "before its answer was complete"),
}


@pytest.mark.parametrize("kind", BREAKS)
async def test_broken_answers_are_errors(kind: str) -> None:
    server, message = BREAKS[kind]
    async with client_of(server) as (client, _):
        with pytest.raises(EngineProtocolError, match=message):
            await get(client)


@pytest.mark.parametrize(
    ("server", "message", "limit_s"),
    [
        (replies(b"", hold_s=5.0), "did not answer within 0.2 s", 0.2),
        (replies(WHOLE[:-2], hold_s=5.0), "did not answer within 0.2 s", 0.2),
        (replies(WHOLE[:-1], hold_s=5.0), "sent nothing more within 0.1 s", 0.1),
    ],
)
async def test_silence_ends_at_its_limit(server: Server, message: str, limit_s: float) -> None:
    async with client_of(server) as (client, _):
        began_s = time.monotonic()
        with pytest.raises(EngineTimeoutError, match=message):
            await get(client)
        assert limit_s <= time.monotonic() - began_s < limit_s + 2.0


async def test_a_slow_but_steady_answer_is_no_timeout() -> None:
    parts = [HEAD, *[b"1\r\nx\r\n"] * 8, b"0\r\n\r\n"]
    async with client_of(replies(*parts, pause_s=0.05)) as (client, _):
        assert (await get(client))[1].endswith(b"x" * 8)


async def test_unasked_bytes_spoil_a_connection() -> None:
    async with client_of(replies(WHOLE + WHOLE)) as (client, connections):
        for _ in range(2):
            assert await get(client) == (200, b"ok")
        assert len(connections) == 2


async def test_nothing_there_is_unreachable() -> None:
    async with client_of(replies(WHOLE)) as (client, _):
        pass
    with pytest.raises(EngineUnreachableError, match="cannot be reached"):
        await get(client)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:1", EngineAddress("h", 1, False, "")),
        ("http://h/", EngineAddress("h", 80, False, "")),
        ("https://h", EngineAddress("h", 443, True, "")),
        ("http://h:1/v1", EngineAddress("h", 1, False, "")),
        ("http://h:1/x/y/", EngineAddress("h", 1, False, "/x/y")),
        ("http://[::1]:8000", EngineAddress("::1", 8000, False, "")),
    ],
)
def test_addresses(url: str, address: EngineAddress) -> None:
    assert EngineAddress.parse(url) == address


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", "http://h:99999", "http://h:1?x=1", "http://h:1#x"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="engine URL"):
        EngineAddress.parse(url)
