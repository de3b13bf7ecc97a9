"""Features of a prompt: its length in tokens and the hashes of its blocks."""

import array
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from serve_table.errors import ConfigError
from serve_table.prompt import Prompt

TokensSource = Literal["ids", "tokenizer", "bytes"]

NOMINAL_BYTES_PER_TOKEN = 4
HASH_MASK = 2**63 - 1
"""Hashes are kept in 63 bits, so that every reader of the journal has an integer type for them."""


class Tokenizer(Protocol):
    def count(self, text: str) -> int: ...


@dataclass
class BytesPerToken:
    """Ratio of canonical prompt bytes to tokens, learned from the engines' usage.

    A ratio of two exponentially weighted means, so that long prompts weigh by their length; its first samples
    weigh as in a plain mean.
    """

    weight: float = 0.05
    mean_bytes: float = float(NOMINAL_BYTES_PER_TOKEN)
    mean_tokens: float = 1.0
    samples: int = 0

    @property
    def ratio(self) -> float:
        return self.mean_bytes / self.mean_tokens

    def observe(self, prompt_bytes: int, prompt_tokens: int) -> None:
        if prompt_bytes <= 0 or prompt_tokens <= 0:
            return
        self.samples += 1
        weight = max(self.weight, 1.0 / self.samples)
        self.mean_bytes += weight * (prompt_bytes - self.mean_bytes)
        self.mean_tokens += weight * (prompt_tokens - self.mean_tokens)


@dataclass(frozen=True)
class PromptFeatures:
    """tokens: whole. block_hashes: chain hashes of whole blocks, never of the whole prompt, since an engine always
    computes at least the last token. block_tokens: tokens that one block stands for."""

    tokens: float
    source: TokensSource
    block_hashes: Sequence[int]
    block_tokens: int


@dataclass
class PromptReader:
    """Measures prompts. salt: secret of this router, so that journaled hashes tell nothing about a text.

    hash_block_tokens: tokens a block. A block of text is that many times 4 bytes, whatever the ratio of the
    moment says: borders that moved with the ratio would never match again.
    """

    hash_block_tokens: int
    salt: bytes
    tokenizer: Tokenizer | None = None
    ratios: dict[str, BytesPerToken] = field(default_factory=dict)

    def ratio(self, kind: str) -> BytesPerToken:
        """The ratio of one kind of prompt: chat templates add tokens that a text has not."""
        return self.ratios.setdefault(kind, BytesPerToken())

    def measure(self, prompt: Prompt, identity: bytes) -> PromptFeatures:
        """identity: what keeps equal prompts apart (model, cache salt)."""
        key = b"\0".join((prompt.kind.encode(), identity))
        if prompt.ids is not None:
            data = array.array("q", prompt.ids).tobytes()
            n_blocks = max(len(prompt.ids) - 1, 0) // self.hash_block_tokens
            hashes = chain_hashes(self.salt, key, data, 8 * self.hash_block_tokens, n_blocks)
            return PromptFeatures(float(len(prompt.ids)), "ids", hashes, self.hash_block_tokens)
        block_bytes = NOMINAL_BYTES_PER_TOKEN * self.hash_block_tokens
        n_blocks = max(len(prompt.text) - 1, 0) // block_bytes
        hashes = chain_hashes(self.salt, key, prompt.text, block_bytes, n_blocks)
        if self.tokenizer is not None:
            tokens = self.tokenizer.count(prompt.text.decode(errors="replace"))
            source: TokensSource = "tokenizer"
        else:
            tokens = round(len(prompt.text) / self.ratio(prompt.kind).ratio)
            source = "bytes"
        tokens = max(tokens, 1)
        bytes_per_token = max(len(prompt.text), 1) / tokens
        return PromptFeatures(float(tokens), source, hashes, max(int(block_bytes / bytes_per_token), 1))

    def observe(self, prompt: Prompt, usage_prompt_tokens: int) -> None:
        """Learn from an engine's own count."""
        if prompt.ids is None and prompt.plain:
            self.ratio(prompt.kind).observe(len(prompt.text), usage_prompt_tokens)


def chain_hashes(salt: bytes, key: bytes, data: bytes, block_bytes: int, n_blocks: int) -> list[int]:
    """Hashes (n_blocks,) of the first whole blocks, each of everything up to its end."""
    hasher = hashlib.blake2b(len(key).to_bytes(8, "little") + key, digest_size=8, key=salt)
    view = memoryview(data)
    hashes = []
    for start in range(0, n_blocks * block_bytes, block_bytes):
        hasher.update(view[start : start + block_bytes])
        hashes.append(int.from_bytes(hasher.copy().digest(), "little") & HASH_MASK)
    return hashes


class FileTokenizer:
    """Counts tokens with a Hugging Face `tokenizer.json`; needs the package `tokenizers`."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ConfigError("--tokenizer needs the package 'tokenizers': install 'pd-rutter[tokenizer]'") from error
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"--tokenizer {path}: no tokenizer.json there")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise ConfigError(f"--tokenizer {file}: {error}") from error

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))
