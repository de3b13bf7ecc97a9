"""Parts of a calibration that need no engine: reading streams, taking gaps, planning."""

from dataclasses import replace

import numpy as np
import pytest

from pipelines.calibration_client import Prompts, Stream
from pipelines.calibration_measure import batch_gap, left_out_text, longest_gap
from pipelines.calibration_plan import (
    KV_SHARE,
    Limits,
    Plan,
    Task,
    decode_output_tokens,
    plan_round,
    prefill_lengths,
    prefill_steps_s,
)
from serve_table.errors import ConfigError, EngineProtocolError
from serve_table.step_time import A40_3B, step_time_s

LIMITS = Limits(16_384, 60_000, 64, 2048)


def planned(limits: Limits = LIMITS, n_pairs: int = 2, slowness: float = 1.0, budget_s: float = 200.0) -> Plan:
    return plan_round(3, n_pairs, limits, A40_3B, slowness, budget_s)


def stream_of(*times_s: float, output_tokens: int | None = None) -> Stream:
    return Stream(token_times_s=list(times_s), output_tokens=output_tokens)


def event(text: str, finish: str = "null") -> bytes:
    return b'data: {"choices":[{"index":0,"text":"%b","finish_reason":%b}]}\n\n' % (text.encode(), finish.encode())


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("n_bytes", [1, 7, 1000])
def test_tokens_are_counted_however_the_bytes_are_cut_and_also_without_text(n_bytes: int) -> None:
    content = event("a") + event("") + b": ping\n\n" + event("b", '"length"') + USAGE + DONE
    stream = Stream(sent_s=10.0)
    for k in range(0, len(content), n_bytes):
        stream.feed(content[k : k + n_bytes], 11.0 + k)
    stream.end()
    assert len(stream.token_times_s) == 3
    assert (stream.prompt_tokens, stream.output_tokens) == (5, 3)
    assert stream.token_times_s == sorted(stream.token_times_s)
    assert stream.ttft_s == stream.token_times_s[0] - 10.0
    assert stream.events_per_token == 1.0


def test_a_finish_reason_of_its_own_is_no_token() -> None:
    stream = Stream()
    for k, part in enumerate((event("a"), event("b"), event("c"), event("", '"length"'), USAGE, DONE)):
        stream.feed(part, float(k))
    stream.end()
    assert stream.token_times_s == [0.0, 1.0, 2.0]


