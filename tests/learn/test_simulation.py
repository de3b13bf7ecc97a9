"""Simulated runs: unloaded times by formula, determinism, replay, exact macro steps, refused inputs."""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import SMALL
from trace_cases import SMALL_SLO, SMALL_TOPOLOGY, every_policy, random_trace

from learn.simulation import Simulated, Topology, replay, simulate
from learn.trace import Trace
from serve_table.errors import ConfigError, TraceError
from serve_table.policy import Policy, policy
from serve_table.situation import LOCAL, REMOTE
from serve_table.slo import LOOSE, TIGHT, SloClass, SloTargets, targets_from_profile
from serve_table.step_time import A40_3B, handoff_time_s, step_time_s

STEP = A40_3B.step.as_list()
HANDOFF = A40_3B.handoff.as_list()
SLO = targets_from_profile(A40_3B)


def spaced_trace(prompts: list[int], outputs: list[int], gap_s: float = 100.0, slo_class: int = LOOSE) -> Trace:
    """Requests so far apart that each finds an idle cluster."""
    n = len(prompts)
    zeros = np.zeros(n, np.int64)
    arrival_s = gap_s * np.arange(n, dtype=np.float64)
    columns = [np.array(column, np.int64) for column in (prompts, outputs, [slo_class] * n)]
    return Trace("spaced", arrival_s, *columns, zeros, zeros, np.zeros(0, np.int64))


def prefill_s(prompt: int) -> float:
    chunks = [(start, min(2048, prompt - start)) for start in range(0, prompt, 2048)]
    return sum(step_time_s(STEP, float(tokens), float(start)) for start, tokens in chunks)


