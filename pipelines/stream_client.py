"""A client that costs little beside what it measures: it counts the events of streams and the time to the first."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

import msgspec

from pipelines.idle_answers import MODEL, n_events
from serve_table.errors import RunError

PATH = "/v1/chat/completions"
END_OF_BODY = b"\r\n0\r\n\r\n"
ANSWER_LIMIT_S = 10.0


@dataclass(frozen=True)
class Counted:
    """A stretch of a load. cpu_s: what the server took for it."""

    events: int
    requests: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class StreamKind:
    """What is asked for. pace_s: between events; 0: as fast as they are taken."""

    n_tokens: int
    pace_s: float = 0.0
    prompt_bytes: int = 800

    def request(self, number: int, authority: str) -> bytes:
        """A request whose prompt begins like that of no other number."""
        text = f"{number:09d} " + "w " * (self.prompt_bytes // 2)
        fields = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": self.n_tokens}
        body = msgspec.json.encode({**fields, "stream": True, **({"pace_s": self.pace_s} if self.pace_s else {})})
        lines = (f"POST {PATH} HTTP/1.1", f"host: {authority}", "content-type: application/json")
        return "\r\n".join((*lines, f"content-length: {len(body)}", "", "")).encode() + body


class StreamConnection(asyncio.Protocol):
    """One connection, one stream at a time. expected: events of a stream. ended: called after each."""

    def __init__(self, expected: int, ended: Callable[["StreamConnection"], None]) -> None:
        self.events = 0
        self.first_event_s: float | None = None
        self.failure: str | None = None
        self.busy = False
        self._expected = expected
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self._in_body = False
        self._tail = b""

    def send(self, request: bytes) -> None:
        self.events = 0
        self.first_event_s = None
        self.busy = True
        self._in_body = False
        self._head = b""
        self._tail = b""
        if self._transport is None or self._transport.is_closing():
            self._fail("the connection was closed between two streams")
        else:
            self._transport.write(request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self.busy:
            self._fail(f"the connection was lost within a stream ({error or 'closed by the server'})")

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            data = self._body_of(data)
            if not data:
                return
        # What two reads have cut through is seen with the end of the one before.
        joined = self._tail + data
        if self.first_event_s is None and b"data:" in joined:
            self.first_event_s = time.monotonic()
        self.events += joined.count(b"\n\n") - self._tail.count(b"\n\n")
        self._tail = joined[-len(END_OF_BODY) :]
        if self._tail == END_OF_BODY:
            self._end()

    def _body_of(self, data: bytes) -> bytes:
        """What of this is body; the head is checked once it is complete."""
        self._head += data
        head, found, body = self._head.partition(b"\r\n\r\n")
        if not found:
            return b""
        if not head.startswith(b"HTTP/1.1 200 ") or b"transfer-encoding: chunked" not in head.lower():
            self._fail(f"was answered with {head[:60]!r} {body[:200]!r}")
            return b""
        self._in_body = True
        return body

    def _end(self) -> None:
        if self.events != self._expected:
            self._fail(f"a stream had {self.events} events instead of {self._expected}")
            return
        self.busy = False
        self._ended(self)

    def _fail(self, failure: str) -> None:
        if self.failure is None:
            self.failure = failure
            self.busy = False
            self._ended(self)
            self.close()


class StreamLoad:
    """So many streams at a time to one server, each followed by the next at once; a context manager."""

    def __init__(self, url: str, n_streams: int, kind: StreamKind) -> None:
        parts = urlsplit(url)
        self._address = (str(parts.hostname), int(parts.port or 80))
        self.requests = 0
        self._url = url
        self._n_streams = n_streams
        self._kind = kind
        self._sent = 0
        self._ended_events = 0
        self._connections: list[StreamConnection] = []
        self._going = True
        self._idle = asyncio.Event()
        self._failure: str | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        expected = n_events(self._kind.n_tokens)
        try:
            for _ in range(self._n_streams):
                _, connection = await loop.create_connection(
                    lambda: StreamConnection(expected, self._next), *self._address
                )
                self._connections.append(connection)
        except OSError as error:
            raise RunError(f"{self._url} cannot be reached: {error.strerror}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        await asyncio.sleep(0)  # the loop closes what was aborted

    def _request(self) -> bytes:
        self._sent += 1
        return self._kind.request(self._sent, f"{self._address[0]}:{self._address[1]}")

    @property
    def events(self) -> int:
        return self._ended_events + sum(one.events for one in self._connections if one.busy)

    async def run(self, warm_s: float, measured_s: float, cpu_s: Callable[[], float]) -> Counted:
        """Load the server, count for a while what comes, let the open streams end. cpu_s: sampled at both ends.

        Raises RunError where a stream fails.
        """
        for connection in self._connections:
            connection.send(self._request())
        await self._wait(warm_s)
        events, requests, cpu, began_s = self.events, self.requests, cpu_s(), time.monotonic()
        await self._wait(measured_s)
        wall_s = time.monotonic() - began_s
        counted = Counted(self.events - events, self.requests - requests, wall_s, cpu_s() - cpu)
        self._going = False
        await self._wait(ANSWER_LIMIT_S)
        if any(one.busy for one in self._connections):
            raise RunError(f"{self._url}: a stream did not end within {ANSWER_LIMIT_S:.0f} s")
        return counted

    async def first_event_s(self) -> float:
        """Time to the first event of one stream, which is let end. Of a load of one stream."""
        (connection,) = self._connections
        began_s = time.monotonic()
        self._going = False
        self._idle.clear()
        connection.send(self._request())
        await self._wait(ANSWER_LIMIT_S)
        if connection.first_event_s is None:
            raise RunError(f"{self._url}: no event came within {ANSWER_LIMIT_S:.0f} s")
        return connection.first_event_s - began_s

    async def _wait(self, limit_s: float) -> None:
        """Until nothing is under way any more, or so long."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        if self._failure is not None:
            raise RunError(f"{self._url}: {self._failure}")

    def _next(self, connection: StreamConnection) -> None:
        self._ended_events += connection.events
        if connection.failure is not None:
            self._failure = connection.failure
            self._idle.set()
            return
        self.requests += 1
        if self._going:
            connection.send(self._request())
        elif not any(one.busy for one in self._connections):
            self._idle.set()
