"""What counts as a token in a stream, and when."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.stream_timing import StreamTiming


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chat(**delta):
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])


DONE = b"data: [DONE]\n\n"
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})


def fed(*timed):
    timing = StreamTiming()
    for now_s, data in timed:
        timing.feed(data, now_s)
    return timing


@pytest.mark.parametrize("empty", [chat(role="assistant", content=""), chat(content=None), b": ping\n\n", USAGE])
def test_f08_first_token_is_the_first_event_with_text(empty):
    timing = fed((0.010, empty), (0.3, chat(content="Hi")), (0.4, chat(content="!")), (0.5, DONE))
    assert (timing.first_token_s, timing.last_token_s, timing.n_token_events) == (0.3, 0.4, 2)
    assert timing.flaw() is None


def test_reasoning_counts_as_text():
    assert fed((1.0, chat(reasoning_content="hm"))).first_token_s == 1.0


def test_f15_tpot_takes_tokens_from_usage_not_events():
    timing = fed((1.0, event(choices=[{"text": "a b c d"}])), (2.0, event(choices=[{"text": "e"}])))
    assert timing.tpot_s() == 1.0  # two events, no usage
    timing.feed(event(choices=[], usage={"prompt_tokens": 1, "completion_tokens": 5}), 2.5)
    assert timing.tpot_s() == 0.25
    one = fed((1.0, event(choices=[{"text": "a"}], usage={"completion_tokens": 1})), (1.1, DONE))
    assert one.tpot_s() is None


def test_a_stream_of_only_done_has_no_times():
    timing = fed((1.0, DONE))
    assert (timing.first_token_s, timing.tpot_s(), timing.flaw()) == (None, None, "the stream held no token")


def test_text_that_looks_like_an_event_is_text():
    timing = fed((1.0, event(choices=[{"text": "\ndata: [DONE]\n\n"}])))
    assert timing.n_token_events == 1
    assert not timing.done


STREAM = chat(role="assistant") + chat(content="a") + b": ping\r\n\r\n" + chat(content="ü") + USAGE + DONE


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_may_be_split_anywhere(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    timing = fed(*((float(i), STREAM[a:b]) for i, (a, b) in enumerate(pairwise(edges))))
    assert timing.flaw() is None
    assert (timing.n_token_events, timing.prompt_tokens, timing.output_tokens) == (2, 7, 3)
