"""Prompts of a trace: token ids made from it, equal exactly where the trace says that text is shared."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from learn.trace import Ints, Trace

Endpoint = Literal["completions", "chat/completions"]

# Within the vocabulary of the smallest test models, beyond their special tokens.
FIRST_TOKEN, LAST_TOKEN = 10, 499

# Short, common English words: about one token each in any vocabulary.
_WORD_LIST = """
the of and to in is it for as on with he be at by had not are but from or have an they which one you were all her she
there would their we him been has when who will no more if out so said what up its about into than them can only other
time new some could these two may first then do any like my now over such our man me even most made after also did
many off before must well back through years much where your way down should because long each
"""
WORDS = tuple(_WORD_LIST.split())

Words64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class PromptMaker:
    """Bodies of the requests of a trace for one endpoint, the same for the same seed.

    A shared block's tokens depend on (seed, block id) alone, the others on (seed, request, place in the prompt).
    """

    trace: Trace
    seed: int
    model: str
    endpoint: Endpoint = "completions"

    def token_ids(self, index: int) -> Ints:
        """Prompt of request `index`: (prompt_tokens,), each from FIRST_TOKEN to LAST_TOKEN."""
        trace = self.trace
        start, n_blocks = int(trace.chain_start[index]), int(trace.chain_length[index])
        blocks = trace.block_ids[start : start + n_blocks]
        shared = _tokens(self.seed, blocks, trace.hash_block_tokens, stream=1).ravel()
        n_own = int(trace.prompt_tokens[index]) - len(shared)
        own = _tokens(self.seed, np.array([index]), n_own, stream=2).ravel()
        return np.concatenate((shared, own))

    def body(self, index: int) -> bytes:
        """The JSON body that asks for exactly the trace's number of output tokens, streamed, with usage."""
        ids = self.token_ids(index)
        fields: dict[str, Any] = {"model": self.model}
        if self.endpoint == "completions":
            fields["prompt"] = ids.tolist()
        else:
            fields["messages"] = [{"role": "user", "content": text_of(ids)}]
        fields |= {
            "max_tokens": int(self.trace.output_tokens[index]),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        return msgspec.json.encode(fields)


def text_of(token_ids: Ints) -> str:
    """A word for each token: a text of about as many tokens, equal where the ids are."""
    return " ".join(WORDS[token % len(WORDS)] for token in token_ids.tolist())


def _tokens(seed: int, keys: Ints, n_tokens: int, stream: int) -> Ints:
    """Tokens (n_keys, n_tokens), each a hash of (seed, stream, key, place); all 64 bits of a key count."""
    seeded = _mixed(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], np.uint64) + np.uint64(stream))
    rows = _mixed(keys.astype(np.uint64) ^ seeded)
    places = np.arange(1, n_tokens + 1, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    drawn = _mixed(rows[:, None] + places[None, :]) % np.uint64(LAST_TOKEN - FIRST_TOKEN + 1)
    return drawn.astype(np.int64) + FIRST_TOKEN


def _mixed(words: Words64) -> Words64:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection whose every output bit depends on all."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return words ^ (words >> np.uint64(31))
