"""Subscriptions to the engines' KV events: ZeroMQ sockets in the router's event loop."""

import asyncio
import logging
from typing import TYPE_CHECKING

from serve_table.errors import ConfigError, KvEventError
from serve_table.kv_endpoint import KvEndpoint
from serve_table.kv_event import EventDecoder
from serve_table.kv_view import KvView

if TYPE_CHECKING:
    import zmq.asyncio

logger = logging.getLogger("rutter")

END_OF_REPLAY = -1
REPLAY_WAIT_S = 5.0
"""For each message; vLLM's publisher looks for requests ten times a second."""
REPLAY_TRIES = 5
MAX_QUEUED_MESSAGES = 10_000
MAX_MESSAGE_BYTES = 64 * 2**20
HEARTBEAT_MS = 10_000
"""Finds a connection whose other end is gone without a word."""


class KvSubscriber:
    """Follows the events of the engines given, each into its view. Raises ConfigError where it cannot listen."""

    def __init__(self, endpoints: dict[str, KvEndpoint], views: dict[str, KvView]) -> None:
        try:
            import zmq
            import zmq.asyncio
        except ImportError as error:
            raise ConfigError("KV events need the package 'pyzmq': install 'pd-rutter[kv-events]'") from error
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []
        self._followers: list[_Follower] = []
        for url, endpoint in endpoints.items():
            live = self._context.socket(zmq.SUB)
            live.set(zmq.SUBSCRIBE, b"")
            live.set(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
            live.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            live.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            live.set(zmq.IPV6, 1)
            self._followers.append(_Follower(self._context, live, endpoint.replay, views[url]))
            try:
                live.bind(endpoint.live) if endpoint.is_listened_on else live.connect(endpoint.live)
            except zmq.ZMQError as error:
                self.close()
                raise ConfigError(f"cannot take the KV events of {url} from {endpoint.live}: {error}") from error

    def start(self) -> None:
        """Begin to follow, in the running loop."""
        self._tasks = [asyncio.create_task(follower.run()) for follower in self._followers]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.close()

    def close(self) -> None:
        """Close all sockets; nothing is waited for."""
        self._context.destroy(linger=0)


class _Follower:
    """One engine's messages on their way into its view."""

    def __init__(
        self, context: "zmq.asyncio.Context", live: "zmq.asyncio.Socket", replay: str | None, view: KvView
    ) -> None:
        self._context = context
        self._live = live
        self._replay = replay
        self._view = view
        self._decoder = EventDecoder()
        self._heard: int | None = None
        """Number of the last live message."""

    async def run(self) -> None:
        """Follow for ever. Whatever fails ends with a view that is not used, never with a failed request."""
        import zmq

        try:
            if self._replay is not None:
                await self._catch_up(self._replay)
            while True:
                parts = await self._live.recv_multipart()
                try:
                    sequence, payload = self._decoder.message(parts)
                except KvEventError as error:
                    self._view.refuse(str(error))
                    continue
                await self._take(sequence, payload)
                # A full queue is read without a wait: let requests have their turn.
                await asyncio.sleep(0)
        except zmq.ZMQError as error:
            self._view.refuse(str(error))

    async def _take(self, sequence: int, payload: bytes) -> None:
        if self._replay is not None and not self._view.follows(sequence) and not self._was_replayed(sequence):
            await self._catch_up(self._replay)
            self._heard = None
        repeated = self._was_replayed(sequence)
        self._heard = sequence
        if not repeated:
            self._view.receive(sequence, payload)

    def _was_replayed(self, sequence: int) -> bool:
        """Whether a message came before by replay. 0 is always taken: it may be a new engine's, and if it is not,
        all that follows it is still to come."""
        last = self._view.next_sequence
        in_order = self._heard is None or sequence > self._heard
        return sequence > 0 and in_order and last is not None and sequence < last

    async def _catch_up(self, replay: str) -> None:
        """Build the view anew from what the engine repeats; where it does not answer, go on with what comes."""
        import zmq

        view = self._view
        view.gaps += view.next_sequence is not None
        view.next_sequence = None
        view.catching_up = True
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVHWM, 0)
            socket.set(zmq.IPV6, 1)
            socket.connect(replay)
            for _ in range(REPLAY_TRIES):
                if await self._ask(socket):
                    break
        except (TimeoutError, KvEventError, zmq.ZMQError) as error:
            logger.warning("KV events of %s: no replay from %s (%s)", view.engine, replay, error or "no answer")
        finally:
            view.catching_up = False
            socket.close()

    async def _ask(self, socket: "zmq.asyncio.Socket") -> bool:
        """Ask for all messages from the next one on; False where some were lost on the way, as by a full queue."""
        view = self._view
        await socket.send_multipart([b"", (view.next_sequence or 0).to_bytes(8, "big")])
        whole = True
        while True:
            parts = await asyncio.wait_for(socket.recv_multipart(), REPLAY_WAIT_S)
            sequence, payload = self._decoder.message(parts)
            if sequence == END_OF_REPLAY:
                break
            whole = whole and view.next_sequence in (None, sequence)
            if whole:
                view.receive(sequence, payload)
            await asyncio.sleep(0)
        if view.next_sequence is None:
            view.heard_of_nothing()
        return whole
