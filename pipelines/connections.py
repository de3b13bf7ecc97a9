"""Connections of the load generator: an httpx transport that parses with httptools.

httpx's own transport parses in Python and looks through all its connections for each request, which on a busy
core makes the generator late. This one has no limit to its connections and finds an idle one at once.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator

import httptools
import httpx

ON_SENT = "rutter_on_sent"
"""A request extension: called with nothing just before the first byte of the request is written."""

Address = tuple[str, str, int]
"""Scheme, host, port."""


class OpenLoopTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 with as many connections as there are requests at once; idle ones are used again, newest first.

    keepalive_s: an idle connection is given up after it. Failures are raised as httpx.TransportError.
    """

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._idle: dict[Address, list[_Connection]] = {}
        self._ssl: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        address = (url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))
        connection = self._take_idle(address) or await self._connect(address, request)
        body = b"".join([part async for part in request.stream])  # type: ignore[union-attr]  # an async client's
        head = b"".join(b"%s: %s\r\n" % header for header in request.headers.raw)
        if on_sent := request.extensions.get(ON_SENT):
            on_sent()
        try:
            # One write for head and body: two small packets would wait for a delayed acknowledgement.
            connection.send(b"%s %s HTTP/1.1\r\n%s\r\n%s" % (request.method.encode(), url.raw_path, head, body))
            await connection.response_head()
        except httpx.TransportError as error:
            connection.close()
            error.request = request
            raise
        except BaseException:  # a cancelled request leaves its answer behind: the connection is of no further use
            connection.close()
            raise
        stream = _Body(self, address, connection)
        return httpx.Response(connection.status, headers=connection.headers, stream=stream)

    async def _connect(self, address: Address, request: httpx.Request) -> "_Connection":
        scheme, host, port = address
        if scheme == "https" and self._ssl is None:
            self._ssl = httpx.create_ssl_context(trust_env=False)
        context = self._ssl if scheme == "https" else None
        try:
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, port, ssl=context)
        except (OSError, UnicodeError) as error:  # the latter for a host that is no name
            raise httpx.ConnectError(str(error), request=request) from error
        return connection

    def _take_idle(self, address: Address) -> "_Connection | None":
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if connection.usable and time.monotonic() - connection.idle_since_s < self._keepalive_s:
                return connection
            connection.close()
        return None

    def release(self, address: Address, connection: "_Connection") -> None:
        """Keep a connection whose answer was read to its end; close any other."""
        if connection.usable and connection.complete:
            connection.idle_since_s = time.monotonic()
            self._idle.setdefault(address, []).append(connection)
        else:
            connection.close()

    async def aclose(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()


class _Body(httpx.AsyncByteStream):
    def __init__(self, transport: OpenLoopTransport, address: Address, connection: "_Connection") -> None:
        self._transport = transport
        self._address = address
        self._connection: _Connection | None = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        connection = self._connection
        while connection is not None and (data := await connection.read()):
            yield data

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.release(self._address, connection)


class _Connection(asyncio.Protocol):
    """One socket and the one answer under way on it."""

    def __init__(self) -> None:
        self.idle_since_s = 0.0
        self._closed = False
        self._error: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False
        self._keep_alive = False
        self._parts: list[bytes] = []

    @property
    def usable(self) -> bool:
        return not self._closed and self._error is None and (self._keep_alive or self.status == 0)

    def send(self, data: bytes) -> None:
        self._reset()
        self._transport.write(data)

    async def response_head(self) -> None:
        while self.status == 0:
            await self._more()

    async def read(self) -> bytes:
        """What has come of the body; empty at its end."""
        while not self._parts and not self.complete:
            await self._more()
        data = b"".join(self._parts)
        self._parts.clear()
        return data

    async def _more(self) -> None:
        """Wait for news; httpx.TransportError where none can come any more."""
        if self._error is not None:
            raise httpx.RemoteProtocolError(self._error)
        if self._closed:
            raise httpx.RemoteProtocolError("the server closed the connection before the end of its answer")
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        self._closed = True
        self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # a stream's

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._error = f"the answer is not HTTP: {error}"
            self._transport.close()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if exc is not None and self._error is None:
            self._error = f"the connection broke: {exc}"
        names = {name.lower() for name, _ in self.headers}
        if self.status and self._error is None and not names & {b"content-length", b"transfer-encoding"}:
            self.complete = True  # an answer without framing ends with its connection
        self._wake()

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self.complete = True
        self._keep_alive = self._parser.should_keep_alive()
