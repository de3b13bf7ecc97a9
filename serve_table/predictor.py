"""Output-length prediction: quantiles of journaled lengths by prompt length, compiled into the artifact."""

from collections.abc import Sequence
from dataclasses import dataclass

from serve_table.lookup import length_bin

DEFAULT_OUTPUT_TOKENS = 200.0


@dataclass(frozen=True)
class LengthPredictor:
    """Predicts output tokens by the prompt-length bin that a request falls into.

    scale: bins per unit of log(1 + prompt tokens). predicted_tokens (n_bins,): one length a bin.
    """

    scale: float
    predicted_tokens: Sequence[float]

    def predict(self, prompt_tokens: float, limit_tokens: int | None) -> float:
        """Predicted output tokens, at least 1, never above the request's own limit where it has one.

        Callers pass no limit for requests that set `ignore_eos`: those come from benchmarks, whose limit is the
        exact length and must not leak into the decision.
        """
        bin_index = length_bin(self.scale, len(self.predicted_tokens), prompt_tokens)
        predicted = max(float(self.predicted_tokens[bin_index]), 1.0)
        return predicted if limit_tokens is None else max(min(predicted, float(limit_tokens)), 1.0)


def constant_predictor(output_tokens: float = DEFAULT_OUTPUT_TOKENS) -> LengthPredictor:
    """The predictor of a router without an artifact."""
    return LengthPredictor(scale=1.0, predicted_tokens=[output_tokens])
