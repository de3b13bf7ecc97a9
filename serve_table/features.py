"""Features of a prompt: its length in tokens and the hashes of its blocks."""

import array
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from serve_table.errors import ConfigError
from serve_table.prompt import Prompt

logger = logging.getLogger("rutter")

TokensSource = Literal["ids", "tokenizer", "bytes"]

NOMINAL_BYTES_PER_TOKEN = 4
HASH_MASK = 2**63 - 1
"""Hashes are kept in 63 bits, so that every reader of the journal has an integer type for them."""


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...


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
    computes at least the last token. block_tokens: tokens that one block stands for. token_ids: the very ones that
    engines compute; None where they are not known."""

    tokens: float
    source: TokensSource
    block_hashes: Sequence[int]
    block_tokens: int
    token_ids: Sequence[int] | None = None


@dataclass
class PromptReader:
    """Measures prompts. salt: secret of this router, so that journaled hashes tell nothing about a text.

    hash_block_tokens: tokens a block. A block of text is that many times 4 bytes, whatever the ratio of the
    moment says: borders that moved with the ratio would never match again. tokenizer_agrees: engines have counted
    as the tokenizer does, so far.
    """

    hash_block_tokens: int
    salt: bytes
    tokenizer: Tokenizer | None = None
    ratios: dict[str, BytesPerToken] = field(default_factory=dict)
    tokenizer_agrees: bool = True

    def ratio(self, kind: str) -> BytesPerToken:
        """The ratio of one kind of prompt: chat templates add tokens that a text has not."""
        return self.ratios.setdefault(kind, BytesPerToken())

    def measure(self, prompt: Prompt, identity: bytes, is_taken_as_it_is: bool = False) -> PromptFeatures:
        """identity: what keeps equal prompts apart (model, cache salt). is_taken_as_it_is: by engines, which put it
        into no template and cut nothing off."""
        key = b"\0".join((prompt.kind.encode(), identity))
        if prompt.ids is not None:
            data = array.array("q", prompt.ids).tobytes()
            n_blocks = max(len(prompt.ids) - 1, 0) // self.hash_block_tokens
            hashes = chain_hashes(self.salt, key, data, 8 * self.hash_block_tokens, n_blocks)
            token_ids = prompt.ids if is_taken_as_it_is else None
            return PromptFeatures(float(len(prompt.ids)), "ids", hashes, self.hash_block_tokens, token_ids)
        block_bytes = NOMINAL_BYTES_PER_TOKEN * self.hash_block_tokens
        n_blocks = max(len(prompt.text) - 1, 0) // block_bytes
        hashes = chain_hashes(self.salt, key, prompt.text, block_bytes, n_blocks)
        text_ids: list[int] | None = None
        if self.tokenizer is not None:
            text_ids = self.tokenizer.encode(prompt.text.decode(errors="replace"))
            tokens = len(text_ids)
            source: TokensSource = "tokenizer"
        else:
            tokens = round(len(prompt.text) / self.ratio(prompt.kind).ratio)
            source = "bytes"
        tokens = max(tokens, 1)
        bytes_per_token = max(len(prompt.text), 1) / tokens
        block_tokens = max(int(block_bytes / bytes_per_token), 1)
        is_known = is_taken_as_it_is and prompt.kind == "text" and self.tokenizer_agrees
        return PromptFeatures(float(tokens), source, hashes, block_tokens, text_ids if is_known else None)

    def observe(self, prompt: Prompt, usage_prompt_tokens: int, measured: PromptFeatures | None = None) -> None:
        """Learn from an engine's own count. A tokenizer that counts otherwise is trusted for lengths alone."""
        if prompt.ids is not None:
            return
        if prompt.plain:
            self.ratio(prompt.kind).observe(len(prompt.text), usage_prompt_tokens)
        if self.tokenizer_agrees and measured is not None and measured.token_ids is not None:
            n_tokens = len(measured.token_ids)
            self.tokenizer_agrees = n_tokens == usage_prompt_tokens
            if not self.tokenizer_agrees:
                logger.warning(
                    "--tokenizer is not the engines': it makes %d tokens of a prompt, an engine %d; texts are not "
                    "compared with KV events any more",
                    n_tokens,
                    usage_prompt_tokens,
                )


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
    """Makes tokens with a Hugging Face `tokenizer.json`; needs the package `tokenizers`."""

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

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text).ids
        return token_ids
