"""The engine model: times against formulas, scheduling against an independent reference, no livelock."""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import SMALL, core_with, free_queue, run_random_operations
from reference_engine import Leg

from learn.core import DECODING, DONE, HELD, LOADED, NONE, PULLING, WAITING, Core, new_core
from learn.engine import abort, begin_step, end_step, loaded, release, submit
from learn.planned_steps import interrupt, settle_blocks
from serve_table.errors import ConfigError
from serve_table.step_time import A40_3B, step_time_s

STEP = A40_3B.step.as_list()
SMALL_STEP = SMALL.step.as_list()


def run_to_idle(core: Core, now_s: float = 0.0) -> list[float]:
    """Step until nothing is left to do; the ends of the steps."""
    ends = []
    while begin_step(core, 0, now_s):
        now_s = float(core.engines[0].step_end_s)
        ends.append(now_s)
        end_step(core, 0)
    return ends


def started(legs: list[Leg], profile=SMALL, entry_tokens: int = 0, macro_steps: bool = False) -> Core:
    core = core_with(legs, profile, entry_tokens, macro_steps)
    for leg in legs:
        submit(core, 0, leg.name)
    return core


def begun(core: Core, now_s: float = 0.0) -> Core:
    assert begin_step(core, 0, now_s)
    return core


@pytest.mark.parametrize("macro_steps", [False, True])
def test_an_unloaded_local_request_takes_its_prefill_step_and_growing_decode_steps(macro_steps: bool) -> None:
    core = started([Leg(0, 500, 40, "local", [])], A40_3B, macro_steps=macro_steps)
    run_to_idle(core)
    ttft_s = step_time_s(STEP, 500.0, 0.0)
    decode_s = sum(step_time_s(STEP, 1.0, 500.0 + k) for k in range(39))
    assert core.sequences[0].first_token_s == pytest.approx(ttft_s, abs=1e-12)
    assert core.sequences[0].finish_s == pytest.approx(ttft_s + decode_s, abs=1e-12)


def test_a_long_prompt_is_prefilled_in_chunks_of_the_token_budget() -> None:
    core = started([Leg(0, 5000, 1, "local", [])], A40_3B)
    ends = run_to_idle(core)
    chunks = [step_time_s(STEP, 2048.0, 0.0), step_time_s(STEP, 2048.0, 2048.0), step_time_s(STEP, 904.0, 4096.0)]
    assert ends == pytest.approx(np.cumsum(chunks), abs=1e-12)
    assert core.sequences[0].first_token_s == core.sequences[0].finish_s == pytest.approx(ends[-1])


def test_decodes_share_the_step_with_the_chunk_that_fills_the_budget() -> None:
    core = started([Leg(0, 20, 9, "local", []), Leg(1, 60, 2, "local", [])])
    begun(core)
    # 20 tokens of the first prompt, 4 of the second.
    assert core.engines[0].step_tokens == 24
    end_step(core, 0)
    begun(core, 1.0)
    # One decode token with 20 of context, 23 of the second prompt with the 4 computed before.
    assert core.engines[0].step_s == pytest.approx(step_time_s(SMALL_STEP, 24.0, 20.0 + 4.0), abs=1e-12)


def test_a_pulled_request_decodes_in_one_step_after_its_transfer() -> None:
    core = started([Leg(0, 50, 3, "pull", [])])
    assert not begin_step(core, 0, 0.0)
    assert core.engines[0].pulls == 1
    assert core.pulls[0, 0] == 0
    assert core.sequences[0].state == PULLING
    # The whole prompt has its blocks before the transfer, as in vLLM: joining can never fail.
    assert core.sequences[0].blocks == 13
    loaded(core, 0, 0, 2.0)
    ends = run_to_idle(core, 2.0)
    times = [step_time_s(SMALL_STEP, 1.0, 49.0 + k) for k in range(3)]
    assert ends == pytest.approx(2.0 + np.cumsum(times), abs=1e-12)
    assert core.sequences[0].first_token_s == pytest.approx(ends[0])
    assert core.sequences[0].finish_s == pytest.approx(ends[-1])


def decoding_beside_a_pull(macro_steps: bool) -> Core:
    """Sequence 0 decodes; the step that begins at 10 s also starts the pull of sequence 1. Sequence 2 is left."""
    legs = [Leg(0, 9, 60, "local", []), Leg(1, 50, 3, "pull", []), Leg(2, 6, 5, "local", [])]
    core = core_with(legs, SMALL, macro_steps=macro_steps)
    submit(core, 0, 0)
    begun(core)
    end_step(core, 0)
    submit(core, 0, 1)
    begun(core, 10.0)
    assert core.engines[0].pulls == 1
    return core


