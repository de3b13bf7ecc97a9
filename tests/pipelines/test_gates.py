"""The correctness gates: what passes, and each fault that must not."""

import pytest
from emulated_engines import emulated_engine
from fake_engines import FakeCluster, fake_cluster

from pipelines import engine_probe
from pipelines.engine_urls import EngineUrls
from pipelines.gate_report import Gate, GateReport
from pipelines.gates import gates, run_gates
from serve_table.errors import ClusterError, ConfigError

ORDER = ["health", "models", "versions", "pairs", "token counts", "greedy text", "prefix caches"]


def report_on(cluster: FakeCluster, model: str | None = None) -> GateReport:
    return gates(cluster, model, transport=cluster.transport)


def only_failure(report: GateReport) -> Gate:
    (gate,) = report.failed
    assert gate.advice is not None
    assert not report.passed
    with pytest.raises(ClusterError, match=gate.name):
        report.require_passed()
    return gate


def test_a_cluster_without_fault_passes_every_gate_and_ends_with_empty_caches() -> None:
    cluster = fake_cluster()
    report = report_on(cluster)
    assert [gate.name for gate in report.gates] == ORDER
    assert report.passed, report.failed
    report.require_passed()
    assert (report.model, report.engine_version) == ("tiny", "1.0")
    assert all(not engine.cache for engine in (*cluster.prefill, *cluster.decode))


def test_every_pair_hands_over_every_prompt() -> None:
    cluster = fake_cluster(2, 3)
    assert report_on(cluster).passed
    for decode in cluster.decode:
        handles = [body["kv_transfer_params"] for body in decode.requests if "kv_transfer_params" in body]
        for prefill in cluster.prefill:
            # Once to warm the pair, and once a prompt.
            assert sum(handle["remote_host"] == prefill.url for handle in handles) == 5


def test_no_request_shares_a_cached_prefix_with_another_but_the_legs_of_one() -> None:
    cluster = fake_cluster(1, 2)
    report_on(cluster)
    for engine in cluster.decode:
        bodies = [body for body in engine.requests if body["max_tokens"] > 1]
        salts = [body["cache_salt"] for body in bodies]
        assert len(set(salts)) == len(salts)


def set_fault(cluster: FakeCluster, pool: str, name: str, value: object) -> None:
    setattr(getattr(cluster, pool)[-1], name, value)


@pytest.mark.parametrize(
    ("pool", "fault", "value", "gate", "words"),
    [
        ("decode", "text_salt", "x", "greedy text", "http://decode-1 alone gives another text"),
        ("prefill", "extra_prompt_tokens", 1, "token counts", "counted 101 prompt tokens of 100"),
        ("decode", "missing_output_tokens", 1, "token counts", "gave 15 of 16 tokens asked"),
        ("decode", "refuses_handles_of", "http://prefill-0", "pairs", "500: Internal server error"),
        ("prefill", "gives_handles", False, "pairs", "without kv_transfer_params"),
        ("decode", "has_reset", False, "prefix caches", "has no /reset_prefix_cache"),
        ("prefill", "reset_works", False, "prefix caches", "found 592 of 600 tokens cached"),
        ("decode", "version", "0.9", "versions", "0.9, 1.0"),
        ("decode", "model", "other", "models", "http://decode-1 serves other, not tiny"),
        ("decode", "max_model_len", 8192, "models", "[4096, 8192]"),
        ("prefill", "healthy", False, "health", "http://prefill-1 cannot be reached"),
    ],
)
def test_each_fault_fails_its_gate(pool: str, fault: str, value: object, gate: str, words: str) -> None:
    cluster = fake_cluster()
    set_fault(cluster, pool, fault, value)
    failed = {gate.name: gate for gate in report_on(cluster).failed}
    assert gate in failed
    assert words in " ".join(failed[gate].problems)
    assert failed[gate].advice


def test_one_engine_of_another_text_is_told_apart_from_those_of_the_same() -> None:
    cluster = fake_cluster(1, 3)
    cluster.decode[1].text_salt = "other weights"
    gate = only_failure(report_on(cluster))
    assert all("decode-1" in problem for problem in gate.problems)
    # Alone and with the prefill engine, for each of four prompts.
    assert len(gate.problems) == 8


def test_a_missing_reset_endpoint_is_said_with_how_to_enable_it() -> None:
    cluster = fake_cluster()
    cluster.decode[0].has_reset = False
    assert "VLLM_SERVER_DEV_MODE=1" in str(only_failure(report_on(cluster)).advice)


def test_where_usage_tells_no_cached_tokens_the_metric_does() -> None:
    cluster = fake_cluster()
    for engine in (*cluster.prefill, *cluster.decode):
        engine.tells_cached_tokens = False
    assert report_on(cluster).passed
    cluster.prefill[0].reset_works = False
    assert "592 of 600" in only_failure(report_on(cluster)).detail


def test_where_nothing_tells_cached_tokens_the_gate_fails_and_says_what_to_start_with() -> None:
    cluster = fake_cluster()
    cluster.decode[1].tells_cached_tokens = False
    cluster.decode[1].tells_metrics = False
    assert "--enable-prompt-tokens-details" in str(only_failure(report_on(cluster)).advice)


def test_a_reset_that_is_refused_while_blocks_are_held_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "RESET_RETRY_S", 0.001)
    cluster = fake_cluster()
    cluster.prefill[0].resets_refused = 3
    assert report_on(cluster).passed


def test_prompts_that_the_context_cannot_hold_are_left_out() -> None:
    cluster = fake_cluster()
    for engine in (*cluster.prefill, *cluster.decode):
        engine.max_model_len = 1000
    report = report_on(cluster)
    assert report.passed
    assert "prompts of 100, 700 tokens" in next(gate.detail for gate in report.gates if gate.name == "greedy text")


def test_a_cluster_without_prefill_engines_is_checked_alone() -> None:
    report = report_on(fake_cluster(0, 2))
    assert report.passed


def test_the_model_that_was_asked_for_must_be_served() -> None:
    report = report_on(fake_cluster(), "big")
    assert "not big" in report.failed[0].detail
    assert [gate.name for gate in report.gates] == ORDER[:3]


def test_no_decode_engine_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="nothing to check"):
        report_on(fake_cluster(1, 0))


def test_a_failed_report_names_how_many_gates_failed() -> None:
    cluster = fake_cluster()
    cluster.decode[0].extra_prompt_tokens = 1
    cluster.decode[1].has_reset = False
    with pytest.raises(ClusterError, match="1 more"):
        report_on(cluster).require_passed()


async def test_emulated_engines_pass() -> None:
    async with emulated_engine(role="prefill") as prefill, emulated_engine() as first, emulated_engine() as second:
        report = await run_gates(EngineUrls((prefill.url,), (first.url, second.url)))
        assert report.passed, report.failed
        await prefill.until_idle()
        await first.until_idle()
