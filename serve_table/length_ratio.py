"""Length ratio: how much longer answers are than the artifact's predictor says, from those that were answered.

Traffic is seldom the mix that the predictor was fitted on. Per bin of prompt lengths the ratio is the mean log of
actual to predicted tokens, with forgetting; where few answers were seen it is that of all bins, and of those the
predictor's own. A ratio stays within [1/12, 12]. In the subset of Python that numba compiles.
"""

from collections.abc import MutableSequence, Sequence
from math import exp, log

from serve_table.lookup import length_bin
from serve_table.price_params import ADAPT
from serve_table.self_calibration import MAX_FACTOR

SCALE = 1.0 / log(2.0)
N_BINS = 18
"""A bin for every doubling of the prompt, up to 128k tokens."""
KEPT = 0.995
"""Of what was seen before, at every answer of a bin: about the last two hundred count."""
PRIOR_ANSWERS = 10.0
"""What the predictor is worth against all answers, and all against a bin's own."""
MAX_LOG_RATIO = log(MAX_FACTOR)

N_SUMS = 2 * (N_BINS + 1)
"""Answers and sum of log ratios of each bin, then of all."""


def new_length_sums() -> list[float]:
    """Nothing was answered yet: (N_SUMS,)."""
    return [0.0] * N_SUMS


def log_ratio_of_all(sums: Sequence[float]) -> float:
    """Mean log ratio of all answers."""
    return sums[2 * N_BINS + 1] / (sums[2 * N_BINS] + PRIOR_ANSWERS)


def length_ratio(sums: Sequence[float], prompt_tokens: float) -> float:
    """What a prediction for such a prompt is to be multiplied by."""
    at = 2 * length_bin(SCALE, N_BINS, prompt_tokens)
    return exp((sums[at + 1] + PRIOR_ANSWERS * log_ratio_of_all(sums)) / (sums[at] + PRIOR_ANSWERS))


def corrected_tokens(
    params: Sequence[float], sums: Sequence[float], prompt_tokens: float, predicted_tokens: float
) -> float:
    """What the predictor says of a request's output, corrected by what was answered. params: the price's."""
    if params[ADAPT] == 0.0:
        return predicted_tokens
    return max(predicted_tokens * length_ratio(sums, prompt_tokens), 1.0)


def ratio_of_all(sums: Sequence[float]) -> float:
    """The ratio over all prompts, for people."""
    return exp(log_ratio_of_all(sums))


def observe_length(
    sums: MutableSequence[float], prompt_tokens: float, predicted_tokens: float, output_tokens: float
) -> None:
    """A request was answered at its full length. predicted_tokens: by the predictor alone."""
    if predicted_tokens <= 0.0 or output_tokens <= 0.0:
        return
    log_ratio = min(max(log(output_tokens / predicted_tokens), -MAX_LOG_RATIO), MAX_LOG_RATIO)
    for place in (length_bin(SCALE, N_BINS, prompt_tokens), N_BINS):
        sums[2 * place] = KEPT * sums[2 * place] + 1.0
        sums[2 * place + 1] = KEPT * sums[2 * place + 1] + log_ratio