def until_its_first_token(core: Core) -> tuple[list[int], list[float]]:
    """States of sequence 1 when each step begins, and the ends of the steps."""
    states, ends = [], []
    while core.sequences[1].first_token_s == 0.0:
        states.append(int(core.sequences[1].state))
        ends.append(float(core.engines[0].step_end_s))
        end_step(core, 0)
        begun(core, ends[-1])
    return states, ends


def test_a_transfer_that_ends_within_a_step_is_found_by_the_next_and_joins_the_one_after() -> None:
    core = decoding_beside_a_pull(macro_steps=False)
    loaded(core, 0, 1, 10.0)
    states, ends = until_its_first_token(core)
    assert states == [LOADED, LOADED, DECODING]
    assert core.sequences[1].first_token_s == ends[2]


def test_planned_steps_go_on_until_a_transfer_that_has_ended_joins() -> None:
    single = decoding_beside_a_pull(macro_steps=False)
    loaded(single, 0, 1, 10.0)
    _, single_ends = until_its_first_token(single)
    core = decoding_beside_a_pull(macro_steps=True)
    assert core.engines[0].planned_steps > 3
    loaded(core, 0, 1, 10.0)
    _, ends = until_its_first_token(core)
    assert ends == pytest.approx(single_ends[1:], abs=1e-12)


def test_an_arrival_cuts_planned_steps_short_of_the_one_that_a_transfer_joins() -> None:
    single, core = (decoding_beside_a_pull(macro_steps) for macro_steps in (False, True))
    for each in (single, core):
        loaded(each, 0, 1, 10.0)
        submit(each, 0, 2)
        interrupt(each, 0, 10.0)
    assert until_its_first_token(core) == until_its_first_token(single)


def test_a_transfer_that_is_complete_where_nothing_is_left_to_compute_joins_at_once() -> None:
    core = decoding_beside_a_pull(macro_steps=False)
    loaded(core, 0, 1, 10.0)
    abort(core, 0, 0)
    end_step(core, 0)
    begun(core, 11.0)
    assert core.sequences[1].state == DECODING
    assert core.engines[0].step_tokens == 1


def test_a_prefill_leg_holds_its_blocks_until_they_are_pulled() -> None:
    core = started([Leg(0, 50, 1, "prefill", [])])
    run_to_idle(core)
    assert core.sequences[0].state == HELD
    assert core.engines[0].free_blocks == 40 - 13
    release(core, 0, 0)
    assert core.sequences[0].state == DONE
    assert core.engines[0].free_blocks == 40


@pytest.mark.parametrize("aborts", [False, True], ids=["run", "aborts"])
@pytest.mark.parametrize("entry_tokens", [4, 8, 12])
@pytest.mark.parametrize("kv_tokens", [42, 80, 160])
def test_every_operation_agrees_with_the_reference_model(kv_tokens: int, entry_tokens: int, aborts: bool) -> None:
    profile = replace(SMALL, kv_tokens=kv_tokens)
    for seed in range(5):
        run_random_operations(seed, profile, entry_tokens, aborts, n_legs=25)


def test_the_random_operations_reach_preemption() -> None:
    assert run_random_operations(0, replace(SMALL, kv_tokens=80), 4, False, n_legs=40) > 0


def test_steps_are_admitted_in_order_of_arrival_even_where_a_later_one_would_fit() -> None:
    core = started([Leg(0, 100, 5, "local", []), Leg(1, 80, 5, "local", []), Leg(2, 4, 5, "local", [])])
    for now_s in range(6):
        begun(core, float(now_s))
        end_step(core, 0)
    assert core.sequences[1].state == WAITING
    assert core.sequences[2].state == WAITING


def test_a_prompt_is_admitted_only_where_all_of_it_fits() -> None:
    # The first chunk of the second prompt would fit; vLLM's scheduler_reserve_full_isl asks for all of it.
    core = started([Leg(0, 100, 30, "local", []), Leg(1, 64, 5, "local", [])])
    run_to_idle(core)
    assert core.engines[0].preemptions == 0
    assert core.sequences[1].first_token_s > core.sequences[0].finish_s


