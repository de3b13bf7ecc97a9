"""Prompts: deterministic, of the exact length, equal where the trace shares text."""

import json
from dataclasses import replace

import numpy as np

from learn.trace import Trace
from pipelines.prompts import FIRST_TOKEN, LAST_TOKEN, PromptMaker, text_of
from pipelines.workloads import make_workload


def two_block_trace(*chains):
    n = len(chains)
    length = np.array([len(chain) for chain in chains])
    return Trace(
        "test",
        np.arange(n, dtype=float),
        np.full(n, 40),
        np.full(n, 5),
        np.zeros(n, np.int64),
        np.cumsum(length) - length,
        length,
        np.array([block for chain in chains for block in chain], np.int64),
        hash_block_tokens=16,
    )


def test_prompts_share_exactly_their_common_blocks():
    maker = PromptMaker(two_block_trace([0, 1], [0, 1], [0, 2], []), 7, "m")
    first, second, third, alone = (maker.token_ids(index) for index in range(4))
    assert len(first) == 40
    assert np.array_equal(first[:32], second[:32])
    assert not np.array_equal(first[32:], second[32:])
    assert np.array_equal(first[:16], third[:16])
    assert not np.array_equal(first[16:32], third[16:32])
    assert not np.array_equal(first[:16], alone[:16])


def test_f34_block_ids_that_differ_only_in_high_bits_do_not_share():
    maker = PromptMaker(two_block_trace([5], [5 + 2**32], [5 + 2**62], [5]), 7, "m")
    prompts = [maker.token_ids(index)[:16] for index in range(4)]
    assert np.array_equal(prompts[0], prompts[3])
    for other in prompts[1:3]:
        assert np.mean(other == prompts[0]) < 0.5


def test_prompts_depend_on_the_seed_alone():
    trace = make_workload("multi-turn", 60, 1, 10.0)
    first, again, other = (PromptMaker(trace, seed, "m") for seed in (1, 1, 2))
    for index in range(60):
        assert np.array_equal(first.token_ids(index), again.token_ids(index))
        assert len(first.token_ids(index)) == trace.prompt_tokens[index]
    assert not np.array_equal(first.token_ids(5)[:64], other.token_ids(5)[:64])


def test_tokens_are_spread_evenly_over_the_small_vocabulary():
    trace = replace(two_block_trace([]), prompt_tokens=np.array([200_000]))
    counts = np.bincount(PromptMaker(trace, 3, "m").token_ids(0))
    assert (counts.nonzero()[0][0], len(counts) - 1) == (FIRST_TOKEN, LAST_TOKEN)
    expected = 200_000 / 490
    chi_square = ((counts[FIRST_TOKEN:] - expected) ** 2 / expected).sum()
    assert chi_square < 600  # 489 degrees of freedom: mean 489, deviation 31


def test_equal_tokens_are_equal_text_for_chat():
    maker = PromptMaker(two_block_trace([0, 1], [0, 1]), 7, "m", "chat/completions")
    first, second = (json.loads(maker.body(index))["messages"][0]["content"].split() for index in (0, 1))
    assert len(first) == 40
    assert first[:32] == second[:32]
    assert first != second
    assert " ".join(first) == text_of(maker.token_ids(0))
