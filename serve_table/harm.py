"""Harm to the residents: what one more request, or a stall, does to those already bound to a decode engine.

A resident will miss its TPOT target with the logistic probability of (predicted TPOT - target) / (width x target).
Its predicted TPOT is the time since its first token, plus its remaining tokens times the engine's step time, plus
any stall, over all its gaps between tokens. Summed over the residents of an engine that is, for a few lengths of
stall, kept as a sum of shares: a resident's share is renewed as its tokens stream, so that a decision costs no more
for many residents than for few. In the subset of Python that numba compiles.
"""

from collections.abc import MutableSequence, Sequence
from math import exp
from typing import NamedTuple

from serve_table.price_params import FLOOR_S, REMAINING_FLOOR, TPOT_WIDTH, expected_step_s, tpot_target_s

STALL_GRID_STEPS = (0.0, 2.0, 6.0, 16.0, 40.0, 100.0)
"""Lengths of stall that the harm is known at, in floors of a step's time; in between it is a line."""
N_STALLS = 6

# A share: probabilities of missing (N_STALLS,), their rises with the step time (N_STALLS,), and two counts.
RISE = N_STALLS
CONTEXT = 2 * N_STALLS
REMAINING = 2 * N_STALLS + 1
N_SHARE = 2 * N_STALLS + 2

RENEWED_AFTER_TOKENS = 16
"""A resident's share is renewed when it has streamed so many tokens more."""
MAX_EXPONENT = 40.0
PREFILLED_OVER_S = 10.0
"""Over which it counts what a prefill engine prefilled of late."""


class Residents(NamedTuple):
    """Those bound to the engines, as a decision sees them, and the time.

    prefill_since_s (n_prefill,): when the engine last began to work or gave back a leg. shares (n_decode * N_SHARE,):
    per engine the sums of its residents' shares. Both are empty where nothing is known of residents. constants: those
    of the price as they were estimated then; empty where they are its params' own.

    Elastic: shares go on with those of the whole requests on each prefill engine. prefilled_tokens (n_prefill,): what
    each prefilled up to `prefill_since_s`, of which 1 / e is left `PREFILLED_OVER_S` later; else empty.
    """

    now_s: float
    prefill_since_s: MutableSequence[float]
    shares: MutableSequence[float]
    constants: Sequence[float] = ()
    prefilled_tokens: MutableSequence[float] | tuple[()] = ()


NO_RESIDENTS = Residents(0.0, [], [])


class Resident(NamedTuple):
    """What its share follows from. elapsed_s: since its first token. lost: it has missed its TTFT target."""

    slo_class: int
    prompt_tokens: float
    predicted_tokens: float
    streamed_tokens: float
    elapsed_s: float
    lost: bool


def logistic(x: float) -> float:
    """1 / (1 + exp(-x)), flat where that is 0 or 1 anyway."""
    if x > MAX_EXPONENT:
        return 1.0
    if x < -MAX_EXPONENT:
        return 0.0
    return 1.0 / (1.0 + exp(-x))


def context_tokens(residents: Residents, engine: int) -> float:
    """Prompt and streamed tokens of an engine's residents."""
    return residents.shares[engine * N_SHARE + CONTEXT]


def remaining_tokens(residents: Residents, engine: int) -> float:
    """Tokens that an engine's residents are predicted to stream yet."""
    return residents.shares[engine * N_SHARE + REMAINING]


def note_prefill(residents: Residents, prefill: int, tokens: float, now_s: float) -> None:
    """A prefill engine has prefilled so many tokens, or begins to work after it was idle."""
    if len(residents.prefilled_tokens) > 0:
        kept = exp((residents.prefill_since_s[prefill] - now_s) / PREFILLED_OVER_S)
        residents.prefilled_tokens[prefill] = kept * residents.prefilled_tokens[prefill] + tokens
    residents.prefill_since_s[prefill] = now_s


