"""The prefix cache of the engine model: hits, sharing, eviction, reset."""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import SMALL, core_with, free_queue
from reference_engine import Leg

from learn.core import DONE, NONE, Core
from learn.engine import begin_step, end_step, loaded, submit
from learn.kv_cache import cached_entries, reset_prefix_cache


def answer(core: Core, *sequences: int) -> None:
    """Run these sequences, all submitted at once, to their end."""
    for s in sequences:
        submit(core, 0, s)
    while begin_step(core, 0, 0.0):
        end_step(core, 0)


def cached(core: Core) -> list[int]:
    return [int(entry) for entry in np.flatnonzero(core.entry_references[0] != NONE)]


def hits(core: Core, s: int) -> int:
    sequence = core.sequences[s]
    return cached_entries(core, 0, sequence.chain_start, sequence.chain_length, sequence.prompt_tokens)


def test_a_repeated_prefix_is_hit_and_not_computed_again() -> None:
    core = core_with([Leg(0, 20, 2, "local", [0, 1, 2, 3]), Leg(1, 22, 2, "local", [0, 1, 2, 4])], SMALL)
    answer(core, 0)
    submit(core, 0, 1)
    begin_step(core, 0, 0.0)
    assert core.sequences[1].cached_tokens == 12
    assert core.engines[0].step_tokens == 10


