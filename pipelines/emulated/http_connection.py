"""HTTP/1.1 as the emulated engines speak it: one protocol object a connection, written to straight from a step.

No task wakes for a token: at saturation six engines share two cores with the router and the load generator.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import httptools

BODY_LIMIT_BYTES = 64 * 1024 * 1024
# uvicorn's, which vLLM leaves as it is.
KEEP_ALIVE_S = 5.0
JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
END_OF_STREAM = b"0\r\n\r\n"


@dataclass(frozen=True)
class HttpRequest:
    """One request; header names in lower case, the last of equal ones kept."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


class HttpConnection(asyncio.Protocol):
    """One client's connection. Requests are handed to `handle` one at a time.

    `handle` or what it starts answers with `respond`, or with `begin_stream`, `write` and `end_stream`. A request
    whose client leaves before its answer is complete calls `on_disconnect`.
    """

    def __init__(
        self, handle: Callable[[HttpRequest, "HttpConnection"], None], connections: "set[HttpConnection]"
    ) -> None:
        self.on_disconnect: Callable[[], None] | None = None
        self._handle = handle
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[HttpRequest, bool]] = deque()
        self._answering = False
        self._keep_alive = True
        self._bodiless = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._new_message()

    def _new_message(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0

    # The answer.

    def respond(self, status: int, body: bytes, content_type: bytes = JSON) -> None:
        """Answer as a whole."""
        head = b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n" % (
            status,
            HTTPStatus(status).phrase.encode(),
            content_type,
            len(body),
        )
        closing = b"\r\n" if self._keep_alive else b"connection: close\r\n\r\n"
        self.write(head + closing + (b"" if self._bodiless else body))
        self._answered()

    def begin_stream(self) -> None:
        """Send the head of an answer whose chunks follow."""
        closing = b"" if self._keep_alive else b"connection: close\r\n"
        framing = b"\r\ntransfer-encoding: chunked\r\n"
        self.write(b"HTTP/1.1 200 OK\r\ncontent-type: " + EVENT_STREAM + framing + closing + b"\r\n")

    def write(self, data: bytes) -> None:
        """Bytes as they are; nothing where the client is gone."""
        if self._transport is not None:
            self._transport.write(data)

    def end_stream(self, last: bytes) -> None:
        """The last chunks of a stream, framed, and its end."""
        self.write(last + END_OF_STREAM)
        self._answered()

    def close(self) -> None:
        """Close after what is written."""
        if self._transport is not None:
            self._transport.close()

    def _answered(self) -> None:
        self.on_disconnect = None
        self._answering = False
        if not self._keep_alive:
            self.close()
        elif self._waiting:
            self._dispatch(*self._waiting.popleft())
        elif self._transport is not None:
            self._idle_timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self.close)

    def _dispatch(self, request: HttpRequest, keep_alive: bool) -> None:
        self._answering = True
        self._keep_alive = keep_alive
        self._bodiless = request.method == "HEAD"
        self._handle(request, self)

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._connections.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)
        self._waiting.clear()
        self._stop_idle_timer()
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        if on_disconnect is not None:
            on_disconnect()

    def data_received(self, data: bytes) -> None:
        self._stop_idle_timer()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse(400, b"Invalid HTTP request received.")

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _refuse(self, status: int, message: bytes) -> None:
        """Answer what is no usable request, and close; an answer under way is cut."""
        self._keep_alive = False
        if self._answering:
            self.close()
        else:
            self._answering = True
            self.respond(status, message, b"text/plain; charset=utf-8")

    # Called by httptools.

    def on_message_begin(self) -> None:
        self._new_message()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._headers.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes <= BODY_LIMIT_BYTES:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._body_bytes > BODY_LIMIT_BYTES:
            self._refuse(413, b"Request body too large.")
            return
        request = HttpRequest(
            method=self._parser.get_method().decode("latin-1"),
            path=self._url.partition(b"?")[0].decode("latin-1"),
            headers=self._headers,
            body=b"".join(self._body),
        )
        keep_alive = self._parser.should_keep_alive()
        if self._answering:
            self._waiting.append((request, keep_alive))
        else:
            self._dispatch(request, keep_alive)
