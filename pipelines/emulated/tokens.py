"""Tokens of the emulated model: a byte-level tokenizer, and answers that follow from the prompt alone.

One token is one byte, so text that comes back in a later prompt counts as many tokens as it did when generated.
"""

import hashlib
import random
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

FIRST_BYTE_ID = 4
"""Id of byte 0; the ids below are special tokens."""

VOCABULARY_TOKENS = 32_000
"""Ids that a prompt of token ids may use; those past the bytes have no text."""

MEDIAN_ANSWER_TOKENS = 200
SPREAD_OF_LOG = 0.8
# A prefill leg of one token must end by its limit, as a real model's all but always does.
SHORTEST_ANSWER_TOKENS = 2


def _letters(alphabet: bytes) -> bytes:
    return bytes(alphabet[value % len(alphabet)] for value in range(256))


CONSONANTS = _letters(b"bcdfghjklmnprstvz")
VOWELS = _letters(b"aeiou")
SPACES = _letters(b"  nrs")


def encode(text: str) -> Tokens:
    """Token ids of a text, (n_tokens,)."""
    data = np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8)
    return data.astype(np.int32) + np.int32(FIRST_BYTE_ID)


def decode(ids: Iterable[int]) -> str:
    """The text of token ids; ids that are no bytes have none."""
    data = bytes(i - FIRST_BYTE_ID for i in ids if FIRST_BYTE_ID <= i < FIRST_BYTE_ID + 256)
    return data.decode("utf-8", errors="replace")


def chat_text(turns: Iterable[tuple[str, str]]) -> str:
    """The chat template: each further turn only appends, so that conversations share their prefix."""
    return "".join(f"<|{role}|>\n{content}\n" for role, content in turns) + "<|assistant|>\n"


def prompt_digest(prompt: Tokens) -> bytes:
    """16 bytes that stand for a prompt, equal in every process."""
    return hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()


def answer_length_tokens(digest: bytes) -> int:
    """Where the model would end its answer to a prompt: log-normal over prompts, fixed for each."""
    drawn = random.Random(digest).lognormvariate(0.0, SPREAD_OF_LOG)
    return max(SHORTEST_ANSWER_TOKENS, round(MEDIAN_ANSWER_TOKENS * drawn))


def answer_text(digest: bytes, n_tokens: int) -> bytes:
    """The first tokens of the answer to a prompt, one ASCII letter or space each; a longer one starts the same."""
    drawn = hashlib.shake_128(digest).digest(n_tokens)
    text = bytearray(n_tokens)
    text[0::2] = drawn[0::2].translate(CONSONANTS)
    text[1::2] = drawn[1::2].translate(VOWELS)
    text[6::7] = drawn[6::7].translate(SPACES)
    return bytes(text)
