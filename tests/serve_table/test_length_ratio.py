"""The length ratio: answers that are longer or shorter than predicted are soon expected so."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_table.length_ratio import MAX_LOG_RATIO, length_ratio, new_length_sums, observe_length, ratio_of_all

PREDICTED_TOKENS = 100.0


def told(ratio: float, n: int, sums: list[float] | None = None, prompt_tokens: float = 300.0) -> list[float]:
    """After n answers whose lengths spread about `ratio` times the prediction."""
    sums = new_length_sums() if sums is None else sums
    for noise in np.random.default_rng(7).normal(0.0, 0.7, n):
        observe_length(sums, prompt_tokens, PREDICTED_TOKENS, PREDICTED_TOKENS * ratio * float(np.exp(noise)))
    return sums


def test_nothing_seen_changes_nothing() -> None:
    assert length_ratio(new_length_sums(), 300.0) == 1.0
    assert ratio_of_all(new_length_sums()) == 1.0


@pytest.mark.parametrize("ratio", [0.2, 0.7, 1.0, 1.5, 6.0])
def test_a_hundred_answers_tell_the_ratio(ratio: float) -> None:
    sums = told(ratio, 100)
    assert length_ratio(sums, 300.0) == pytest.approx(ratio, rel=0.3)
    assert ratio_of_all(sums) == pytest.approx(ratio, rel=0.3)


def test_one_answer_moves_little() -> None:
    sums = new_length_sums()
    observe_length(sums, 300.0, PREDICTED_TOKENS, 100.0 * PREDICTED_TOKENS)
    assert 1.0 < length_ratio(sums, 300.0) < 1.6


def test_prompts_of_other_lengths_have_ratios_of_their_own() -> None:
    sums = told(4.0, 200, told(0.5, 200, prompt_tokens=5000.0), prompt_tokens=100.0)
    assert length_ratio(sums, 100.0) == pytest.approx(4.0, rel=0.3)
    assert length_ratio(sums, 5000.0) == pytest.approx(0.5, rel=0.3)
    # Of a length that was never seen, what all say.
    assert length_ratio(sums, 100_000.0) == pytest.approx(ratio_of_all(sums))


def test_traffic_that_changes_is_followed() -> None:
    sums = told(3.0, 600)
    assert length_ratio(told(0.5, 1000, sums), 300.0) == pytest.approx(0.5, rel=0.2)


@given(
    st.lists(st.tuples(st.floats(0.0, 1e7), st.floats(0.0, 1e6), st.floats(0.0, 1e7)), max_size=60),
    st.floats(0.0, 1e7),
)
def test_it_stays_bounded_whatever_is_seen(answers: list[tuple[float, float, float]], prompt_tokens: float) -> None:
    sums = new_length_sums()
    for prompt, predicted, output in answers:
        observe_length(sums, prompt, predicted, output)
    assert np.exp(-MAX_LOG_RATIO) <= length_ratio(sums, prompt_tokens) <= np.exp(MAX_LOG_RATIO)