@pytest.mark.parametrize(("prompt", "expected"), [(12, 8), (13, 12), (11, 8)])
def test_never_the_whole_prompt_is_a_hit(prompt: int, expected: int) -> None:
    chain = list(range(prompt // 4))
    core = core_with([Leg(0, 20, 1, "local", [0, 1, 2, 3]), Leg(1, prompt, 1, "local", chain)], SMALL)
    answer(core, 0)
    answer(core, 1)
    assert core.sequences[1].cached_tokens == expected


def test_a_hit_ends_at_the_first_entry_that_is_missing() -> None:
    core = core_with([Leg(0, 20, 1, "local", [0, 1, 2]), Leg(1, 20, 1, "local", [0, 5, 2])], SMALL)
    answer(core, 0)
    assert hits(core, 1) == 1


def test_concurrent_requests_share_the_blocks_of_their_prefix() -> None:
    core = core_with([Leg(0, 9, 6, "local", [0, 1]), Leg(1, 10, 6, "local", [0, 1])], SMALL)
    submit(core, 0, 0)
    submit(core, 0, 1)
    begin_step(core, 0, 0.0)
    # As in vLLM a prefix can be shared from the step that computes it on: 9 tokens and the 2 that differ.
    assert core.engines[0].step_tokens == 11
    assert list(core.entry_references[0, :2]) == [2, 2]
    assert core.engines[0].free_blocks == 40 - 3 - 1
    while core.engines[0].busy:
        end_step(core, 0)
        begin_step(core, 0, 0.0)
    assert list(core.entry_references[0, :2]) == [0, 0]
    assert core.engines[0].free_blocks == 40


def test_an_entry_in_use_is_not_evicted() -> None:
    core = core_with([Leg(0, 9, 60, "local", [0, 1]), Leg(1, 12, 60, "local", [])], replace(SMALL, kv_tokens=84))
    submit(core, 0, 0)
    submit(core, 0, 1)
    begin_step(core, 0, 0.0)
    while core.sequences[0].state != DONE:
        assert list(core.entry_references[0, :2]) == [1, 1]
        end_step(core, 0)
        begin_step(core, 0, 0.0)
    assert core.engines[0].preemptions == 1


def test_the_tail_of_a_prefix_is_evicted_first_and_the_least_recently_used_prefix_before_others() -> None:
    legs = [
        Leg(0, 13, 1, "local", [0, 1, 2]),
        Leg(1, 13, 1, "local", [3, 4, 5]),
        Leg(2, 13, 1, "local", [0, 1, 2]),
        Leg(3, 17, 1, "local", []),
    ]
    core = core_with(legs, replace(SMALL, kv_tokens=40))
    answer(core, 0)
    answer(core, 1)
    answer(core, 2)  # makes the first prefix the most recently used one
    order = [entry for entry in free_queue(core) if entry is not None]
    assert order == [5, 4, 3, 2, 1, 0]
    answer(core, 3)  # 5 blocks: the 3 plain ones that were freed before, and two of the older prefix
    assert cached(core) == [0, 1, 2, 3]


def test_plain_blocks_freed_before_an_entry_are_taken_before_it_and_those_freed_after_it_after_it() -> None:
    legs = [Leg(0, 6, 1, "local", [0]), Leg(1, 6, 1, "local", [1]), Leg(2, 6, 1, "local", [])]
    core = core_with(legs, replace(SMALL, kv_tokens=24))
    answer(core, 0)
    answer(core, 1)
    assert free_queue(core) == [None, None, None, 0, None, 1]
    answer(core, 2)
    assert free_queue(core) == [None, 0, None, 1, None, None]


def test_an_evicted_entry_of_several_blocks_leaves_its_other_blocks_at_the_head() -> None:
    core = core_with([Leg(0, 13, 1, "local", [0]), Leg(1, 17, 1, "local", [])], replace(SMALL, kv_tokens=24), 12)
    answer(core, 0)
    assert free_queue(core) == [None, None, None, 0, 0, 0]
    submit(core, 0, 1)
    begin_step(core, 0, 0.0)
    assert free_queue(core) == [None]
    assert cached(core) == []
    end_step(core, 0)
    assert core.engines[0].free_blocks == 6


def test_a_prefix_pulled_while_it_is_computed_here_is_kept_once() -> None:
    core = core_with([Leg(0, 12, 5, "pull", [0, 1]), Leg(1, 13, 5, "local", [0, 1])], SMALL)
    submit(core, 0, 0)
    begin_step(core, 0, 0.0)  # the transfer begins; nothing is cached yet
    submit(core, 0, 1)
    begin_step(core, 0, 0.0)
    assert core.sequences[1].cached_tokens == 0
    loaded(core, 0, 0, 0.0)
    assert list(core.entry_references[0, :2]) == [2, 2]
    assert core.engines[0].free_blocks == 40 - 4 - 1
    while core.engines[0].busy:
        end_step(core, 0)
        begin_step(core, 0, 0.0)
    assert core.engines[0].free_blocks == 40


def test_a_pulled_prefix_can_be_hit_once_it_is_here() -> None:
    core = core_with([Leg(0, 12, 1, "pull", [0, 1, 2]), Leg(1, 13, 1, "local", [0, 1, 2])], SMALL)
    submit(core, 0, 0)
    begin_step(core, 0, 0.0)
    assert hits(core, 1) == 0
    loaded(core, 0, 0, 0.0)
    assert hits(core, 1) == 3


def test_a_pull_transfers_only_what_is_not_cached_here() -> None:
    core = core_with([Leg(0, 13, 1, "local", [0, 1, 2]), Leg(1, 20, 1, "pull", [0, 1, 2])], SMALL)
    answer(core, 0)
    submit(core, 0, 1)
    begin_step(core, 0, 0.0)
    assert core.sequences[1].cached_tokens == 12


def test_reset_forgets_what_nobody_uses_and_keeps_the_rest() -> None:
    core = core_with([Leg(0, 9, 1, "local", [0, 1]), Leg(1, 9, 8, "local", [2, 3])], SMALL)
    answer(core, 0)
    submit(core, 0, 1)
    begin_step(core, 0, 0.0)
    reset_prefix_cache(core, 0)
    assert cached(core) == [2, 3]
    assert core.engines[0].free_blocks == 40 - 3
    assert free_queue(core) == [None] * 37
    end_step(core, 0)
    answer(core)
    reset_prefix_cache(core, 0)
    assert cached(core) == []
    assert core.engines[0].free_blocks == 40


def test_a_preempted_sequence_starts_over_from_its_prefix_hit() -> None:
    core = core_with([Leg(0, 8, 24, "local", []), Leg(1, 13, 9, "local", [0, 1, 2])], replace(SMALL, kv_tokens=32))
    submit(core, 0, 0)
    submit(core, 0, 1)
    while core.engines[0].preemptions == 0:
        begin_step(core, 0, 0.0)
        end_step(core, 0)
    assert hits(core, 1) > 0
    hit_at_admission = core.sequences[1].cached_tokens
    answer(core)
    assert core.sequences[1].cached_tokens == hit_at_admission == 0
    assert core.engines[0].free_blocks == 8
