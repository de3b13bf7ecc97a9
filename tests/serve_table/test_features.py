"""Prompts, their lengths and their block hashes."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from serve_table.endpoints import ENDPOINTS, Endpoint
from serve_table.errors import ConfigError
from serve_table.features import BytesPerToken, FileTokenizer, PromptFeatures, PromptReader
from serve_table.prefix_index import PrefixIndex
from serve_table.prompt import Prompt, read_prompt
from serve_table.request_body import is_taken_as_it_is, parse_fields

CHAT, COMPLETIONS = ENDPOINTS["/v1/chat/completions"], ENDPOINTS["/v1/completions"]
RESPONSES = ENDPOINTS["/v1/responses"]


def reader(**fields: Any) -> PromptReader:
    return PromptReader(hash_block_tokens=64, salt=b"salt", **fields)


def prompt(value: Any) -> Prompt:
    return read_prompt(parse_fields(json.dumps({"prompt": value}).encode()), COMPLETIONS)


def chat(*texts: Any, **fields: Any) -> Prompt:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    return read_prompt(parse_fields(json.dumps({"messages": messages, **fields}).encode()), CHAT)


def measure(value: Any, identity: bytes = b"m", **fields: Any) -> PromptFeatures:
    return reader(**fields).measure(prompt(value), identity)


@pytest.mark.parametrize(("n", "blocks"), [(0, 0), (1, 0), (63, 0), (64, 0), (65, 1), (128, 1), (129, 2)])
def test_ids_have_exact_length_and_whole_blocks_never_all_of_it(n: int, blocks: int) -> None:
    measured = measure([7] * n)
    assert (measured.tokens, measured.source, len(measured.block_hashes)) == (n, "ids", blocks) if n else True
    assert len(set(measured.block_hashes)) == blocks


def test_text_is_measured_in_bytes_until_usage_teaches_better() -> None:
    text = "word " * 200
    prompts = reader()
    before = prompts.measure(prompt(text), b"m")
    assert (before.tokens, before.source, before.block_tokens) == (250.0, "bytes", 64)
    for _ in range(3):
        prompts.observe(prompt(text), 500)
    after = prompts.measure(prompt(text), b"m")
    assert (after.tokens, after.block_tokens) == (500.0, 128)
    # The borders of blocks stay, so that what was sent before is still found.
    assert after.block_hashes == before.block_hashes
    assert prompts.measure(chat(text), b"m").tokens == pytest.approx(254, abs=2)  # chat has a ratio of its own


def test_the_ratio_follows_a_change_slowly_and_ignores_nonsense() -> None:
    ratio = BytesPerToken()
    for _ in range(50):
        ratio.observe(400, 100)
    ratio.observe(400, 400)
    assert 3.0 < ratio.ratio < 4.0
    before = ratio.ratio
    ratio.observe(0, 5)
    ratio.observe(5, 0)
    assert ratio.ratio == before


@given(st.text(max_size=600), st.text(max_size=600), st.integers(1, 8))
def test_hashes_agree_exactly_as_far_as_the_texts_do(a: str, b: str, block_tokens: int) -> None:
    prompts = PromptReader(hash_block_tokens=block_tokens, salt=b"s")
    one, two = (prompts.measure(Prompt("text", t.encode(), None, True), b"") for t in (a, b))
    block_bytes = 4 * block_tokens
    for i, (x, y) in enumerate(zip(one.block_hashes, two.block_hashes, strict=False)):
        end = (i + 1) * block_bytes
        assert (x == y) == (a.encode()[:end] == b.encode()[:end])
    assert all(0 <= h < 2**63 for h in one.block_hashes)
    assert len(one.block_hashes) * one.block_tokens <= max(one.tokens, 1)


def test_kind_model_salt_and_router_keep_hashes_apart() -> None:
    ids, text = measure([1] * 200), measure("1" * 2000)
    seen = [ids.block_hashes, text.block_hashes]
    seen.append(measure("1" * 2000, identity=b"other").block_hashes)
    seen.append(PromptReader(64, b"other salt").measure(prompt("1" * 2000), b"m").block_hashes)
    seen.append(measure([2] * 200).block_hashes)
    assert len({block for hashes in seen for block in hashes}) == sum(map(len, seen))


def test_a_longer_conversation_starts_with_the_shorter_one() -> None:
    prompts = reader()
    first = prompts.measure(chat("question " * 100), b"m").block_hashes
    second = prompts.measure(chat("question " * 100, "answer " * 100, "and then?"), b"m").block_hashes
    assert len(first) >= 3
    assert second[: len(first)] == first
    assert prompts.measure(chat("question " * 100, tools=[{"type": "function"}]), b"m").block_hashes[0] != first[0]


def test_text_parts_are_text_and_other_parts_are_not() -> None:
    assert chat([{"type": "text", "text": "abc"}]).text == chat("abc").text
    picture = chat([{"type": "image_url", "image_url": {"url": "x" * 10_000}}])
    assert not picture.plain
    assert len(picture.text) < 100


@pytest.mark.parametrize(
    ("value", "kind", "plain"),
    [
        ("a", "text", True),
        (["a"], "text", True),
        ([1, 2], "ids", True),
        ([[1, 2]], "ids", True),
        (["a", "b"], "unknown", False),
        ([[1], [2]], "unknown", False),
        ([-1], "unknown", False),
        ([1, "a"], "unknown", False),
        ([], "unknown", False),
        (5, "unknown", False),
        ({"a": 1}, "unknown", False),
    ],
)
def test_kinds_of_completion_prompts(value: Any, kind: str, plain: bool) -> None:
    assert (prompt(value).kind, prompt(value).plain) == (kind, plain)


def test_kinds_of_other_prompts() -> None:
    assert read_prompt(parse_fields(b'{"input": "hi"}'), RESPONSES).text == b"hi"
    assert read_prompt(parse_fields(b'{"input": [{"role": "user", "content": "hi"}]}'), RESPONSES).kind == "messages"
    assert read_prompt(parse_fields(b"{}"), CHAT).kind == "unknown"
    assert read_prompt(parse_fields(b'{"messages": 5}'), CHAT).kind == "unknown"


def test_a_tokenizer_gives_exact_lengths(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    measured = measure("a b c d e", tokenizer=FileTokenizer(tmp_path))
    assert (measured.tokens, measured.source) == (5.0, "tokenizer")


def test_token_ids_are_known_only_where_engines_take_the_prompt_as_it_is(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    prompts = reader(tokenizer=FileTokenizer(tmp_path))
    assert prompts.measure(prompt([4, 5]), b"m", is_taken_as_it_is=True).token_ids == [4, 5]
    assert prompts.measure(prompt([4, 5]), b"m").token_ids is None
    known = prompts.measure(prompt("a b a"), b"m", is_taken_as_it_is=True)
    assert known.token_ids == [0, 1, 0]
    assert prompts.measure(chat("a b a"), b"m", is_taken_as_it_is=True).token_ids is None
    assert reader().measure(prompt("a b a"), b"m", is_taken_as_it_is=True).token_ids is None
    # An engine that counts otherwise has another tokenizer.
    prompts.observe(prompt("a b a"), 3, known)
    assert prompts.measure(prompt("a"), b"m", is_taken_as_it_is=True).token_ids == [0]
    prompts.observe(prompt("a b a"), 4, known)
    after = prompts.measure(prompt("a"), b"m", is_taken_as_it_is=True)
    assert (after.token_ids, after.tokens, after.source) == (None, 1.0, "tokenizer")


@pytest.mark.parametrize(
    ("endpoint", "fields", "as_it_is"),
    [
        (COMPLETIONS, {}, True),
        (COMPLETIONS, {"add_special_tokens": True, "truncate_prompt_tokens": None}, True),
        (COMPLETIONS, {"add_special_tokens": False}, False),
        (COMPLETIONS, {"truncate_prompt_tokens": 100}, False),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, False),
        (CHAT, {}, False),
        (RESPONSES, {}, False),
    ],
)
def test_which_prompts_engines_take_as_they_are(endpoint: Endpoint, fields: dict[str, Any], as_it_is: bool) -> None:
    assert is_taken_as_it_is(parse_fields(json.dumps(fields).encode()), endpoint) == as_it_is


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer.json there"):
        FileTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer.json: "):
        FileTokenizer(tmp_path)


def test_index_finds_prefixes_and_forgets_the_oldest() -> None:
    index = PrefixIndex(["a", "b"], capacity_blocks=4)
    index.record("a", [1, 2, 3])
    assert [index.cached_blocks("a", hashes) for hashes in ([1, 2, 3, 4], [1, 9], [5], [])] == [3, 1, 0, 0]
    assert index.cached_blocks("b", [1]) == 0
    index.record("a", [7, 8])
    # The oldest prefix lost its tail, not its head.
    assert index.cached_blocks("a", [1, 2, 3]) == 2
    assert index.n_blocks("a") == 4
    index.clear("a")
    assert index.cached_blocks("a", [7]) == 0
