"""Evaluation: intervals on known data, pairing by trace, scores that strict JSON holds."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from learn.evaluate import Bench, bench_of, compare, interval, score
from learn.simulation import Simulated, Topology, simulate
from learn.table import strict_score
from learn.trace import Trace
from pipelines.workloads import make_workload
from serve_table.policy import Policy, policy
from serve_table.predictor import constant_predictor
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

SLO = targets_from_profile(A40_3B)
TOPOLOGY = Topology(2, 4, A40_3B, 0.003)


def bench(n_traces: int = 4, rate: float = 9.0, n_requests: int = 200) -> Bench:
    traces = [make_workload("mixed", n_requests, seed, rate) for seed in range(n_traces)]
    return bench_of(traces, TOPOLOGY, SLO, constant_predictor())


def run_of(met: list[bool], tpot_s: float = 0.02) -> Simulated:
    n = len(met)
    none = np.zeros(n, np.int64)
    times = np.arange(1.0, n + 1.0)
    return Simulated(
        times, np.full(n, tpot_s), np.array(met), none, none, none, np.zeros(n), none, np.ones(n), np.zeros((0, 7)), 0
    )


def test_student_intervals_of_known_data() -> None:
    # scipy.stats.t.interval and any table of t: 2.776 for four degrees of freedom.
    low, high = interval(np.array([0.70, 0.74, 0.78, 0.82, 0.86]))
    assert (low, high) == pytest.approx(
        (0.78 - 2.7764 * 0.063246 / 5**0.5, 0.78 + 2.7764 * 0.063246 / 5**0.5), abs=1e-5
    )
    assert interval(np.array([0.5, 0.5, 0.5])) == (0.5, 0.5)
    assert interval(np.array([0.4])) == (0.4, 0.4)
    narrow, wide = interval(np.array([0.7, 0.8]), 0.5), interval(np.array([0.7, 0.8]), 0.95)
    assert wide[0] < narrow[0] < 0.75 < narrow[1] < wide[1]


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    covered = [low <= 0.6 <= high for low, high in (interval(rng.normal(0.6, 0.1, 5)) for _ in range(2000))]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


def test_a_score_is_the_mean_over_runs_within_zero_and_one() -> None:
    found = score("some", [run_of([True] * 9 + [False]), run_of([True] * 10)])
    assert found.policy == "some"
    assert found.goodput == pytest.approx(0.95)
    assert 0.0 < found.goodput_low < 0.95
    assert found.goodput_high == 1.0
    assert found.ttft_p90_s == pytest.approx(np.percentile(np.arange(1, 11), 90))
    assert found.tpot_p90_s == pytest.approx(0.02)


def test_f36_answers_of_one_token_give_no_tpot_and_strict_json() -> None:
    traces = [
        replace(trace, output_tokens=np.ones(len(trace), np.int64))
        for trace in (make_workload("chat", 50, seed, 5.0) for seed in range(2))
    ]
    chosen = policy("round_robin")
    found = score("round_robin", [simulate(trace, TOPOLOGY, chosen, SLO, 1.0) for trace in traces])
    assert found.tpot_p90_s is None
    assert found.ttft_p90_s is not None
    assert strict_score(found) == found
    assert msgspec.json.decode(msgspec.json.encode(found))["tpot_p90_s"] is None
    some = score("some", [run_of([True] * 3, tpot_s=np.nan), run_of([True] * 3, tpot_s=0.03)])
    assert some.tpot_p90_s == pytest.approx(0.03)


def test_the_difference_is_paired_by_trace_to_the_best_baseline() -> None:
    judged = bench()
    policies: dict[str, Policy] = {name: policy(name) for name in ("round_robin", "always_local", "least_loaded")}
    found = compare(judged, policies, "least_loaded", ["round_robin", "always_local"])
    goodput = {name: judged.goodput(chosen) for name, chosen in policies.items()}
    baselines = {name: values.mean() for name, values in goodput.items() if name != "least_loaded"}
    assert found.best_baseline == max(baselines, key=lambda name: baselines[name])
    paired = goodput["least_loaded"] - goodput[found.best_baseline]
    assert found.difference == pytest.approx(paired.mean())
    assert (found.low, found.high) == pytest.approx(interval(paired))
    assert [entry.goodput for entry in found.scores] == sorted(
        (values.mean() for values in goodput.values()), reverse=True
    )
    assert {entry.policy for entry in found.scores} == set(policies)


def test_a_policy_does_not_differ_from_itself() -> None:
    chosen = policy("power_of_two")
    found = compare(bench(2), {"learned": chosen, "other": chosen}, "learned", ["other"])
    assert (found.difference, found.low, found.high) == (0.0, 0.0, 0.0)


def test_pairing_makes_the_interval_narrower_than_two_separate_ones() -> None:
    judged = bench(6)
    policies = {name: policy(name) for name in ("round_robin", "least_loaded")}
    found = compare(judged, policies, "least_loaded", ["round_robin"])
    ours, theirs = (next(s for s in found.scores if s.policy == name) for name in ("least_loaded", "round_robin"))
    separate = ((ours.goodput_high - ours.goodput_low) ** 2 + (theirs.goodput_high - theirs.goodput_low) ** 2) ** 0.5
    assert found.high - found.low < separate


def test_lengths_are_predicted_from_the_prompts_alone() -> None:
    asked: list[tuple[float, object]] = []

    class Recording:
        def predict(self, prompt_tokens: float, limit_tokens: float | None) -> float:
            asked.append((prompt_tokens, limit_tokens))
            return 2.0 * prompt_tokens

    trace: Trace = make_workload("chat", 20, 0, 5.0)
    found = bench_of([trace], TOPOLOGY, SLO, Recording())  # type: ignore[arg-type]
    assert asked == [(tokens, None) for tokens in trace.prompt_tokens.tolist()]
    assert found.predicted[0].tolist() == (2.0 * trace.prompt_tokens).tolist()
