"""Residents in the simulator: kept as a router keeps them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trace_cases import SMALL_SLO, SMALL_TOPOLOGY, random_trace

from learn.price_space import price_policy
from learn.simulation import Topology, simulate
from learn.trace import Trace
from serve_table.policy import policy
from serve_table.price_params import CONSTANT_NAMES, price_constants
from serve_table.situation import WHOLE
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B


def test_a_router_that_hears_the_same_decides_the_same() -> None:
    script = Path(__file__).with_name("router_beside.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(done.stdout)
    # A router renews a share when tokens come, the simulator at the next decision.
    assert found["share"] > 0.95
    assert found["choices"] >= 4
    assert found["actions"] == 3
    # Over some hundred milliseconds there is little to tell them from, and that at other times.
    assert found["apart"] < 0.3


@pytest.mark.parametrize(("seed", "elastic"), [(0, False), (1, False), (2, False), (0, True), (1, True)])
def test_macro_steps_change_nothing_for_the_price(seed: int, elastic: bool) -> None:
    chosen = price_policy({}, SMALL_TOPOLOGY, SMALL_SLO)
    topology = replace(SMALL_TOPOLOGY, elastic=elastic)
    runs = [
        simulate(random_trace(seed, 120), topology, chosen, SMALL_SLO, 12.0, macro_steps=macro_steps)
        for macro_steps in (True, False)
    ]
    assert (WHOLE in runs[0].action) == elastic
    assert np.array_equal(runs[0].decode, runs[1].decode)
    assert runs[0].ttft_s == pytest.approx(runs[1].ttft_s)


A40S, SLO = Topology(1, 2, A40_3B), targets_from_profile(A40_3B)


def chat_trace(requests_per_s: float = 26.0) -> Trace:
    rng = np.random.default_rng(5)
    n = 800
    none = np.zeros(n, np.int64)
    return Trace(
        name="chat",
        arrival_s=np.cumsum(rng.exponential(1 / requests_per_s, n)),
        prompt_tokens=rng.integers(50, 800, n),
        output_tokens=rng.integers(30, 400, n),
        slo_class=(rng.random(n) < 0.3).astype(np.int64),
        chain_start=none,
        chain_length=none,
        block_ids=none[:0],
    )


def test_the_harm_to_others_pays() -> None:
    chat = chat_trace()
    topology, slo = A40S, SLO

    def goodput(params: dict[str, float]) -> float:
        return simulate(chat, topology, price_policy(params, topology, slo), slo, 200.0).goodput

    assert simulate(chat, topology, policy("round_robin"), slo, 200.0).goodput < 0.9
    assert goodput({}) > goodput({"harm_weight": 0.0}) + 0.1


@pytest.mark.parametrize("factor", [1 / 7.4, 0.7, 7.4])
def test_wrong_constants_cost_little_where_they_are_estimated(factor: float) -> None:
    chat = chat_trace(20.0)
    known = price_constants(A40_3B, SLO)
    wrong = {name: factor * known[name] for name in CONSTANT_NAMES if name != "step_knee_tokens"}

    def goodput(params: dict[str, float]) -> float:
        return simulate(chat, A40S, price_policy(params, A40S, SLO), SLO, 200.0).goodput

    right = goodput({"adapt": 0.0})
    assert goodput({}) > right - 0.01
    assert goodput(wrong) > right - 0.02
    assert goodput({**wrong, "adapt": 0.0}) < right - 0.05


@pytest.mark.parametrize("predicted_tokens", [25.0, 1600.0])
def test_wrongly_predicted_lengths_cost_little_where_they_are_corrected(predicted_tokens: float) -> None:
    chat = chat_trace(23.0)

    def goodput(params: dict[str, float], tokens: float) -> float:
        return simulate(chat, A40S, price_policy(params, A40S, SLO), SLO, tokens).goodput

    corrected = goodput({}, predicted_tokens)
    assert corrected > goodput({}, 200.0) - 0.01
    assert corrected > goodput({"adapt": 0.0}, predicted_tokens) + 0.015


def test_a_run_leaves_the_policy_as_it_was() -> None:
    chosen = price_policy({"step_floor_s": 0.05}, A40S, SLO)
    before = list(chosen.params)
    first = simulate(chat_trace(), A40S, chosen, SLO, 200.0)
    assert chosen.params == before
    assert np.array_equal(first.decode, simulate(chat_trace(), A40S, chosen, SLO, 200.0).decode)
