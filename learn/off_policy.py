"""Off-policy evaluation: what a journal made under one policy tells of another, by importance weights.

Inverse propensity scores (IPS), the same self-normalised (SNIPS; Swaminathan and Joachims 2015) and doubly robust
(DR; Dudik et al. 2011) with a cross-fitted outcome model. All three take every request for a draw of its own. Requests
in a cluster are not, a choice changes the load that others see, so what is estimated is the outcome of one request
that deviates alone under the load of the journal's policy, not that of a cluster whose every request follows the
candidate.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from learn.evaluate import interval

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

BATCHES = 30
"""Requests that queue together share their luck: intervals are of the means of so many batches in order of arrival."""

BATCH_ROWS = 10
FOLDS = 5
RIDGE = 1.0
MIN_EFFECTIVE_ROWS = 20.0
WILSON_Z = 1.96


@dataclass(frozen=True)
class Estimate:
    """A share with its 95 % interval, which is kept within [0, 1]; IPS itself may leave it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class OffPolicy:
    """A candidate's estimates from one journal.

    matched: rows whose journaled choice is the candidate's. effective_rows: (sum w)^2 / sum w^2 of their weights w.
    clipped: rows whose weight was cut to the limit. refusal: why there are no estimates.
    """

    rows: int
    matched: int
    effective_rows: float
    largest_weight: float
    clipped: int
    ips: Estimate | None = None
    snips: Estimate | None = None
    dr: Estimate | None = None
    refusal: str | None = None


def on_policy(reward: Floats) -> Estimate:
    """The mean of rewards (n_rows,) in order of arrival."""
    return _widened(_estimate(float(reward.mean()), reward - reward.mean()), float(len(reward)))


def off_policy(
    reward: Floats,
    matched: Bools,
    probability: Floats,
    logged_features: Floats,
    target_features: Floats,
    clip: float | None = None,
) -> OffPolicy:
    """Evaluate a candidate on logged rows, in order of arrival.

    reward: (n_rows,) within [0, 1]. matched: (n_rows,) whether the journaled choice is the candidate's. probability:
    (n_rows,) of the journaled choice under the policy that made it, above 0. logged_features, target_features:
    (n_rows, n_features) of a row with its journaled choice, and with the candidate's, for the outcome model.
    clip: largest weight, None for no limit; clipped weights trade bias for variance.
    """
    weight = np.where(matched, 1.0 / probability, 0.0)
    clipped = 0
    if clip is not None:
        clipped = int((weight > clip).sum())
        weight = np.minimum(weight, clip)
    n, n_matched = len(reward), int(matched.sum())
    effective = effective_rows(weight)
    largest = float(weight.max(initial=0.0))
    if effective < MIN_EFFECTIVE_ROWS:
        refusal = f"{n_matched} rows chose so, {effective:.0f} effective: at least {MIN_EFFECTIVE_ROWS:.0f} are needed"
        return OffPolicy(n, n_matched, effective, largest, clipped, refusal=refusal)
    predicted = cross_fitted(reward, logged_features, target_features)
    # Where nearly all of few rows kept their targets, their spread says too little of how far off they may be.
    return OffPolicy(
        rows=n,
        matched=n_matched,
        effective_rows=effective,
        largest_weight=largest,
        clipped=clipped,
        ips=ips(reward, weight),
        snips=_widened(snips(reward, weight), effective),
        dr=_widened(doubly_robust(reward, weight, *predicted), effective),
    )


def effective_rows(weight: Floats) -> float:
    """Rows of equal weight that would tell as much as these weights (n_rows,) do (Kish)."""
    total = float(weight.sum())
    return total**2 / float(np.square(weight).sum()) if total > 0.0 else 0.0


def ips(reward: Floats, weight: Floats) -> Estimate:
    """Mean of weight times reward: unbiased where the propensities are right, and of the largest variance."""
    weighted = weight * reward
    value = float(weighted.mean())
    return _estimate(value, weighted - value)


def snips(reward: Floats, weight: Floats) -> Estimate:
    """Weighted mean of the rewards; its interval by the delta method."""
    value = float((weight * reward).sum() / weight.sum())
    return _estimate(value, weight * (reward - value) / weight.mean())


def doubly_robust(reward: Floats, weight: Floats, logged_model: Floats, target_model: Floats) -> Estimate:
    """The model's mean over the candidate's choices, corrected by the weighted errors on the journaled ones.

    Right where either the propensities or the model (n_rows,) are.
    """
    score = target_model + weight * (reward - logged_model)
    value = float(score.mean())
    return _estimate(value, score - value)


def cross_fitted(reward: Floats, logged_features: Floats, target_features: Floats) -> tuple[Floats, Floats]:
    """Predicted rewards (n_rows,) of the journaled and of the candidate's choices.

    By ridge regression; each of `FOLDS` stretches of time is predicted from the others, so that no row's own outcome
    is in its prediction.
    """
    logged, target = np.empty(len(reward)), np.empty(len(reward))
    for fold in np.array_split(np.arange(len(reward)), FOLDS):
        others = np.ones(len(reward), bool)
        others[fold] = False
        centre, scale = logged_features[others].mean(axis=0), logged_features[others].std(axis=0)
        scale[scale < 1e-12] = 1.0
        known = (logged_features[others] - centre) / scale
        mean = reward[others].mean()
        slope = np.linalg.solve(known.T @ known + RIDGE * np.eye(known.shape[1]), known.T @ (reward[others] - mean))
        logged[fold] = np.clip(mean + (logged_features[fold] - centre) / scale @ slope, 0.0, 1.0)
        target[fold] = np.clip(mean + (target_features[fold] - centre) / scale @ slope, 0.0, 1.0)
    return logged, target


def _estimate(value: float, influence: Floats) -> Estimate:
    """The value with a t interval from the batch means of its rows' influence (n_rows,), whose mean is 0."""
    n_batches = min(BATCHES, max(len(influence) // BATCH_ROWS, 2))
    means = np.array([batch.mean() for batch in np.array_split(influence, n_batches)])
    low, high = interval(means)
    return Estimate(value, min(max(value + low, 0.0), 1.0), max(min(value + high, 1.0), 0.0))


def _widened(found: Estimate, effective: float) -> Estimate:
    """At least as wide as Wilson's interval of a share that was seen in so many rows."""
    share = min(max(found.value, 0.0), 1.0)
    z2 = WILSON_Z**2 / effective
    middle = (share + z2 / 2.0) / (1.0 + z2)
    half = WILSON_Z * math.sqrt(share * (1.0 - share) / effective + z2 / (4.0 * effective)) / (1.0 + z2)
    return Estimate(found.value, max(min(found.low, middle - half), 0.0), min(max(found.high, middle + half), 1.0))
