"""Chain hashes of token blocks: one block's name says everything up to its end, as in vLLM, by our own function."""

import array
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

ROOT = b""
"""Parent of a prompt's first block."""


@dataclass(frozen=True)
class BlockKeys:
    """What beside its tokens keeps a prompt's blocks apart: the adapter in each block, the salt in the first."""

    adapter: str | None = None
    cache_salt: str | None = None

    def of_block(self, index: int) -> bytes:
        """In vLLM's order, as its events give them."""
        if self.adapter is None and (self.cache_salt is None or index > 0):
            return b""
        names = [self.adapter, self.cache_salt if index == 0 else None]
        return encoded_keys([name for name in names if name is not None])


def encoded_keys(keys: Sequence[object] | None) -> bytes:
    """One form for the keys of a block, whether they came from an event or from a request."""
    return msgspec.msgpack.encode(keys) if keys else b""


def block_hash(salt: bytes, parent: bytes, keys: bytes, tokens: bytes | memoryview) -> bytes:
    """Hash of a block whose predecessor's is `parent`; tokens: 8 bytes each."""
    hasher = hashlib.blake2b(parent + len(keys).to_bytes(8, "little") + keys, digest_size=8, key=salt)
    hasher.update(tokens)
    return hasher.digest()


def token_bytes(token_ids: Sequence[int]) -> memoryview:
    """8 bytes a token."""
    return memoryview(array.array("q", token_ids)).cast("B")


@dataclass
class TokenChain:
    """A prompt's blocks of any size, hashed only as far as somebody asks and once for all engines."""

    salt: bytes
    token_ids: Sequence[int]
    keys: BlockKeys = BlockKeys()
    _known: dict[int, list[bytes]] = field(default_factory=dict)
    _tokens: memoryview | None = None

    def hashes(self, block_tokens: int) -> Iterator[bytes]:
        """Hashes of whole blocks in order, never of the whole prompt: an engine computes at least the last token."""
        known = self._known.setdefault(block_tokens, [])
        for index in range(max(len(self.token_ids) - 1, 0) // block_tokens):
            if index == len(known):
                known.append(self._hash(index, known[-1] if known else ROOT, 8 * block_tokens))
            yield known[index]

    def _hash(self, index: int, parent: bytes, block_bytes: int) -> bytes:
        if self._tokens is None:
            self._tokens = token_bytes(self.token_ids)
        tokens = self._tokens[index * block_bytes : (index + 1) * block_bytes]
        return block_hash(self.salt, parent, self.keys.of_block(index), tokens)
