"""One engine's answer to one request, read as it arrives."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import httptools

from serve_table.errors import EngineProtocolError, EngineTimeoutError

Headers = list[tuple[bytes, bytes]]

BUFFER_LIMIT_BYTES = 64 * 1024


@dataclass(frozen=True)
class EngineTimeouts:
    """Wall seconds. first_byte_s: until the first byte of the answer's body; gap_s: between two reads after it."""

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    gap_s: float = 300.0


class Connection(Protocol):
    """What an answer needs of the connection that it arrives on."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def finished(self, reusable: bool) -> None: ...
    def abort(self) -> None: ...


class EngineResponse:
    """Status, headers and body of one answer.

    `head` and `chunk` raise EngineTimeoutError and EngineProtocolError. Reading from the engine pauses while more
    than BUFFER_LIMIT_BYTES wait for the caller. `close` must be called in the end, whatever happened: it gives a
    connection whose answer is complete back to the pool and cuts any other, so that the engine stops working.
    """

    def __init__(self, connection: Connection, url: str, timeouts: EngineTimeouts) -> None:
        self.status = 0
        self.headers: Headers = []
        self.received_any = False
        self.sent_s = time.monotonic()
        self._connection: Connection | None = connection
        self._url = url
        self._timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._head_done = False
        self._body_begun = False
        self._framed = False
        self._keep_alive = False
        self._complete = False
        self._surplus = False
        self._error: Exception | None = None
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since_s = self._loop.time()
        self._timer = self._loop.call_later(min(timeouts.first_byte_s, timeouts.gap_s), self._check_timeout)

    async def head(self) -> None:
        """Wait for status and headers."""
        while not self._head_done:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def chunk(self) -> bytes:
        """What arrived since the last call, waiting for something; b"" at the end of the answer."""
        chunks = self._chunks
        while not chunks:
            if self._complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        data = chunks.popleft()
        if chunks:
            data += b"".join(chunks)
            chunks.clear()
        self._buffered_bytes = 0
        if self._paused and self._connection is not None:
            self._paused = False
            self._connection.resume_reading()
        return data

    async def body(self) -> bytes:
        """The whole rest of the answer."""
        parts = []
        while data := await self.chunk():
            parts.append(data)
        return b"".join(parts)

    def header(self, name: bytes) -> bytes | None:
        """The first header of this lower-case name."""
        return next((value for key, value in self.headers if key == name), None)

    def close(self) -> None:
        """Give the connection back, or cut it where the answer is not complete."""
        self._timer.cancel()
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._paused:
            connection.resume_reading()
        if self._complete and self._error is None:
            connection.finished(self._keep_alive and not self._surplus)
        else:
            connection.abort()

    # Called by the connection.

    def feed(self, data: bytes) -> None:
        self.received_any = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(EngineProtocolError(f"{self._url} did not answer in HTTP: {error}"))
        if self._buffered_bytes > BUFFER_LIMIT_BYTES and not self._paused and self._connection is not None:
            self._paused = True
            self._connection.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._connection = None
        if self._head_done and not self._framed and error is None:
            # Neither a length nor chunks: the end of the connection is the end of the answer.
            self._complete = True
            self._wake()
        else:
            self.fail(EngineProtocolError(f"{self._url} closed the connection before its answer was complete"))

    def fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    # Called by httptools.

    def on_message_begin(self) -> None:
        # A second answer that nobody asked for: the connection cannot be trusted with another request.
        self._surplus = self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._surplus:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._surplus:
            return
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
            # Asked here, since the parser forgets the head once the message is complete.
            self._keep_alive = self._framed and self._parser.should_keep_alive()
            self._head_done = True
            self._wake()

    def on_body(self, data: bytes) -> None:
        if self._surplus:
            return
        self._body_begun = True
        self._chunks.append(data)
        self._buffered_bytes += len(data)
        self._wake()

    def on_message_complete(self) -> None:
        if self.status < 200:  # an interim answer: the real one follows
            self.headers = []
            return
        self._complete = True
        self._wake()

    async def _wait(self) -> None:
        if self._body_begun:
            self._waiting_since_s = self._loop.time()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_timeout(self) -> None:
        """One timer an answer that looks now and then: a timer for each read would cost more than the read."""
        limit_s = self._timeouts.gap_s if self._body_begun else self._timeouts.first_byte_s
        waited_s = self._loop.time() - self._waiting_since_s if self._waiter is not None else 0.0
        if waited_s < limit_s:
            again_s = min(self._timeouts.first_byte_s, self._timeouts.gap_s, limit_s - waited_s)
            self._timer = self._loop.call_later(again_s, self._check_timeout)
            return
        what = "sent nothing more" if self._body_begun else "did not answer"
        self.fail(EngineTimeoutError(f"{self._url} {what} within {limit_s:g} s"))
