"""The blocks that one engine holds, as its KV events tell."""

from serve_table.errors import KvEventError
from serve_table.kv_event import (
    FULL_PREFIX_KINDS,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    is_elsewhere,
)
from serve_table.token_chain import ROOT, TokenChain, block_hash, encoded_keys, token_bytes

MAX_BLOCKS = 2_000_000
"""No engine holds so many; an engine that says so is not followed any more. About 600 MB."""


class KvBlocks:
    """Blocks by our own chain hashes, so that the engine's hash function need not be known.

    An engine can hold several copies of a block (a prompt of whole blocks computes its last one anew, and equal
    answers fill equal blocks) and tells of each, so copies are counted. A block whose predecessor was never told of
    cannot be matched with any prompt and is left out. Reports of reuse, which a request can ask for with vLLM's
    `kv_cache_report_mode`, look like copies and make a block stay too long.
    """

    def __init__(self, salt: bytes, max_blocks: int = MAX_BLOCKS) -> None:
        self._salt = salt
        self._max_blocks = max_blocks
        self._chain_of: dict[BlockHash, bytes] = {}
        self._copies: dict[bytes, int] = {}
        self.block_tokens: int | None = None
        """Tokens of a block; None before the first."""
        self.adapters: set[str] = set()
        """LoRA adapters that blocks were of."""

    def __len__(self) -> int:
        return len(self._copies)

    def cached_tokens(self, chain: TokenChain) -> int:
        """Tokens of the longest prefix that the engine holds in whole blocks."""
        if self.block_tokens is None:
            return 0
        n_blocks = 0
        for block in chain.hashes(self.block_tokens):
            if block not in self._copies:
                break
            n_blocks += 1
        return n_blocks * self.block_tokens

    def apply(self, event: Event) -> None:
        """Take in one event. Raises KvEventError for caches whose hits are no prefix of whole blocks."""
        if isinstance(event, AllBlocksCleared):
            self.clear()
        elif is_elsewhere(event):
            return
        elif isinstance(event, BlockRemoved):
            self._remove(event)
        else:
            self._store(event)

    def clear(self) -> None:
        self._chain_of.clear()
        self._copies.clear()

    def _store(self, event: BlockStored) -> None:
        self._require_known_kind(event)
        block_bytes = 8 * event.block_size
        if event.adapter is not None:
            self.adapters.add(event.adapter)
        try:
            tokens = token_bytes(event.token_ids)
        except OverflowError as error:
            raise KvEventError("a token id of more than 64 bits") from error
        parent = ROOT if event.parent_block_hash is None else self._chain_of.get(event.parent_block_hash)
        if parent is None:
            return
        for index, name in enumerate(event.block_hashes):
            keys = event.extra_keys[index] if event.extra_keys else None
            if not keys and event.adapter is not None:
                keys = [event.adapter]
            block = tokens[index * block_bytes : (index + 1) * block_bytes]
            parent = block_hash(self._salt, parent, encoded_keys(keys), block)
            self._chain_of[name] = parent
            self._copies[parent] = self._copies.get(parent, 0) + 1
        if len(self._copies) > self._max_blocks:
            raise KvEventError(f"more than {self._max_blocks} blocks")

    def _require_known_kind(self, event: BlockStored) -> None:
        n_blocks = len(event.block_hashes)
        if event.group_idx not in (None, 0) or event.kv_cache_spec_kind not in FULL_PREFIX_KINDS:
            kind = event.kv_cache_spec_kind or f"group {event.group_idx}"
            raise KvEventError(f"a cache of several groups or of kind {kind}, whose hits are no plain prefix")
        if event.block_size <= 0 or len(event.token_ids) != n_blocks * event.block_size:
            raise KvEventError(f"{n_blocks} blocks of {event.block_size} tokens with {len(event.token_ids)} tokens")
        if event.extra_keys and len(event.extra_keys) != n_blocks:
            raise KvEventError(f"{n_blocks} blocks with the keys of {len(event.extra_keys)}")
        if self.block_tokens not in (None, event.block_size):
            raise KvEventError(f"blocks of {event.block_size} and of {self.block_tokens} tokens")
        self.block_tokens = event.block_size

    def _remove(self, event: BlockRemoved) -> None:
        for name in event.block_hashes:
            chain = self._chain_of.get(name)
            if chain is None:
                continue
            copies = self._copies.get(chain, 0)
            if copies > 1:
                self._copies[chain] = copies - 1
            else:
                self._copies.pop(chain, None)
                del self._chain_of[name]
