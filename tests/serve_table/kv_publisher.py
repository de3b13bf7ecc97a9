"""A publisher of KV events, in the three parts and the encodings of vLLM's, and events for tests."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio


class VllmEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """As vLLM 0.32 declares its events: maps with their class as `type`."""


class BlockStored(VllmEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class BlockRemoved(VllmEvent):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(VllmEvent):
    pass


def stored(
    names: Sequence[int | bytes], tokens: Sequence[int], parent: int | bytes | None = None, **fields: Any
) -> Any:
    """Blocks as vLLM 0.32 tells of them, of one size."""
    fields = {"block_size": len(tokens) // len(names), "medium": "GPU", "group_idx": 0, **fields}
    fields = {"kv_cache_spec_kind": "full_attention", **fields}
    return BlockStored(list(names), parent, list(tokens), **fields)


def removed(*names: int | bytes, **fields: Any) -> Any:
    return BlockRemoved(list(names), **{"medium": "GPU", "group_idx": 0, **fields})


def payload(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


class Publisher:
    """PUB and ROUTER sockets on free ports, or on the ports of one that was closed. buffer: what is replayed."""

    def __init__(self, ports: tuple[int, int] | None = None, answers_replay: bool = True) -> None:
        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self.ports = ports or (0, 0)
        for socket, port in ((self._live, self.ports[0]), (self._replay, self.ports[1])):
            socket.set(zmq.LINGER, 0)
            socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        addresses = [socket.get_string(zmq.LAST_ENDPOINT) for socket in (self._live, self._replay)]
        self.ports = (int(addresses[0].rpartition(":")[2]), int(addresses[1].rpartition(":")[2]))
        self.live, self.replay = addresses
        self.buffer: list[tuple[int, bytes]] = []
        self.replays: list[int] = []
        self.next_sequence = 0
        self._answers_replay = answers_replay

    async def send(self, *events: Any, lost: bool = False) -> None:
        """Publish one message; lost: on the way to the subscribers."""
        await self.send_raw(payload(*events), lost)

    async def send_raw(self, data: bytes, lost: bool = False) -> None:
        self.buffer.append((self.next_sequence, data))
        if not lost:
            await self._live.send_multipart([b"", self.next_sequence.to_bytes(8, "big"), data])
        self.next_sequence += 1

    async def answer_replays(self) -> None:
        while True:
            client, _, first = await self._replay.recv_multipart()
            self.replays.append(int.from_bytes(first, "big"))
            if not self._answers_replay:
                continue
            for sequence, data in list(self.buffer):
                if sequence >= self.replays[-1]:
                    await self._replay.send_multipart([client, b"", b"", sequence.to_bytes(8, "big"), data])
            await self._replay.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self._context.destroy(linger=0)


@asynccontextmanager
async def publisher(ports: tuple[int, int] | None = None, answers_replay: bool = True) -> AsyncIterator[Publisher]:
    running = Publisher(ports, answers_replay)
    answering = asyncio.create_task(running.answer_replays())
    try:
        yield running
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        running.close()