def test_max_num_seqs_limits_the_batch() -> None:
    core = started([Leg(s, 2, 30, "local", []) for s in range(8)])
    begun(core)
    end_step(core, 0)
    assert core.engines[0].decoding == 5
    assert core.engines[0].waiting == 3


def test_the_sequence_admitted_last_is_preempted_and_starts_over_at_the_head_of_the_queue() -> None:
    profile = replace(SMALL, kv_tokens=40)
    core = started([Leg(0, 16, 20, "local", []), Leg(1, 8, 12, "local", []), Leg(2, 4, 2, "local", [])], profile)
    begun(core)
    while core.engines[0].preemptions == 0:
        end_step(core, 0)
        begun(core, float(core.engines[0].step_end_s))
    first = core.engines[0].waiting_head
    assert first == 1
    assert core.sequences[1].computed == 0
    assert core.sequences[1].generated > 0
    first_token_s = core.sequences[1].first_token_s
    end_step(core, 0)
    run_to_idle(core, float(core.engines[0].step_end_s))
    assert core.sequences[1].first_token_s == first_token_s
    assert all(core.sequences[s].state == DONE for s in range(3))
    assert core.engines[0].free_blocks == 10


@pytest.mark.parametrize(("prompt", "output"), [(1, 159), (100, 60), (159, 1), (157, 3)])
def test_a_request_that_just_fits_is_answered(prompt: int, output: int) -> None:
    core = core_with([Leg(0, prompt, output, "local", []), Leg(1, prompt, output, "pull", [])], SMALL)
    submit(core, 0, 0)
    run_to_idle(core)
    assert core.sequences[0].state == DONE
    submit(core, 0, 1)
    begin_step(core, 0, 0.0)
    loaded(core, 0, 1, 0.0)
    run_to_idle(core)
    assert core.sequences[1].state == DONE
    assert core.engines[0].free_blocks == 40


def test_pulled_requests_that_fill_the_cache_to_a_block_border_still_join() -> None:
    # Each prompt ends one token after a block border; with blocks for all but that token none could ever join.
    profile = replace(SMALL, kv_tokens=16)
    core = started([Leg(0, 5, 3, "pull", []), Leg(1, 5, 3, "pull", [])], profile)
    begin_step(core, 0, 0.0)
    assert core.engines[0].pulls == 2
    loaded(core, 0, 0, 0.0)
    loaded(core, 0, 1, 0.0)
    run_to_idle(core)
    assert [core.sequences[s].state for s in (0, 1)] == [DONE, DONE]


def test_an_engine_that_preempts_its_only_sequence_goes_on_with_what_waits() -> None:
    # The decoding sequence finds no block because one whose transfer is complete holds the rest; an engine that
    # went idle here would never wake.
    core = started([Leg(0, 12, 12, "local", []), Leg(1, 20, 4, "pull", [])], replace(SMALL, kv_tokens=32))
    begun(core)
    loaded(core, 0, 1, 0.0)
    end_step(core, 0)
    begun(core, 1.0)
    assert core.engines[0].preemptions == 1
    assert core.sequences[1].state == DECODING
    end_step(core, 0)
    run_to_idle(core, 2.0)
    assert [core.sequences[s].state for s in (0, 1)] == [DONE, DONE]


def test_an_abort_frees_everything_in_every_state() -> None:
    profile = replace(SMALL, max_num_seqs=3)
    legs = [
        Leg(0, 6, 9, "local", [0]),
        Leg(1, 6, 1, "prefill", [0]),
        Leg(2, 20, 9, "pull", [0, 1]),
        Leg(3, 60, 9, "local", [0, 2]),
        Leg(4, 6, 9, "local", []),
        Leg(5, 20, 9, "pull", []),
    ]
    core = core_with(legs, profile)
    for s in (5, 2, 0, 1, 3, 4):
        submit(core, 0, s)
    begun(core)
    loaded(core, 0, 5, 0.0)
    # In the step under way: a prefill that completes, one that does not; beside it a pull and a finished transfer.
    states = [int(core.sequences[s].state) for s in (2, 5, 4)]
    assert states == [PULLING, LOADED, WAITING]
    assert core.engines[0].prefilling == 3
    for s in (3, 2, 5, 4, 0):
        abort(core, 0, s)
        abort(core, 0, s)  # one that is gone already
    end_step(core, 0)
    assert core.sequences[1].state == HELD
    abort(core, 0, 1)
    assert core.engines[0].free_blocks == 40
    assert not begin_step(core, 0, 9.0)


