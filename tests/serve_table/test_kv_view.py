"""How far an engine's KV events can be trusted: gaps, restarts, late joins, faults."""

import logging
from typing import Any

import pytest
from kv_publisher import AllBlocksCleared, payload, removed, stored

from serve_table.errors import ConfigError
from serve_table.kv_endpoint import KvEndpoint, endpoints_by_engine
from serve_table.kv_view import KvView
from serve_table.token_chain import TokenChain

PREFIX = stored([1, 2], range(4))


def view() -> KvView:
    return KvView("http://engine", b"salt")


def heard(*messages: tuple[int, Any], into: KvView | None = None) -> KvView:
    known = into or view()
    for sequence, event in messages:
        known.receive(sequence, payload(event))
    return known


def cached(known: KvView) -> int:
    return known.blocks.cached_tokens(TokenChain(b"salt", range(5)))


def test_a_view_from_the_first_message_on_is_exact() -> None:
    assert not view().usable
    known = heard((0, PREFIX), (1, removed(2)))
    assert (known.exact, known.events, known.gaps, cached(known)) == (True, 2, 0, 2)


def test_a_late_view_is_not_exact_until_the_cache_is_cleared() -> None:
    known = heard((7, PREFIX), (8, removed(2)))
    assert (known.usable, known.exact, known.gaps, cached(known)) == (True, False, 0, 2)
    heard((9, AllBlocksCleared()), (10, stored([5], [0, 1])), into=known)
    assert (known.exact, cached(known)) == (True, 2)


def test_a_gap_forgets_what_may_have_been_removed() -> None:
    known = heard((0, PREFIX), (2, stored([9], [7, 8])))
    assert (known.usable, known.exact, known.gaps, cached(known), len(known.blocks)) == (True, False, 1, 0, 1)


def test_a_restarted_engine_begins_with_nothing() -> None:
    known = heard((0, PREFIX), (1, PREFIX), (0, stored([5], [0, 1])))
    assert (known.exact, known.gaps, cached(known)) == (True, 0, 2)
    # Its first messages were missed.
    known = heard((0, PREFIX), (1, PREFIX), (2, PREFIX), (1, stored([5], [0, 1])))
    assert (known.exact, known.gaps, cached(known)) == (False, 1, 2)


def test_a_failed_engine_is_doubted_until_its_next_message() -> None:
    known = heard((0, PREFIX))
    known.doubt()
    assert not known.usable
    heard((1, stored([3], [4, 5], parent=2)), into=known)
    assert (known.exact, cached(known)) == (True, 4)  # it had not restarted
    known.doubt()
    heard((0, stored([5], [0, 1])), into=known)
    assert (known.exact, cached(known)) == (True, 2)  # it had


@pytest.mark.parametrize("event", [stored([1], [1, 2], group_idx=1), ["BlockStored", "?"], "nonsense"])
def test_an_engine_that_is_not_understood_is_not_followed_until_it_begins_anew(
    event: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rutter"):
        known = heard((0, PREFIX), (1, event), (2, PREFIX), (3, event))
    assert (known.usable, len(known.blocks)) == (False, 0)
    assert [record.message.count("KV events of http://engine are not used") for record in caplog.records] == [1]
    assert heard((0, PREFIX), into=known).exact


def test_endpoints_are_paired_with_engines() -> None:
    urls = ["http://a", "http://b"]
    assert endpoints_by_engine("--f", urls, []) == {}
    both = ["tcp://10.0.0.1:5557,tcp://10.0.0.1:5558", "-"]
    assert endpoints_by_engine("--f", urls, both) == {
        "http://a": KvEndpoint("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")
    }
    with pytest.raises(ConfigError, match="--f needs one endpoint for each of 2 engines, - for none: 1 given"):
        endpoints_by_engine("--f", urls, ["-"])


@pytest.mark.parametrize("text", ["tcp://h:1", "tcp://[::1]:65535", "ipc:///run/kv.sock", "tcp://*:5557,tcp://h:5"])
def test_endpoints_of_zeromq_are_taken(text: str) -> None:
    endpoint = KvEndpoint.parse(text)
    assert text == ",".join(part for part in (endpoint.live, endpoint.replay) if part)
    assert endpoint.is_listened_on == text.startswith("tcp://*")


@pytest.mark.parametrize(
    "text", ["", "h:1", "http://h:1", "tcp://h", "tcp://h:0", "tcp://h:65536", "tcp://h:1,h:2", "tcp://h:1,tcp://*:2"]
)
def test_other_endpoints_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="KV events from ") as error:
        KvEndpoint.parse(text)
    assert "\n" not in str(error.value)
