"""Output-length prediction: quantiles of journaled answer lengths by prompt length, and errors for experiments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

from serve_table.errors import ConfigError
from serve_table.lookup import length_bin
from serve_table.predictor import DEFAULT_OUTPUT_TOKENS, LengthPredictor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEVELS = (0.1, 0.5, 0.9)
N_BINS = 16
MIN_ROWS = 30
MAX_RELATIVE_ERROR = 100.0


@dataclass(frozen=True)
class LengthQuantiles:
    """Quantiles of output tokens by prompt-length bin, as the artifact stores them.

    scale: bins per unit of log(1 + prompt tokens). levels (n_levels,): ascending. quantiles_tokens (n_bins,
    n_levels): at least 1 and not descending along the levels. counts (n_bins,): rows of a bin. widened (n_bins,):
    how many bins to each side were added until there were enough rows; -1 where all rows were not enough and
    serve_table.predictor.DEFAULT_OUTPUT_TOKENS stands in.
    """

    scale: float
    levels: Floats
    quantiles_tokens: Floats
    counts: Ints
    widened: Ints

    def predictor(self, level: float = 0.5) -> LengthPredictor:
        """The router's predictor at the level nearest to `level`."""
        column = int(np.argmin(np.abs(self.levels - level)))
        return LengthPredictor(self.scale, self.quantiles_tokens[:, column].tolist())


@dataclass(frozen=True)
class LengthError:
    """How well lengths were predicted on rows that were not fitted.

    median_relative: median of |predicted - actual| / actual. coverage: share of answers between the lowest and
    the highest level. Both None without held-out rows.
    """

    rows: int
    median_relative: float | None
    coverage: float | None


def fit_lengths(
    prompt_tokens: Floats,
    output_tokens: Floats,
    *,
    levels: Sequence[float] = LEVELS,
    n_bins: int = N_BINS,
    min_rows: int = MIN_ROWS,
) -> LengthQuantiles:
    """Quantiles of output_tokens (n_rows,) by bins of prompt_tokens (n_rows,); rows without a length are ignored.

    A bin with fewer than min_rows rows takes in its neighbours, one more on each side at a time, until there are
    min_rows or all rows are in; then all rows decide. Without any row the default length does. Raises ConfigError
    where levels do not ascend within 0 and 1.
    """
    if not levels or any(not 0.0 < level < 1.0 for level in levels) or np.any(np.diff(levels) <= 0):
        raise ConfigError(f"quantile levels {list(levels)}: must ascend between 0 and 1")
    if n_bins < 1:
        raise ConfigError(f"{n_bins} prompt-length bins: must be at least 1")
    known = np.isfinite(prompt_tokens) & np.isfinite(output_tokens) & (prompt_tokens > 0) & (output_tokens > 0)
    prompts, outputs = prompt_tokens[known], output_tokens[known]
    longest = float(prompts.max()) if len(prompts) else 1.0
    scale = n_bins / math.log(1.0 + longest)
    bins = length_bins(scale, n_bins, prompts)
    quantiles = np.full((n_bins, len(levels)), DEFAULT_OUTPUT_TOKENS)
    widened = np.full(n_bins, -1, dtype=np.int64)
    for index in range(n_bins if len(outputs) else 0):
        widened[index] = next(
            width for width in range(n_bins + 1) if width == n_bins or (abs(bins - index) <= width).sum() >= min_rows
        )
        near = outputs[np.abs(bins - index) <= widened[index]]
        quantiles[index] = np.maximum(np.quantile(near, levels), 1.0)
    counts = np.bincount(bins, minlength=n_bins).astype(np.int64)
    return LengthQuantiles(scale, np.asarray(levels, dtype=np.float64), quantiles, counts, widened)


def length_bins(scale: float, n_bins: int, tokens: Floats) -> Ints:
    """Bins (n,) of tokens (n,) by the router's own function, so that not even a rounding differs."""
    return np.array([length_bin(scale, n_bins, value) for value in tokens.tolist()], dtype=np.int64)


def predict_lengths(lengths: LengthQuantiles, prompt_tokens: Floats, level: float = 0.5) -> Floats:
    """Predicted output tokens (n,) of prompts (n,) that set no limit."""
    predictor = lengths.predictor(level)
    return np.array([predictor.predict(value, None) for value in prompt_tokens.tolist()], dtype=np.float64)


def held_out_error(
    prompt_tokens: Floats,
    output_tokens: Floats,
    *,
    seed: int,
    held_out_share: float = 0.25,
    levels: Sequence[float] = LEVELS,
    n_bins: int = N_BINS,
    min_rows: int = MIN_ROWS,
) -> LengthError:
    """Error of the middle prediction on a random share of rows (n_rows,) after fitting the others."""
    known = np.flatnonzero(np.isfinite(output_tokens) & np.isfinite(prompt_tokens) & (output_tokens > 0))
    order = np.random.default_rng(seed).permutation(known)
    n_held_out = int(len(order) * held_out_share)
    held_out, fitted = order[:n_held_out], order[n_held_out:]
    if n_held_out == 0:
        return LengthError(0, None, None)
    lengths = fit_lengths(prompt_tokens[fitted], output_tokens[fitted], levels=levels, n_bins=n_bins, min_rows=min_rows)
    actual = output_tokens[held_out]
    low = predict_lengths(lengths, prompt_tokens[held_out], 0.0)
    middle = predict_lengths(lengths, prompt_tokens[held_out], 0.5)
    high = predict_lengths(lengths, prompt_tokens[held_out], 1.0)
    return LengthError(
        rows=n_held_out,
        median_relative=float(np.median(np.abs(middle - actual) / actual)),
        coverage=float(np.mean((low <= actual) & (actual <= high))),
    )


def with_error(predicted_tokens: Floats, relative_error: float, rng: np.random.Generator) -> Floats:
    """Predictions (n,) times independent random factors whose mean |factor - 1| is relative_error.

    The factor is lognormal with median 1: half of the predictions are too short, half too long, and none is
    negative whatever the error. Results are at least 1 token. Raises ConfigError for an error outside 0 to 100
    (1.5 is 150 %).
    """
    sigma = lognormal_sigma(relative_error)
    factors = np.exp(sigma * rng.standard_normal(len(predicted_tokens)))
    return np.maximum(predicted_tokens * factors, 1.0)


def lognormal_sigma(relative_error: float) -> float:
    """Sigma with E|exp(sigma Z) - 1| = relative_error, Z standard normal.

    The expectation is exp(sigma^2 / 2) erf(sigma / sqrt 2), from the lognormal's partial expectations.
    """
    if not 0.0 <= relative_error <= MAX_RELATIVE_ERROR:
        raise ConfigError(f"relative error {relative_error}: must be from 0 to {MAX_RELATIVE_ERROR:g}")

    def excess(sigma: float) -> float:
        return math.exp(sigma * sigma / 2.0) * math.erf(sigma / math.sqrt(2.0)) - relative_error

    return float(brentq(excess, 0.0, 5.0, xtol=1e-12))
