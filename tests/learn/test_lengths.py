import numpy as np
import numpy.typing as npt
import pytest

from learn.lengths import fit_lengths, held_out_error, length_bins, lognormal_sigma, predict_lengths, with_error
from serve_table.errors import ConfigError
from serve_table.lookup import length_bin
from serve_table.predictor import DEFAULT_OUTPUT_TOKENS

Floats = npt.NDArray[np.float64]


def known_lengths(n_rows: int, sigma: float = 0.5) -> tuple[Floats, Floats]:
    """Prompts of 100 or 5,000 tokens, whose answers are lognormal around 400 or 50."""
    rng = np.random.default_rng(2)
    is_long = rng.random(n_rows) < 0.5
    prompts = np.where(is_long, 5000.0, 100.0)
    return prompts, np.where(is_long, 50.0, 400.0) * np.exp(sigma * rng.standard_normal(n_rows))


def test_known_quantiles_are_recovered() -> None:
    prompts, outputs = known_lengths(8000)
    lengths = fit_lengths(prompts, outputs)
    z = 1.2815515655
    for prompt, median in ((100.0, 400.0), (5000.0, 50.0)):
        quantiles = lengths.quantiles_tokens[length_bin(lengths.scale, 16, prompt)]
        np.testing.assert_allclose(quantiles, median * np.exp(0.5 * np.array([-z, 0.0, z])), rtol=0.06)
    assert lengths.predictor().predict(100.0, None) == pytest.approx(400.0, rel=0.06)
    assert lengths.predictor(0.9).predict(100.0, 32) == 32.0


def test_held_out_error_is_that_of_the_distribution() -> None:
    prompts, outputs = known_lengths(8000, sigma=0.5)
    error = held_out_error(prompts, outputs, seed=1)
    z = np.random.default_rng(9).standard_normal(400_000)
    assert error.median_relative == pytest.approx(float(np.median(np.abs(np.exp(-0.5 * z) - 1.0))), abs=0.02)
    assert error.coverage == pytest.approx(0.8, abs=0.03)
    assert error.rows == 2000
    assert held_out_error(prompts[:3], outputs[:3], seed=1).median_relative is None


def test_sparse_bins_widen_to_their_neighbours_then_to_all_rows() -> None:
    prompts = np.concatenate([np.full(100, 100.0), np.full(3, 3000.0)])
    outputs = np.concatenate([np.full(100, 40.0), np.full(3, 900.0)])
    lengths = fit_lengths(prompts, outputs, min_rows=30)
    sparse = length_bin(lengths.scale, 16, 3000.0)
    full = length_bin(lengths.scale, 16, 100.0)
    assert (lengths.widened[full], lengths.widened[sparse]) == (0, sparse - full)
    assert lengths.quantiles_tokens[sparse].tolist() == [40.0, 40.0, 40.0]
    few = fit_lengths(prompts[100:], outputs[100:], min_rows=30)
    assert set(few.widened.tolist()) == {16}
    assert np.all(few.quantiles_tokens == 900.0)


def test_levels_never_cross_and_are_at_least_one_token() -> None:
    rng = np.random.default_rng(4)
    lengths = fit_lengths(np.exp(rng.normal(5, 3, 500)), rng.exponential(3.0, 500), levels=(0.05, 0.5, 0.95, 0.99))
    assert np.all(np.diff(lengths.quantiles_tokens, axis=1) >= 0)
    assert lengths.quantiles_tokens.min() >= 1.0
    assert np.isfinite(lengths.quantiles_tokens).all()


def test_f15_rows_without_a_length_are_ignored_and_none_at_all_falls_back() -> None:
    prompts, outputs = known_lengths(500)
    gaps = np.concatenate([outputs, [np.nan, 0.0, np.inf]])
    with_gaps = fit_lengths(np.concatenate([prompts, [100.0] * 3]), gaps)
    assert with_gaps.quantiles_tokens.tolist() == fit_lengths(prompts, outputs).quantiles_tokens.tolist()
    nothing = fit_lengths(np.array([100.0]), np.array([np.nan]))
    assert np.all(nothing.quantiles_tokens == DEFAULT_OUTPUT_TOKENS)
    assert np.all(nothing.widened == -1)


@pytest.mark.parametrize("relative_error", [0.0, 0.1, 0.5, 1.0, 1.5])
def test_injected_error_is_as_asked(relative_error: float) -> None:
    predicted = np.full(400_000, 1000.0)
    changed = with_error(predicted, relative_error, np.random.default_rng(6))
    assert np.mean(np.abs(changed / predicted - 1.0)) == pytest.approx(relative_error, rel=0.02)
    assert np.median(changed) == pytest.approx(1000.0, rel=0.02)
    again = with_error(predicted, relative_error, np.random.default_rng(6))
    assert changed.tobytes() == again.tobytes()


def test_injected_error_out_of_range_is_refused() -> None:
    for relative_error in (-0.1, float("nan"), 101.0):
        with pytest.raises(ConfigError, match="relative error"):
            lognormal_sigma(relative_error)


def test_impossible_levels_and_bins_are_refused() -> None:
    prompts, outputs = known_lengths(10)
    for levels in ((), (0.5, 0.5), (0.0, 0.5)):
        with pytest.raises(ConfigError, match="quantile levels"):
            fit_lengths(prompts, outputs, levels=levels)
    with pytest.raises(ConfigError, match="at least 1"):
        fit_lengths(prompts, outputs, n_bins=0)


def test_bins_and_predictions_are_the_router_s() -> None:
    prompts, outputs = known_lengths(100)
    lengths = fit_lengths(prompts, outputs)
    strange = np.array([0.0, -5.0, np.nan, 1e12, 1e300, 100.0, 5000.0])
    assert length_bins(2.0, 9, strange).tolist() == [length_bin(2.0, 9, value) for value in strange.tolist()]
    predictor = lengths.predictor()
    assert predict_lengths(lengths, strange).tolist() == [predictor.predict(value, None) for value in strange.tolist()]
