"""The blocks of one engine by its events, against an engine that is known."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_publisher import AllBlocksCleared, payload, removed, stored

from serve_table.errors import KvEventError
from serve_table.kv_blocks import KvBlocks
from serve_table.kv_event import EventDecoder
from serve_table.token_chain import BlockKeys, TokenChain

SALT = b"salt"


def told(blocks: KvBlocks, *events: object) -> KvBlocks:
    for event in EventDecoder().events(payload(*events)):
        blocks.apply(event)
    return blocks


def cached(blocks: KvBlocks, *token_ids: int, **keys: str) -> int:
    return blocks.cached_tokens(TokenChain(SALT, token_ids, BlockKeys(**keys)))


def test_a_prefix_is_matched_in_whole_blocks_and_never_whole() -> None:
    blocks = told(KvBlocks(SALT), stored([1, 2], [10, 11, 12, 13]), stored([3], [14, 15], parent=2))
    assert cached(blocks, 10, 11, 12, 13, 14, 15, 16) == 6
    assert cached(blocks, 10, 11, 12, 13, 14, 15) == 4  # an engine computes the last token itself
    assert cached(blocks, 10, 11, 12, 99, 14, 15, 16) == 2
    assert cached(blocks, 12, 13, 14, 15, 16) == 0  # the same tokens at another place are another block
    assert cached(blocks, 10) == cached(blocks) == 0
    assert len(blocks) == 3


def test_removed_blocks_end_a_prefix_and_come_back() -> None:
    blocks = told(KvBlocks(SALT), stored([1, 2, 3], range(6)))
    assert cached(told(blocks, removed(2)), *range(7)) == 2
    assert cached(told(blocks, stored([2], [2, 3], parent=1)), *range(7)) == 6
    assert cached(told(blocks, AllBlocksCleared()), *range(7)) == 0
    assert len(blocks) == 0


def test_a_block_stays_until_its_last_copy_is_gone() -> None:
    blocks = told(KvBlocks(SALT), stored([1], [5, 6]), stored([1], [5, 6]), removed(1))
    assert cached(blocks, 5, 6, 7) == 2
    assert cached(told(blocks, removed(1)), 5, 6, 7) == 0
    assert cached(told(blocks, removed(1, 8)), 5, 6, 7) == 0


def test_blocks_after_unknown_ones_are_left_out() -> None:
    blocks = told(KvBlocks(SALT), stored([2], [12, 13], parent=1))
    assert (len(blocks), cached(blocks, 12, 13, 14)) == (0, 0)


def test_salt_and_adapter_keep_blocks_apart() -> None:
    salted = told(KvBlocks(SALT), stored([1, 2], range(4), extra_keys=[("mine",), None]))
    assert cached(salted, *range(5), cache_salt="mine") == 4
    assert cached(salted, *range(5)) == cached(salted, *range(5), cache_salt="other") == 0

    adapted = told(KvBlocks(SALT), stored([1, 2], range(4), lora_name="a", extra_keys=[("a", "s"), ("a",)]))
    assert adapted.adapters == {"a"}
    assert cached(adapted, *range(5), adapter="a", cache_salt="s") == 4
    assert cached(adapted, *range(5), adapter="a") == cached(adapted, *range(5), adapter="b", cache_salt="s") == 0

    older = told(KvBlocks(SALT), ["BlockStored", [1], None, [1, 2], 2, 7, "GPU"])
    assert cached(older, 1, 2, 3) == 0
    assert cached(older, 1, 2, 3, adapter="lora 7") == 2

    picture = told(KvBlocks(SALT), stored([1], [1, 2], extra_keys=[(("picture", 0),)]))
    assert cached(picture, 1, 2, 3) == 0


def test_blocks_of_other_tiers_and_engines_do_not_count() -> None:
    blocks = told(
        KvBlocks(SALT), stored([1], [1, 2], medium="CPU"), {**as_map(stored([2], [1, 2])), "locality": "REMOTE"}
    )
    assert len(blocks) == 0
    told(blocks, stored([1], [1, 2]), removed(1, medium="CPU"))
    assert cached(blocks, 1, 2, 3) == 2


def as_map(event: object) -> dict[str, object]:
    return {"type": type(event).__name__, **{name: getattr(event, name) for name in event.__struct_fields__}}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored([1], [1, 2], group_idx=1), "several groups"),
        (stored([1], [1, 2], kv_cache_spec_kind="sliding_window"), "sliding_window"),
        (stored([1], [1, 2], kv_cache_spec_kind="mamba"), "mamba"),
        (stored([1], [1, 2, 3], block_size=2), "1 blocks of 2 tokens with 3 tokens"),
        (stored([1], [], block_size=0), "1 blocks of 0 tokens"),
        (stored([1], [-1, 2**63]), "more than 64 bits"),
        (stored([1], [1, 2], extra_keys=[None, None]), "keys of 2"),
    ],
)
def test_caches_that_are_not_understood_are_refused(event: object, reason: str) -> None:
    with pytest.raises(KvEventError, match=reason):
        told(KvBlocks(SALT), event)


def test_blocks_of_two_sizes_are_refused() -> None:
    with pytest.raises(KvEventError, match="blocks of 4 and of 2 tokens"):
        told(KvBlocks(SALT), stored([1], [1, 2]), stored([2], [1, 2, 3, 4]))


def test_blocks_are_bounded() -> None:
    with pytest.raises(KvEventError, match="more than 2 blocks"):
        told(KvBlocks(SALT, max_blocks=2), stored([1, 2, 3], range(6)))


class KnownEngine:
    """An engine that keeps blocks in some order, copies too, and evicts the oldest of what is not in use."""

    def __init__(self, capacity: int, block: int) -> None:
        self.capacity, self.block = capacity, block
        self.held: OrderedDict[int, tuple[int, ...]] = OrderedDict()  # physical block -> the prefix that it ends
        self.fresh = 0

    def name(self, prefix: tuple[int, ...]) -> int:
        return hash(prefix) & (2**64 - 1)

    def cached_tokens(self, prompt: tuple[int, ...]) -> int:
        held = set(self.held.values())
        n = 0
        while n + self.block < len(prompt) and prompt[: n + self.block] in held:
            n += self.block
        return n

    def serve(self, prompt: tuple[int, ...]) -> list[object]:
        events: list[object] = []
        reused = self.cached_tokens(prompt)
        for end in range(self.block, reused + 1, self.block):
            mine = next(key for key, prefix in self.held.items() if prefix == prompt[:end])
            self.held.move_to_end(mine)
        for end in range(reused + self.block, len(prompt) + 1, self.block):
            if len(self.held) >= self.capacity:
                oldest = next((k for k, prefix in self.held.items() if prompt[: len(prefix)] != prefix), None)
                if oldest is None:
                    break
                events.append(removed(self.name(self.held.pop(oldest))))
            self.fresh += 1
            self.held[self.fresh] = prompt[:end]
            parent = self.name(prompt[: end - self.block]) if end > self.block else None
            events.append(stored([self.name(prompt[:end])], prompt[end - self.block : end], parent))
        return events


@given(st.integers(0, 10**6), st.integers(2, 30), st.sampled_from([1, 2, 5]))
def test_events_tell_exactly_what_the_engine_would_reuse(seed: int, capacity: int, block: int) -> None:
    rng = random.Random(seed)
    engine, blocks = KnownEngine(capacity, block), KvBlocks(SALT)
    matched = 0
    for _ in range(40):
        prompt = tuple(rng.choices((1, 2), k=rng.randrange(1, 6 * block)))
        matched += engine.cached_tokens(prompt)
        assert cached(blocks, *prompt) == engine.cached_tokens(prompt)
        events = engine.serve(prompt)
        if events:
            told(blocks, *events)
    assert len(blocks) == len(set(engine.held.values()))
