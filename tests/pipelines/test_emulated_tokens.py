"""The emulated model's tokens, and the ids of its prefix cache."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from learn.core import NONE
from pipelines.emulated import tokens
from pipelines.emulated.prefix_ids import PrefixIds


@given(st.text(max_size=200))
def test_text_survives_and_counts_its_bytes(text: str) -> None:
    encodable = text.encode("utf-8", errors="replace").decode()
    assert tokens.decode(tokens.encode(text).tolist()) == encodable
    assert len(tokens.encode(text)) == len(encodable.encode())


def test_answers_follow_from_the_prompt_alone() -> None:
    digest = tokens.prompt_digest(tokens.encode("a prompt"))
    long, short = tokens.answer_text(digest, 500), tokens.answer_text(digest, 20)
    assert long.startswith(short)
    assert len(tokens.encode(long.decode("ascii"))) == 500
    assert long.decode().replace(" ", "").isalpha()
    assert tokens.answer_text(tokens.prompt_digest(tokens.encode("another")), 20) != short


def test_answers_are_equal_in_every_process() -> None:
    # Written down once: what hung on a process's hash seed would differ.
    digest = tokens.prompt_digest(tokens.encode("fixed"))
    assert tokens.answer_text(digest, 16) == b"ferepo ekukalsbu"
    assert tokens.answer_length_tokens(digest) == 599


def test_answer_lengths_spread_about_their_median() -> None:
    lengths = [tokens.answer_length_tokens(bytes([i]) * 16) for i in range(200)]
    assert min(lengths) >= tokens.SHORTEST_ANSWER_TOKENS
    assert 150 < float(np.median(lengths)) < 270


def test_a_longer_conversation_starts_with_the_shorter_one() -> None:
    turns = [("user", "hello"), ("assistant", "hi"), ("user", "more")]
    first = tokens.chat_text(turns[:1])
    assert tokens.chat_text([*turns[:1], ("assistant", "hi"), turns[2]]).startswith(first + "hi\n")


def chain_of(ids: PrefixIds, text: str, salt: str = "") -> list[int]:
    chain = np.zeros(64, np.int64)
    return chain[: ids.take(tokens.encode(text), salt, chain)].tolist()


def test_equal_prefixes_have_equal_ids_and_only_those() -> None:
    ids = PrefixIds(np.full(64, NONE, np.int64), 4)
    assert chain_of(ids, "aaaabbbbcc") == [0, 1]
    assert chain_of(ids, "aaaabbbbcccc") == [0, 1, 2]
    assert chain_of(ids, "bbbb") == [3]  # the same block after another prefix
    assert set(chain_of(ids, "aaaabbbb", salt="tenant")).isdisjoint({0, 1, 2, 3})


def test_ids_are_used_again_once_nobody_needs_them() -> None:
    references = np.full(3, NONE, np.int64)
    ids = PrefixIds(references, 4)
    first = chain_of(ids, "aaaabbbbcccc")
    references[first[0]] = 0  # cached
    ids.give_back(np.array(first))
    assert chain_of(ids, "aaaa") == first[:1]
    assert sorted(chain_of(ids, "ddddeeee")) == sorted(first[1:])
    assert chain_of(ids, "ffff") == []  # all in use: not shared
    assert chain_of(ids, "aaaabbbb") == first[:1]
