"""KV events as vLLM encodes them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_publisher import AllBlocksCleared, payload, removed, stored

from serve_table import kv_event
from serve_table.errors import KvEventError
from serve_table.kv_event import EventDecoder


def test_maps_as_vllm_encodes_them_now() -> None:
    events = EventDecoder().events(
        payload(
            stored([2**63 + 5, b"\x00" * 32], [1, 2, 3, 4], 7, extra_keys=[("salt",), None], session_id="s"),
            removed(9),
            AllBlocksCleared(),
        )
    )
    assert events == [
        kv_event.BlockStored(
            [2**63 + 5, b"\x00" * 32],
            7,
            [1, 2, 3, 4],
            2,
            medium="GPU",
            extra_keys=[["salt"], None],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
        kv_event.BlockRemoved([9], medium="GPU", group_idx=0),
        kv_event.AllBlocksCleared(),
    ]


def test_arrays_as_vllm_encoded_them_before() -> None:
    data = payload(
        ["BlockStored", [1], None, [5, 6], 2, None, "GPU"],
        ["BlockStored", [2], 1, [7, 8], 2, 3, "GPU", "adapter", [["adapter"]], "later", "fields"],
        ["BlockRemoved", [1], "GPU"],
        ["AllBlocksCleared"],
    )
    first, second, third, fourth = EventDecoder().events(data)
    assert first == kv_event.BlockStored([1], None, [5, 6], 2, medium="GPU")
    assert isinstance(second, kv_event.BlockStored)
    assert (second.adapter, second.extra_keys, second.parent_block_hash) == ("adapter", [["adapter"]], 1)
    assert (third, fourth) == (kv_event.BlockRemoved([1], medium="GPU"), kv_event.AllBlocksCleared())


def test_a_message_is_its_last_two_parts() -> None:
    sequence = (7).to_bytes(8, "big")
    for parts in ([b"topic", sequence, b"x"], [b"", b"", sequence, b"x"], [sequence, b"x"]):
        assert EventDecoder().message(parts) == (7, b"x")
    assert EventDecoder().message([b"", (-1).to_bytes(8, "big", signed=True), b""]) == (-1, b"")
    for parts in ([], [b"x"], [b"topic", b"short", b"x"]):
        with pytest.raises(KvEventError, match="without a sequence number"):
            EventDecoder().message(parts)


@given(st.binary(max_size=200))
def test_whatever_else_is_refused_with_one_error(data: bytes) -> None:
    try:
        events = EventDecoder().events(data)
    except KvEventError as error:
        assert "\n" not in str(error)
    else:
        assert all(isinstance(event, kv_event.Event) for event in events)


anything = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"]), st.lists(anything, max_size=6))
def test_events_of_another_shape_are_refused(name: str, fields: list[object]) -> None:
    keys = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "extra_keys")
    for event in ([name, *fields], {"type": name, **dict(zip(keys, fields, strict=False))}):
        try:
            decoded = EventDecoder().events(msgspec.msgpack.encode([0.0, [event]]))
        except KvEventError:
            continue
        assert [type(event).__name__ for event in decoded] == [name]
