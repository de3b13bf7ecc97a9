"""The output-length predictor and the caps on it."""

import math

import pytest

from serve_table.predictor import DEFAULT_OUTPUT_TOKENS, LengthPredictor, constant_predictor

PREDICTOR = LengthPredictor(scale=1.0, predicted_tokens=[0.2, 50.0, 400.0])


@pytest.mark.parametrize(
    ("prompt_tokens", "limit", "expected"),
    [
        (0.0, None, 1.0),  # never below one token
        (1.0, None, 1.0),
        (2.0, None, 50.0),
        (1e6, None, 400.0),  # beyond the grid: its last bin
        (1e6, 100, 100.0),
        (1e6, 1000, 400.0),
        (1e6, 0, 1.0),
        (math.nan, None, 1.0),
    ],
)
def test_prediction_is_by_bin_and_capped_by_the_limit(prompt_tokens: float, limit: int | None, expected: float) -> None:
    assert PREDICTOR.predict(prompt_tokens, limit) == expected


def test_without_an_artifact_it_is_constant() -> None:
    assert {constant_predictor().predict(n, None) for n in (1.0, 100.0, 1e5)} == {DEFAULT_OUTPUT_TOKENS}
