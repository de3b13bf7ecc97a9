"""The client's side of a request: its body, and the moment it leaves."""

import asyncio
from types import TracebackType

from serve_table.errors import RequestError
from serve_table.relay import Receive


class ClientLeftError(Exception):
    """The client closed its connection before its request was complete."""


async def read_body(receive: Receive, limit_bytes: int) -> bytes:
    """The whole body. RequestError (413) above the limit; ClientLeftError where the client goes."""
    parts = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise RequestError(413, f"the body has more than {limit_bytes} bytes (--max-body-bytes)")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts) if len(parts) > 1 else part


class ClientWatch:
    """Cancels the block that it guards when the client leaves; `left` then says so and the block just ends.

    Enter it once the body has been read: from then on nothing but the disconnect can come from the client.
    """

    def __init__(self, receive: Receive) -> None:
        self.left = False
        self._receive = receive
        self._guarded: asyncio.Task[object] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ClientWatch":
        self._guarded = asyncio.current_task()
        self._watch = asyncio.create_task(self._wait())
        return self

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True
        if self._guarded is not None:
            self._guarded.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self._watch is not None:
            self._watch.cancel()
        if not self.left or self._guarded is None:
            return False
        # Another cancellation may have come on top of ours: the server is going down.
        remaining = self._guarded.uncancel()
        return kind is not None and issubclass(kind, asyncio.CancelledError) and remaining == 0