def prefilled_tokens_per_s(residents: Residents, prefill: int) -> float:
    """What a prefill engine prefilled of late."""
    kept = exp((residents.prefill_since_s[prefill] - residents.now_s) / PREFILLED_OVER_S)
    return kept * residents.prefilled_tokens[prefill] / PREFILLED_OVER_S


def renew_share(
    params: Sequence[float],
    residents: Residents,
    engine: int,
    n_requests: float,
    resident: Resident,
    share: MutableSequence[float],
    start: int,
) -> None:
    """Renew a resident's share, share[start : start + N_SHARE], all 0 at first, and its engine's sums.

    n_requests: on the engine, which say how long its steps are to be expected.
    """
    sums = residents.shares
    at = engine * N_SHARE
    predicted, streamed = resident.predicted_tokens, resident.streamed_tokens
    streamed_gaps = streamed - 1.0 if streamed > 1.0 else 0.0
    remaining = max(predicted - 1.0 - streamed_gaps, params[REMAINING_FLOOR] * predicted, 1.0)
    allowed_s = tpot_target_s(params, resident.slo_class) * (streamed_gaps + remaining)
    step_s = expected_step_s(params, n_requests, sums[at + CONTEXT])
    scale = 1.0 / (params[TPOT_WIDTH] * allowed_s)
    late = (resident.elapsed_s + remaining * step_s - allowed_s) * scale
    for k in range(N_STALLS):
        missing = 0.0
        if not resident.lost:
            missing = logistic(late + params[FLOOR_S] * scale * STALL_GRID_STEPS[k])
        rise = missing * (1.0 - missing) * remaining * scale
        sums[at + k] += missing - share[start + k]
        sums[at + RISE + k] += rise - share[start + RISE + k]
        share[start + k] = missing
        share[start + RISE + k] = rise
    context = resident.prompt_tokens + streamed
    sums[at + CONTEXT] += context - share[start + CONTEXT]
    sums[at + REMAINING] += remaining - share[start + REMAINING]
    share[start + CONTEXT] = context
    share[start + REMAINING] = remaining


def remove_share(
    residents: Residents, engine: int, n_requests: float, share: MutableSequence[float], start: int
) -> None:
    """Take a resident's share out; n_requests: how many are left. An empty engine's sums are exactly 0 again."""
    at = engine * N_SHARE
    for k in range(N_SHARE):
        residents.shares[at + k] = residents.shares[at + k] - share[start + k] if n_requests > 0.0 else 0.0
        share[start + k] = 0.0


def after_stall(shares: Sequence[float], start: int, steps: float) -> float:
    """The line through shares[start : start + N_STALLS] at a stall of so many floors of a step's time."""
    k = 0
    while k < N_STALLS - 2 and steps > STALL_GRID_STEPS[k + 1]:
        k += 1
    low = STALL_GRID_STEPS[k]
    part = min((steps - low) / (STALL_GRID_STEPS[k + 1] - low), 1.0)
    return shares[start + k] + part * (shares[start + k + 1] - shares[start + k])


def harm(
    params: Sequence[float],
    residents: Residents,
    engine: int,
    n_requests: float,
    rise_s: float,
    pending_s: float,
    stall_s: float,
) -> float:
    """Residents of an engine that are expected to miss their TPOT target for it, beyond those that will anyway.

    rise_s: of the engine's step time. pending_s: the stall that is already bound to come; stall_s: the one that would
    come on top of it. For a long rise the slope is the mean of that at its begin and at its end, where the mean
    resident is as late as a stall would make it.
    """
    shares = residents.shares
    start = engine * N_SHARE
    per_s = 1.0 / params[FLOOR_S]
    begin = (pending_s + stall_s) * per_s
    end = begin + rise_s * shares[start + REMAINING] / max(n_requests, 1.0) * per_s
    hurt = rise_s * 0.5 * (after_stall(shares, start + RISE, begin) + after_stall(shares, start + RISE, end))
    if stall_s > 0.0:
        hurt += after_stall(shares, start, begin) - after_stall(shares, start, pending_s * per_s)
    return hurt
