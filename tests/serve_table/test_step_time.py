"""The step-time model: its formula, its constants' limits, the profiles."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_table.errors import ConfigError
from serve_table.step_time import A40_3B, Handoff, StepTime, handoff_time_s, hardware_profile, step_time_s

STEP = StepTime(0.01, 0.0001, 100.0, 0.0003, 0.000002)


@pytest.mark.parametrize(
    ("step_tokens", "context_tokens", "expected_s"),
    [
        (0.0, 0.0, 0.01),
        (1.0, 0.0, 0.0101),
        (100.0, 0.0, 0.02),
        (101.0, 0.0, 0.0203),
        (300.0, 0.0, 0.08),
        (1.0, 5000.0, 0.0201),
    ],
)
def test_a_step_costs_its_floor_its_tokens_on_two_slopes_and_its_context(
    step_tokens: float, context_tokens: float, expected_s: float
) -> None:
    assert step_time_s(STEP.as_list(), step_tokens, context_tokens) == pytest.approx(expected_s)
    assert step_time_s(np.array(STEP.as_list()), step_tokens, context_tokens) == pytest.approx(expected_s)


@given(tokens=st.floats(0, 1e5), more=st.floats(0, 1e4), context=st.floats(0, 1e7))
def test_more_tokens_never_make_a_step_shorter(tokens: float, more: float, context: float) -> None:
    constants = A40_3B.step.as_list()
    assert step_time_s(constants, tokens + more, context) >= step_time_s(constants, tokens, context)
    assert step_time_s(constants, tokens, context + more) >= step_time_s(constants, tokens, context)


def test_a_hand_off_costs_its_latency_and_its_tokens() -> None:
    assert handoff_time_s(Handoff(0.005, 0.00001).as_list(), 1000.0) == pytest.approx(0.015)


@pytest.mark.parametrize("bad", [-1e-9, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["floor_s", "per_token_s", "knee_tokens", "per_token_beyond_s", "per_context_token_s"])
def test_step_constants_must_be_finite_and_not_negative(name: str, bad: float) -> None:
    with pytest.raises(ConfigError, match=f"StepTime.{name} is"):
        replace(STEP, **{name: bad})


def test_hand_off_constants_must_be_finite_and_not_negative() -> None:
    with pytest.raises(ConfigError, match=r"Handoff.latency_s is -1.0: must be finite and at least 0"):
        Handoff(-1.0, 0.0)


@pytest.mark.parametrize(
    "name", ["kv_tokens", "block_tokens", "max_num_seqs", "max_num_batched_tokens", "max_model_len_tokens"]
)
def test_the_limits_of_a_profile_must_be_positive(name: str) -> None:
    change: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=f"'a40-3b': {name} is 0: must be at least 1"):
        replace(A40_3B, **change)


def test_profiles_are_found_by_name_and_an_unknown_name_lists_them() -> None:
    assert hardware_profile("a40-3b") is A40_3B
    with pytest.raises(ConfigError, match="unknown hardware profile 'h100'; known: a40-3b"):
        hardware_profile("h100")


def test_the_a40_profile_decodes_and_prefills_in_the_measured_region() -> None:
    # Public profiling of a 2.7B model on an A40: 10-11 ms a decode step, 100-115 ms a chunk of 2,048 tokens.
    constants = A40_3B.step.as_list()
    assert 0.0095 < step_time_s(constants, 1.0, 1000.0) < 0.0115
    assert 0.095 < step_time_s(constants, 2048.0, 0.0) < 0.12
