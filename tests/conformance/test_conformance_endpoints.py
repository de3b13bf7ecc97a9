"""What is there besides the generative endpoints: models, health, version, tokens, metrics, the cache's reset."""

import pytest
from engine_under_test import CHAT, COMPLETIONS, Engine
from shapes import MODELS, TOKENIZED, assert_shape

METRICS = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:external_prefix_cache_hits": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:request_success": "counter",
    "vllm:nixl_xfer_time_seconds": "histogram",
    "vllm:nixl_num_failed_transfers": "counter",
    "vllm:nixl_num_kv_expired_reqs": "counter",
}
"""Everything that Rutter and its tests read of an engine."""
TEXTS = ["Where should this prefill?", "naïve 서울 🙂", " two  spaces ", "line\nbreak\t"]


def test_models_are_listed_with_their_context(engine: Engine) -> None:
    document = engine.get("/v1/models").json()
    assert_shape(document, MODELS)
    assert document["data"][0]["id"] == engine.model


def test_health_is_an_empty_200(engine: Engine) -> None:
    response = engine.get("/health")
    assert (response.status_code, response.content) == (200, b"")


def test_the_version_is_told(engine: Engine) -> None:
    assert_shape(engine.get("/version").json(), {"version": str})


@pytest.mark.parametrize("text", TEXTS)
def test_tokenize_counts_what_usage_counts_and_detokenize_inverts_it(engine: Engine, text: str) -> None:
    tokens = engine.answer("/tokenize", {"prompt": text})
    assert_shape(tokens, TOKENIZED)
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == engine.max_model_len
    usage = engine.answer(COMPLETIONS, engine.completion(prompt=text))["usage"]
    assert usage["prompt_tokens"] == tokens["count"]
    assert engine.answer("/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": text}


def test_tokenize_applies_the_chat_template(engine: Engine) -> None:
    body = engine.chat()
    tokens = engine.answer("/tokenize", {"messages": body["messages"]})
    assert tokens["count"] == engine.answer(CHAT, body)["usage"]["prompt_tokens"]


def test_each_turn_of_a_conversation_begins_with_the_one_before(engine: Engine) -> None:
    turns = [{"role": "user", "content": "first"}]
    first = engine.answer("/tokenize", {"messages": turns, "add_generation_prompt": False})["tokens"]
    turns += [{"role": "assistant", "content": "answer"}, {"role": "user", "content": "second"}]
    second = engine.answer("/tokenize", {"messages": turns, "add_generation_prompt": False})["tokens"]
    assert second[: len(first) - 1] == first[:-1]
    assert len(second) > len(first)


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_published_with_its_type_and_labels(engine: Engine, name: str) -> None:
    response = engine.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    # Counters are announced with their samples' suffix or without, as the exposition format goes.
    assert {f"# TYPE {name} {METRICS[name]}", f"# TYPE {name}_total {METRICS[name]}"} & set(lines)
    suffix = {"gauge": "", "counter": "_total", "histogram": "_count"}[METRICS[name]]
    samples = [line for line in lines if line.startswith(f"{name}{suffix}{{")]
    assert samples
    assert all(f'model_name="{engine.model}"' in sample and 'engine="0"' in sample for sample in samples)


def test_requests_are_counted_by_how_they_finished(engine: Engine) -> None:
    lines = engine.get("/metrics").text.splitlines()
    samples = [line for line in lines if line.startswith("vllm:request_success_total{")]
    for reason in ("stop", "length", "abort", "error", "repetition"):
        assert any(f'finished_reason="{reason}"' in sample for sample in samples)


def test_counters_count_tokens_exactly(engine: Engine) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:prefix_cache_queries_total")
    before = [engine.metric(name) for name in names]
    done = engine.metric("vllm:request_success_total", finished_reason="length")
    engine.answer(COMPLETIONS, engine.completion(100, max_tokens=7))
    for name, was, more in zip(names, before, (100, 7, 100), strict=True):
        assert engine.metric(name) == was + more, name
    assert engine.metric("vllm:request_success_total", finished_reason="length") == done + 1


def test_cache_hits_are_counted_in_tokens(engine: Engine) -> None:
    body = engine.completion(4 * engine.block_tokens + 1)
    engine.answer(COMPLETIONS, body)
    before = engine.metric("vllm:prefix_cache_hits_total")
    engine.answer(COMPLETIONS, body)
    assert engine.metric("vllm:prefix_cache_hits_total") == before + 4 * engine.block_tokens


def test_a_reset_empties_an_idle_engines_cache(engine: Engine) -> None:
    body = engine.completion(200)
    engine.answer(COMPLETIONS, body)
    engine.until_idle()
    response = engine.client.post(f"{engine.url}/reset_prefix_cache")
    assert (response.status_code, response.json()) == (200, {"success": True})
    usage = engine.answer(COMPLETIONS, body)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
