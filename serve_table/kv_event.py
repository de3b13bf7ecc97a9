"""vLLM's KV events: what an engine says of the blocks that it stores and removes.

A message has three parts: topic, sequence number (8 bytes, big-endian) and `[timestamp, [event, ...]]` in MessagePack.
Events are maps with their name as `type` (vLLM 0.32) or arrays that begin with it (versions before).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from serve_table.errors import KvEventError

BlockHash = int | bytes
"""What vLLM calls a block, of whatever hash function it was told to use."""

OWN_MEMORY = (None, "GPU")
"""Where blocks lie that a request can use at once; CPU builds say GPU as well. Other media are tiers below."""
FULL_PREFIX_KINDS = (None, "full_attention", "mla_attention")
"""Caches whose hits are a contiguous prefix of whole blocks."""


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored"):
    """Blocks that follow one another. token_ids: (n_blocks * block_size,). extra_keys: per block what beside its
    tokens keeps it apart (LoRA name, cache salt, pictures), or null.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None

    @property
    def adapter(self) -> str | None:
        """Name of the LoRA adapter that the blocks are of."""
        return self.lora_name if self.lora_name is not None or self.lora_id is None else f"lora {self.lora_id}"


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    """One copy of each of these blocks is gone; the engine may hold another."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """The prefix cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _ArrayStored(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None


class _ArrayRemoved(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None


class _ArrayCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class EventDecoder:
    """Decodes messages. Raises KvEventError for what is no message of vLLM's."""

    def __init__(self) -> None:
        self._batch = msgspec.msgpack.Decoder(_Batch)
        self._map: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._array = msgspec.msgpack.Decoder(_ArrayStored | _ArrayRemoved | _ArrayCleared)

    def message(self, parts: Sequence[bytes]) -> tuple[int, bytes]:
        """Sequence number and undecoded payload: the last two parts, whatever stands before them."""
        if len(parts) < 2 or len(parts[-2]) != 8:
            raise KvEventError(f"a message of {len(parts)} parts without a sequence number of 8 bytes")
        return int.from_bytes(parts[-2], "big", signed=True), parts[-1]

    def events(self, payload: bytes) -> list[Event]:
        try:
            return [self._event(raw) for raw in self._batch.decode(payload).events]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise KvEventError(f"an event that cannot be read: {error}") from error

    def _event(self, raw: msgspec.Raw) -> Event:
        first = bytes(raw)[0]
        if not (0x90 <= first <= 0x9F or first in (0xDC, 0xDD)):  # MessagePack's marks of an array
            return self._map.decode(raw)
        event = self._array.decode(raw)
        if isinstance(event, _ArrayCleared):
            return AllBlocksCleared()
        kind = BlockStored if isinstance(event, _ArrayStored) else BlockRemoved
        return kind(**msgspec.structs.asdict(event))


def is_elsewhere(event: BlockStored | BlockRemoved) -> bool:
    """Whether an event is of blocks that a request cannot use at once: of another tier, or another engine's."""
    return event.medium not in OWN_MEMORY or event.locality not in (None, "LOCAL")