def test_several_tokens_in_an_event_shorten_the_gap_of_one() -> None:
    running = [stream_of(*np.arange(20.0), output_tokens=40)]
    assert batch_gap(running, 100) == (0.5, 100 + 10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ended without"),
        (event("a"), "ended without"),
        (USAGE + DONE, "ended without a token"),
        (event("a") + b'data: {"error": {"message": "gone"}}\n\n' + DONE, "error event: .*gone"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(content: bytes, message: str) -> None:
    stream = Stream()
    with pytest.raises(EngineProtocolError, match=message):
        stream.feed(content, 1.0)
        stream.end()


def test_a_batch_s_gap_is_taken_while_all_run() -> None:
    # The second joins at 10 and the steps are twice as long from there; the first has a stall of 9 in its middle.
    first = stream_of(*range(10), *np.arange(10.0, 30.0, 2.0), *np.arange(39.0, 60.0, 2.0))
    second = stream_of(*np.arange(10.0, 80.0, 2.0))
    found = batch_gap([first, second], 100)
    assert found is not None
    gap_s, context_tokens = found
    assert gap_s == 2.0
    assert 200 + 25 < context_tokens < 200 + 50


def test_streams_that_hardly_meet_give_no_gap() -> None:
    assert batch_gap([stream_of(*range(10)), stream_of(*range(6, 20))], 100) is None


def test_the_longest_gap_is_that_of_the_disturbed_step() -> None:
    quiet = [float(k) for k in range(10)]
    after = [9.0 + 5.0 + k for k in range(10)]
    running = [stream_of(*quiet, *after), stream_of(*quiet, *after)]
    assert longest_gap(running, 100, 8.5, 14.0) == (5.0, 200 + 18)
    # The answer may be seen just before the streams' own event of the same step.
    assert longest_gap(running, 100, 8.5, 13.9) == (5.0, 200 + 18)


def test_a_disturbance_that_outlives_a_stream_gives_no_gap() -> None:
    running = [stream_of(*range(20)), stream_of(*range(10))]
    assert longest_gap(running, 100, 8.5, 9.5) is None
    assert longest_gap(running, 100, 8.5, 8.6) is None
    assert longest_gap([stream_of(*range(20))], 100, -1.0, 5.0) is None


def test_prompts_never_repeat_and_depend_on_the_nonce() -> None:
    prompts = Prompts(1)
    first, second = prompts.take(64), prompts.take(64)
    assert first[:16] != second[:16]
    assert len(first) == 64
    assert Prompts(1).take(64) == first != Prompts(2).take(64)


def test_a_round_has_every_kind_from_short_to_the_longest_prompt() -> None:
    plan = planned()
    assert {task.kind for task in plan.tasks} == {"prefill", "decode", "interference", "handoff"}
    assert plan.left_out == ()
    assert prefill_lengths(LIMITS)[0] == 32
    assert prefill_lengths(LIMITS)[-1] == 16_384 - 64
    prefills = [task for task in plan.tasks if task.kind == "prefill"]
    assert {task.engine for task in prefills} == {0, 1, 2}
    assert {task.engine for task in plan.tasks if task.kind == "handoff"} == {0, 1}
    batches = {task.batch for task in plan.tasks if task.kind == "decode"}
    assert batches == {1, 2, 4, 8, 16, 32, 64}


def test_batches_fit_into_the_engine_s_kv_and_context() -> None:
    limits = Limits(2048, 8000, 128, 2048)
    decodes = [task for task in planned(limits).tasks if task.kind == "decode"]
    for task in decodes:
        held = task.batch * (task.prompt_tokens + decode_output_tokens(task.batch, task.prompt_tokens, limits))
        assert held <= KV_SHARE * 8000
        assert task.prompt_tokens < 2048
    assert max(task.batch for task in decodes) == 32
    assert max(task.prompt_tokens for task in planned(limits).tasks) < 2048


def test_a_disturbing_prompt_fits_into_one_step() -> None:
    for task in planned(Limits(16_384, 60_000, 64, 1024)).tasks:
        assert task.kind != "interference" or task.prompt_tokens + task.batch <= 1024


def test_without_prefill_engines_nothing_is_handed_off() -> None:
    assert {task.kind for task in planned(n_pairs=0).tasks} == {"prefill", "decode", "interference"}


def test_what_does_not_fit_into_the_time_is_the_dearest_and_is_named() -> None:
    whole = planned()
    plan = planned(budget_s=whole.round_s * 0.7)
    assert plan.round_s <= whole.round_s * 0.7
    assert plan.left_out
    assert max(task.estimate_s for task in plan.tasks) <= min(task.estimate_s for task in plan.left_out)
    assert {task.kind for task in plan.tasks} == {task.kind for task in whole.tasks}
    decode = next(task for task in plan.left_out if task.kind == "decode")
    assert f"decode of {decode.prompt_tokens} tokens x {decode.batch}" in left_out_text(plan.left_out)


def test_slow_engines_are_planned_as_slow() -> None:
    assert planned(slowness=3.0, budget_s=1000.0).round_s > 2.5 * planned().round_s


def test_too_little_time_says_how_much_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"takes at least \d+ s of engine time, 1 s are left of --budget-s"):
        planned(budget_s=1.0)


def test_a_prompt_s_steps_are_chunks_with_the_context_before_them() -> None:
    profile = replace(A40_3B, max_num_batched_tokens=1000)
    constants = profile.step.as_list()
    expected = step_time_s(constants, 1000, 0) + step_time_s(constants, 1000, 1000) + step_time_s(constants, 500, 2000)
    assert prefill_steps_s(2500, profile) == pytest.approx(expected)


def test_left_out_tasks_are_named_once() -> None:
    tasks = [Task("prefill", 8192, 0, engine, 1.0) for engine in range(3)]
    assert left_out_text(tasks) == "left out for want of time: prefill of 8192 tokens"