def equal_runs(a: Simulated, b: Simulated, tolerance: float = 0.0) -> None:
    for name in ("ttft_s", "tpot_s"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=0.0, atol=tolerance, equal_nan=True)
    for name in ("slo_met", "action", "prefill", "decode", "cached_tokens"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert a.preemptions == b.preemptions


def test_features_are_what_the_decisions_saw_and_change_nothing() -> None:
    trace = random_trace(3)
    plain = simulate(trace, SMALL_TOPOLOGY, policy("least_loaded"), SMALL_SLO, 10.0)
    run = simulate(trace, SMALL_TOPOLOGY, policy("least_loaded"), SMALL_SLO, 10.0, with_features=True)
    equal_runs(plain, run)
    assert plain.features.shape == (0, 7)
    prompt, uncached_prefill, uncached_decode, predicted, slo_class, prefill_pressure, decode_pressure = run.features.T
    assert np.array_equal(prompt, trace.prompt_tokens)
    assert np.array_equal(slo_class, trace.slo_class)
    assert set(predicted) == {10.0}
    # Of three decode engines; the first request finds them idle, later ones those that are not answered yet.
    finish_s = trace.arrival_s + run.ttft_s + np.nan_to_num(run.tpot_s) * (trace.output_tokens - 1)
    waiting = [np.sum(finish_s[:i] > arrival_s) for i, arrival_s in enumerate(trace.arrival_s)]
    assert decode_pressure * 3 == pytest.approx(waiting)
    assert prefill_pressure[0] == 0.0
    assert prefill_pressure.max() > 0.0
    for uncached in (uncached_prefill, uncached_decode):
        assert uncached[0] == prompt[0]
        assert np.all(uncached >= 0.0)
        assert np.any(uncached < prompt)


@pytest.mark.parametrize("overhead_s", [0.0, 0.004])
def test_unloaded_local_times_are_the_prefill_and_decode_steps_plus_one_overhead(overhead_s: float) -> None:
    prompts, outputs = [1, 100, 2048, 2049, 7000], [2, 50, 3, 10, 200]
    run = simulate(
        spaced_trace(prompts, outputs), Topology(1, 1, A40_3B, overhead_s), policy("always_local"), SLO, 100.0
    )
    assert np.all(run.action == LOCAL)
    assert np.all(run.prefill == -1)
    assert run.ttft_s == pytest.approx([overhead_s + prefill_s(prompt) for prompt in prompts], abs=1e-9)
    tpot_s = [
        np.mean([step_time_s(STEP, 1.0, float(prompt + k)) for k in range(output - 1)])
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    assert run.tpot_s == pytest.approx(tpot_s, abs=1e-9)


@pytest.mark.parametrize("overhead_s", [0.0, 0.004])
def test_unloaded_remote_times_add_the_hand_off_a_decode_step_and_an_overhead_a_leg(overhead_s: float) -> None:
    prompts, outputs = [1, 100, 2048, 7000], [2, 50, 3, 200]
    run = simulate(
        spaced_trace(prompts, outputs), Topology(1, 1, A40_3B, overhead_s), policy("round_robin"), SLO, 100.0
    )
    assert np.all(run.action == REMOTE)
    expected = [
        2 * overhead_s + prefill_s(p) + handoff_time_s(HANDOFF, float(p)) + step_time_s(STEP, 1.0, float(p - 1))
        for p in prompts
    ]
    assert run.ttft_s == pytest.approx(expected, abs=1e-9)
    # The step of the last prompt token gives the first answer token, so the next one reads the whole prompt.
    tpot_s = [
        np.mean([step_time_s(STEP, 1.0, float(prompt + k)) for k in range(output - 1)])
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    assert run.tpot_s == pytest.approx(tpot_s, abs=1e-9)


def test_a_cached_prefix_shortens_the_prefill_and_the_hand_off() -> None:
    trace = replace(
        spaced_trace([1000, 1000], [2, 2]), chain_length=np.array([15, 15]), block_ids=np.arange(15), name="shared"
    )
    run = simulate(trace, Topology(1, 1, A40_3B), policy("round_robin"), SLO, 100.0)
    assert list(run.cached_tokens) == [0, 960]
    first = step_time_s(STEP, 1000.0, 0.0) + handoff_time_s(HANDOFF, 1000.0) + step_time_s(STEP, 1.0, 999.0)
    second = step_time_s(STEP, 40.0, 960.0) + handoff_time_s(HANDOFF, 40.0) + step_time_s(STEP, 1.0, 999.0)
    assert run.ttft_s == pytest.approx([first, second], abs=1e-9)


@pytest.mark.parametrize("name", ["always_local", "round_robin"])
def test_f15_an_answer_of_one_token_has_no_tpot_and_is_judged_by_its_ttft(name: str) -> None:
    run = simulate(spaced_trace([100, 100], [1, 5]), Topology(1, 1, A40_3B), policy(name), SLO, 100.0)
    assert np.isnan(run.tpot_s[0])
    assert np.isfinite(run.tpot_s[1])
    assert run.goodput == 1.0
    assert run.percentile("tpot_s", 50.0) == run.tpot_s[1]


@pytest.mark.parametrize("slo_class", [LOOSE, TIGHT])
def test_goodput_is_the_share_that_met_both_targets_of_its_class(slo_class: int) -> None:
    trace = replace(random_trace(1), slo_class=np.full(60, slo_class))
    only = SloClass("tight", 0.05, 0.001, 0.02)
    never = SloClass("never", 0.0, 0.0, 0.0)
    targets = SloTargets(*((never, only) if slo_class == TIGHT else (only, never)))
    run = simulate(trace, SMALL_TOPOLOGY, policy("round_robin"), targets, 10.0)
    expected = [
        only.met(int(prompt), float(ttft_s), None if np.isnan(tpot_s) else float(tpot_s))
        for prompt, ttft_s, tpot_s in zip(trace.prompt_tokens, run.ttft_s, run.tpot_s, strict=True)
    ]
    assert list(run.slo_met) == expected
    assert run.goodput == np.mean(expected)
    assert 0.0 < run.goodput < 1.0


@pytest.mark.parametrize("chosen", every_policy(), ids=lambda chosen: chosen.name)
def test_the_same_seed_gives_the_same_run_and_a_replay_of_its_choices_the_same_times(chosen: Policy) -> None:
    trace = random_trace(11)
    first = simulate(trace, SMALL_TOPOLOGY, chosen, SMALL_SLO, 10.0, seed=5, explore=0.3)
    equal_runs(first, simulate(trace, SMALL_TOPOLOGY, chosen, SMALL_SLO, 10.0, seed=5, explore=0.3))
    other = simulate(trace, SMALL_TOPOLOGY, chosen, SMALL_SLO, 10.0, seed=6, explore=0.3)
    assert np.any(other.decode != first.decode)
    replayed = replay(trace, SMALL_TOPOLOGY, SMALL_SLO, 10.0, first.action, first.prefill, first.decode)
    equal_runs(first, replayed)


@pytest.mark.parametrize("chosen", every_policy(), ids=lambda chosen: chosen.name)
@pytest.mark.parametrize(("kv_tokens", "requests_per_s"), [(240, 40.0), (176, 90.0), (4000, 15.0)])
def test_runs_of_equal_steps_give_the_same_times_as_single_steps(
    chosen: Policy, kv_tokens: int, requests_per_s: float
) -> None:
    topology = replace(SMALL_TOPOLOGY, profile=replace(SMALL, kv_tokens=kv_tokens))
    trace = random_trace(2, 120, requests_per_s)
    fast = simulate(trace, topology, chosen, SMALL_SLO, 10.0)
    slow = simulate(trace, topology, chosen, SMALL_SLO, 10.0, macro_steps=False)
    equal_runs(fast, slow, tolerance=1e-9)


@pytest.mark.parametrize("seed", [16, 30, 42, 53, 83])
def test_a_decision_in_the_middle_of_a_run_sees_the_evictions_up_to_then(seed: int) -> None:
    # Long answers evict cached prefixes as they grow; the decision reads the cache between two of their tokens.
    trace = random_trace(seed, 40, 2.0)
    prompt_tokens = np.minimum(trace.prompt_tokens, 44)
    trace = replace(
        trace,
        prompt_tokens=prompt_tokens,
        output_tokens=np.minimum(3 * trace.output_tokens, 100),
        chain_length=np.minimum(trace.chain_length, prompt_tokens // 8),
    )
    topology = Topology(1, 1, replace(SMALL, kv_tokens=144, max_num_batched_tokens=64), 0.00131)
    chosen = policy("dynamo_style", {"eff_isl_threshold_tokens": 30, "eff_isl_ratio_threshold": 0.9})
    fast = simulate(trace, topology, chosen, SMALL_SLO, 10.0)
    slow = simulate(trace, topology, chosen, SMALL_SLO, 10.0, macro_steps=False)
    equal_runs(fast, slow, tolerance=1e-9)


def test_explored_choices_carry_their_propensity() -> None:
    trace = random_trace(3, 200)
    run = simulate(trace, SMALL_TOPOLOGY, policy("least_loaded"), SMALL_SLO, 10.0, explore=1.0)
    # Uniform over local on 3 decode engines, and remote on 2 x 3.
    assert list(run.propensity) == pytest.approx([1 / 6 if action == LOCAL else 1 / 12 for action in run.action])
    assert 0.35 < np.mean(run.action == LOCAL) < 0.65
    assert np.all(simulate(trace, SMALL_TOPOLOGY, policy("least_loaded"), SMALL_SLO, 10.0).propensity == 1.0)


def test_arrays_of_other_kinds_give_the_same_run() -> None:
    trace = random_trace(4)
    prompt_tokens = trace.prompt_tokens.astype(np.int32)
    arrival_s = trace.arrival_s.copy()
    arrival_s.flags.writeable = False
    block_ids = np.repeat(trace.block_ids, 2)[::2]
    odd = replace(trace, prompt_tokens=prompt_tokens, arrival_s=arrival_s, block_ids=block_ids)
    chosen = policy("round_robin")
    run = simulate(trace, SMALL_TOPOLOGY, chosen, SMALL_SLO, 10.0)
    equal_runs(run, simulate(odd, SMALL_TOPOLOGY, chosen, SMALL_SLO, np.full(60, 10), explore=0))


def test_without_shared_prefixes_their_block_size_does_not_matter() -> None:
    trace = replace(spaced_trace([100], [5]), hash_block_tokens=24)
    run = simulate(trace, Topology(0, 1, A40_3B), policy("round_robin"), SLO, 100.0)
    assert run.ttft_s == pytest.approx([prefill_s(100)])


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(TraceError, match="'spaced' has no requests"):
        simulate(spaced_trace([], []), SMALL_TOPOLOGY, policy("round_robin"), SMALL_SLO, 10.0)


def test_a_request_that_no_engine_holds_is_refused_and_the_longest_one_that_fits_is_answered() -> None:
    # 100 tokens of KV are 25 blocks of 4; 103 would be no more.
    topology = Topology(0, 1, replace(SMALL, kv_tokens=103))
    run = simulate(spaced_trace([60], [40]), topology, policy("round_robin"), SMALL_SLO, 10.0)
    assert np.isfinite(run.ttft_s[0])
    with pytest.raises(TraceError, match="a request of 101 tokens, the engines hold 100: drop such rows at import"):
        simulate(spaced_trace([60, 61], [40, 40]), topology, policy("round_robin"), SMALL_SLO, 10.0)
    short_context = replace(SMALL, max_model_len_tokens=50)
    with pytest.raises(TraceError, match="the engines hold 50"):
        simulate(spaced_trace([30], [30]), Topology(0, 1, short_context), policy("round_robin"), SMALL_SLO, 10.0)


@pytest.mark.parametrize(
    ("prefill_engines", "decode_engines", "overhead_s", "message"),
    [(2, 0, 0.0, "at least one decode engine"), (-1, 1, 0.0, "-1P"), (1, 1, -0.1, "overhead_s"), (1, 1, np.nan, "nan")],
)
def test_a_topology_that_cannot_be_is_refused(
    prefill_engines: int, decode_engines: int, overhead_s: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology(prefill_engines, decode_engines, A40_3B, overhead_s)


@pytest.mark.parametrize("predicted", [np.nan, -1.0, np.ones(3), np.full(60, np.inf)], ids=str)
def test_predictions_that_cannot_be_are_refused(predicted: float | np.ndarray) -> None:
    with pytest.raises(ConfigError, match="predicted_tokens"):
        simulate(random_trace(0), SMALL_TOPOLOGY, policy("round_robin"), SMALL_SLO, predicted)


def test_a_share_of_exploration_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"explore is 1\.5"):
        simulate(random_trace(0), SMALL_TOPOLOGY, policy("round_robin"), SMALL_SLO, 10.0, explore=1.5)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_a_replay_of_engines_that_the_topology_lacks_is_refused(prefill: int, decode: int) -> None:
    trace = random_trace(0)
    ones = np.ones(60, np.int64)
    prefills, decodes = ones.copy(), ones.copy()
    prefills[7], decodes[7] = prefill, decode
    with pytest.raises(TraceError, match=r"request 7 ran on prefill engine .* which 2P\+3D lacks"):
        replay(trace, SMALL_TOPOLOGY, SMALL_SLO, 10.0, ones, prefills, decodes)
    with pytest.raises(TraceError, match="its choices differ in number"):
        replay(trace, SMALL_TOPOLOGY, SMALL_SLO, 10.0, ones[1:], ones, ones)