def test_a_record_limits_contradiction_is_refused() -> None:
    with pytest.raises(ConfigError, match="no multiple of KV blocks of 16"):
        new_core(A40_3B, 1, 1, entry_tokens=24)
    with pytest.raises(ConfigError, match="below max_num_seqs"):
        new_core(replace(A40_3B, max_num_batched_tokens=64), 1, 1)


def planned(n_sequences: int = 2, profile=SMALL, output: int = 60, chain: int = 0) -> Core:
    """A run of planned decode steps under way from 10 s on."""
    core = started([Leg(s, 9, output, "local", list(range(chain))) for s in range(n_sequences)], profile, 0, True)
    begun(core)
    end_step(core, 0)
    begun(core, 10.0)
    assert core.engines[0].planned_steps == output - 1
    return core


@pytest.mark.parametrize("n", [1, 2, 7, 30, 59])
def test_a_run_of_steps_is_cut_at_the_end_of_the_step_under_way(n: int) -> None:
    core = planned()
    ends = 10.0 + np.cumsum([step_time_s(SMALL_STEP, 2.0, 2.0 * (9 + k)) for k in range(59)])
    interrupt(core, 0, float(ends[n - 1] - 1e-6))
    assert core.engines[0].planned_steps == n
    assert core.engines[0].step_end_s == pytest.approx(ends[n - 1], abs=1e-12)


def test_what_arrives_as_a_step_ends_waits_for_the_next_as_without_runs() -> None:
    core = planned()
    first_end_s = 10.0 + float(core.engines[0].step_s)
    interrupt(core, 0, first_end_s)
    assert core.engines[0].planned_steps == 2
    interrupt(core, 0, 10.0)
    assert core.engines[0].planned_steps == 1


def test_an_interrupt_of_an_idle_or_single_step_changes_nothing() -> None:
    core = started([Leg(0, 9, 5, "local", [])], macro_steps=True)
    interrupt(core, 0, 0.0)
    begun(core)
    end_s = float(core.engines[0].step_end_s)
    interrupt(core, 0, 0.0)
    assert core.engines[0].step_end_s == end_s


def test_blocks_are_brought_up_to_date_in_the_middle_of_a_run() -> None:
    single = started([Leg(0, 9, 60, "local", [])])
    run = planned(n_sequences=1)
    begun(single)
    end_step(single, 0)
    now_s = 10.0
    for _ in range(59):
        begun(single, now_s)
        settle_blocks(run, 0, now_s + 1e-7)
        assert free_queue(run) == free_queue(single)
        now_s = float(single.engines[0].step_end_s)
        end_step(single, 0)
    end_step(run, 0)
    assert run.sequences[0].finish_s == pytest.approx(single.sequences[0].finish_s, abs=1e-9)
    assert run.engines[0].free_blocks == single.engines[0].free_blocks == 40


def test_a_run_is_not_planned_where_it_could_run_out_of_blocks_or_something_waits() -> None:
    tight = started([Leg(s, 9, 60, "local", []) for s in range(3)], macro_steps=True)
    begun(tight)
    end_step(tight, 0)
    begun(tight, 1.0)
    assert tight.engines[0].planned_steps == 1
    waiting = started([Leg(s, 2, 9, "local", []) for s in range(6)], macro_steps=True)
    begun(waiting)
    end_step(waiting, 0)
    begun(waiting, 1.0)
    assert waiting.engines[0].waiting_head != NONE
    assert waiting.engines[0].planned_steps == 1


@pytest.mark.parametrize("n_sequences", [2, 3, 4])
def test_runs_end_before_the_cache_overflows(n_sequences: int) -> None:
    preemptions = []
    for kv_blocks in range(16, 52):
        legs = [Leg(s, 9 + s, 40 + 7 * s, "local", []) for s in range(n_sequences)]
        profile = replace(SMALL, kv_tokens=4 * kv_blocks, max_num_batched_tokens=64)
        run, single = (started(legs, profile, macro_steps=macro_steps) for macro_steps in (True, False))
        run_to_idle(run)
        run_to_idle(single)
        assert run.sequences.finish_s == pytest.approx(single.sequences.finish_s, abs=1e-9)
        assert run.engines[0].preemptions == single.engines[0].preemptions
        preemptions.append(int(run.engines[0].preemptions))
    assert max(preemptions) > 0 == preemptions[-1]
