"""HTTP/1.1 towards one engine: a small client on asyncio's protocols and httptools, with a keep-alive pool.

It exists for speed: an event of a stream costs one wake-up here and one write at the client's side.
"""

import asyncio
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from serve_table.engine_response import EngineResponse, EngineTimeouts, Headers
from serve_table.errors import ConfigError, EngineProtocolError, EngineUnreachableError

# Below the 5 s after which uvicorn closes idle connections, so that a pooled one is seldom a dead one.
IDLE_LIMIT_S = 3.0
MAX_IDLE_CONNECTIONS = 256


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine is. base_path is put before every path; `/v1` at its end is left out, since paths have it."""

    host: str
    port: int
    tls: bool
    base_path: str

    @staticmethod
    def parse(url: str) -> "EngineAddress":
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"engine URL {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"engine URL {url!r}: must look like http://HOST:PORT, with or without a path")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return EngineAddress(parts.hostname, port or (443 if tls else 80), tls, path)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class EngineConnection(asyncio.Protocol):
    """One connection; it carries one answer at a time."""

    def __init__(self, client: "EngineClient") -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._response: EngineResponse | None = None
        self.idle_since_s = 0.0

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, timeouts: EngineTimeouts) -> EngineResponse:
        self._response = EngineResponse(self, self._client.url, timeouts)
        if self._transport is not None:
            self._transport.write(request)
        return self._response

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._response is not None:
            self._response.feed(data)
        else:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._client.forget(self)
        if self._response is not None:
            self._response.connection_lost(exc)

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.usable and self._transport is not None:
            self._transport.resume_reading()

    def finished(self, reusable: bool) -> None:
        self._response = None
        if reusable and self.usable:
            self._client.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        self._response = None
        if self._transport is not None:
            self._transport.abort()


class EngineClient:
    """The connections to one engine. key: what is shown to it as `Authorization` with every request."""

    def __init__(self, url: str, timeouts: EngineTimeouts, key: bytes | None = None) -> None:
        self.url = url
        self._key = key
        self.timeouts = timeouts
        self.address = EngineAddress.parse(url)
        self._tls = ssl.create_default_context() if self.address.tls else None
        self._idle: list[EngineConnection] = []

    async def request(
        self, method: str, path: str, headers: Headers, body: bytes, timeouts: EngineTimeouts, fresh: bool = False
    ) -> EngineResponse:
        """Send a request and wait for the head of its answer, which the caller must `close`.

        A pooled connection that breaks before the first byte of an answer was closed while idle, so the request
        is sent once more on a new one. fresh: never on a pooled one, for requests that must not be sent twice.
        Raises EngineUnreachableError, EngineTimeoutError and EngineProtocolError.
        """
        request = self._encoded(method, path, headers, body)
        pooled = None if fresh else self._take()
        if pooled is not None:
            response = pooled.send(request, timeouts)
            try:
                return self._taken(await _with_head(response))
            except EngineProtocolError:
                if response.received_any:
                    raise
        connection = await self._connect(timeouts.connect_s)
        return self._taken(await _with_head(connection.send(request, timeouts)))

    def _taken(self, response: EngineResponse) -> EngineResponse:
        """An answer that is one to the client. A refusal of the router's own key is none of the client's doing."""
        if self._key is not None and response.status == 401:
            response.close()
            raise EngineProtocolError(f"{self.url} refuses the router's key: give the one it knows with --engine-key")
        return response

    def _encoded(self, method: str, path: str, headers: Headers, body: bytes) -> bytes:
        lines = [f"{method} {self.address.base_path}{path} HTTP/1.1\r\nhost: {self.address.authority}\r\n".encode()]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        if self._key is not None:
            lines += (b"authorization: Bearer ", self._key, b"\r\n")
        if body or method == "POST":
            lines.append(b"content-length: %d\r\n" % len(body))
        lines += (b"\r\n", body)
        return b"".join(lines)

    async def _connect(self, limit_s: float) -> EngineConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(self), self.address.host, self.address.port, ssl=self._tls
                )
        except TimeoutError as error:
            raise EngineUnreachableError(f"{self.url} took no connection within {limit_s:g} s") from error
        except OSError as error:
            raise EngineUnreachableError(f"{self.url} cannot be reached: {error.strerror or error}") from error
        return connection

    def _take(self) -> EngineConnection | None:
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now_s - connection.idle_since_s < IDLE_LIMIT_S:
                return connection
            connection.abort()
        return None

    def keep(self, connection: EngineConnection) -> None:
        """Take a connection back into the pool."""
        now_s = asyncio.get_running_loop().time()
        connection.idle_since_s = now_s
        while self._idle and (
            len(self._idle) >= MAX_IDLE_CONNECTIONS or now_s - self._idle[0].idle_since_s > IDLE_LIMIT_S
        ):
            self._idle.pop(0).abort()
        self._idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """Called when a connection is gone."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the idle connections."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()


async def _with_head(response: EngineResponse) -> EngineResponse:
    try:
        await response.head()
    except BaseException:
        response.close()
        raise
    return response
