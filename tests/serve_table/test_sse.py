"""Events are the same however the stream was cut into packets."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_table.sse import EventSplitter, event_data

PIECES = st.lists(
    st.sampled_from(
        [b"data: x", b"data:y", b": ping", b"\n", b"\n\n", b"\r\n", b"\r", b"\r\n\r\n", b"event: z", "é".encode()]
    ),
    max_size=20,
).map(b"".join)


def split(stream: bytes, cuts: list[int]) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter()
    events: list[bytes] = []
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(places):
        events += splitter.feed(stream[start:end])
    return events, splitter.tail


@settings(max_examples=400)
@given(PIECES, st.lists(st.integers(0, 1000), max_size=30))
def test_any_split_gives_the_same_events(stream: bytes, cuts: list[int]) -> None:
    events, tail = split(stream, cuts)
    assert (events, tail) == split(stream, [])
    assert b"".join(events) + tail == stream


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=20), max_size=8), st.data())
def test_data_comes_out_as_it_went_in(texts: list[str], data: st.DataObject) -> None:
    line_end = data.draw(st.sampled_from(["\n", "\r\n"]))
    stream = "".join(f"data: {text}{line_end}{line_end}" for text in texts).encode()
    cuts = data.draw(st.lists(st.integers(0, 1000), max_size=30))
    events, tail = split(stream, cuts)
    assert [event_data(event) for event in events] == [text.encode() for text in texts]
    assert tail == b""


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: one\n\n", b"one"),
        (b"data:one\n\n", b"one"),
        (b"data:  one\n\n", b" one"),
        (b"event: e\ndata: one\nid: 3\n\n", b"one"),
        (b"data: one\ndata: two\n\n", b"one\ntwo"),
        (b"data: one\r\ndata: two\r\n\r\n", b"one\ntwo"),
        (b"data\n\n", b""),
        (b": comment\n\n", None),
        (b"dataset: x\n\n", None),
        (b"\n\n", None),
    ],
)
def test_data_of_one_event(event: bytes, data: bytes | None) -> None:
    assert event_data(event) == data
