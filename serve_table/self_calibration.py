"""Self-calibration: the price's constants, estimated from the gaps between tokens that the router sees anyway.

The artifact's constants are where it starts. The mean gap of a resident over a renewal of its share is the mean step
of its engine, and says with the sequences and context tokens of that time, by recursive least squares with
forgetting, how long a step's floor, a token and a context token take. What is first known of them is by how much all
are off together; each one's departure from that takes more evidence. Prefill tokens and hand-offs each have a ratio
that moves slowly. An estimate stays within [1/12, 12] of the artifact's constant. In the subset of Python that numba
compiles.
"""

from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

from serve_table.price import REMOTE_JOIN_STEPS
from serve_table.price_params import (
    ADAPT,
    CONTEXT_TOKEN_S,
    FLOOR_S,
    HANDOFF_S,
    HANDOFF_TOKEN_S,
    KNEE_TOKENS,
    KV_TOKENS,
    N_CONSTANTS,
    OVERHEAD_S,
    PREFILL_TOKEN_S,
    STEP_TOKENS,
    TOKEN_S,
)
from serve_table.step_time import step_time_s

MAX_FACTOR = 12.0
"""Published profiles were up to 13 times off (arXiv 2609.16206)."""

KEPT = 0.999
"""Of what was seen before, at every new sample: about the last thousand count."""
MAX_MOVE = 3.0
"""By which one sample can move a constant: a single wild one is soon made up for, and a few undo a factor of 12."""
OUTLIER = 0.3
"""A sample that is further off than this, as a share, pulls no harder."""
PRIOR_SCALE = 0.3
PRIOR_APART = 0.003
"""What the artifact's constants are worth, in samples: as a whole, and each against the others."""
PRIOR_RATIO = 0.3
LEAST_TOKENS = 8.0
"""Of a window between two renewals: shorter ones say little."""
ROOMY = 0.7
"""Of an engine's KV: with less bound to it nobody waits for room."""
UNSEEN = -1.0

# Places in `sums`: the normal equations of the step (upper triangle, right side), of prefill and of hand-offs, samples.
MATRIX = 0
RIGHT = 6
PREFILL = 9
HANDOFF = 11
STEP_SAMPLES = 13
PREFILL_SAMPLES = 14
HANDOFF_SAMPLES = 15
N_SUMS = 16

# Places per prefill engine: tokens and time of the legs last returned together, and since when it works on the next.
N_RETURNED = 3


class SelfCalibration(NamedTuple):
    """The state. live: the price's params, of which the first N_CONSTANTS are the estimates; whoever decides by them
    holds the same sequence. known (N_CONSTANTS,): the artifact's. sums (N_SUMS,). sampled_s (n_decode,): end of the
    engine's last window. returned (n_prefill * N_RETURNED,).
    """

    live: MutableSequence[float]
    known: Sequence[float]
    sums: MutableSequence[float]
    sampled_s: MutableSequence[float]
    returned: MutableSequence[float]


def new_self_calibration(params: Sequence[float], prefill_engines: int, decode_engines: int) -> SelfCalibration:
    """Nothing was seen yet. params: the price's; they stay as they are."""
    return SelfCalibration(
        list(params),
        list(params[:N_CONSTANTS]),
        [0.0] * N_SUMS,
        [0.0] * decode_engines,
        [0.0] * (prefill_engines * N_RETURNED),
    )


class Mark(NamedTuple):
    """An engine as one of its residents renews its share. tokens: that this one has streamed by time_s.

    requests and context_tokens: of those that decode. local_tokens: prefilled on the engine so far; UNSEEN while any
    are pending.
    """

    time_s: float
    tokens: float
    requests: float
    context_tokens: float
    local_tokens: float


def outlier_weight(error: float) -> float:
    """Huber's weight of a sample with such a relative error."""
    return 1.0 if abs(error) <= OUTLIER else OUTLIER / abs(error)


def within(factor: float) -> float:
    """A factor on an artifact's constant, bounded."""
    return min(max(factor, 1.0 / MAX_FACTOR), MAX_FACTOR)


def move(found: SelfCalibration, k: int, factor: float) -> None:
    """Let a constant be the artifact's times a factor, but no further from what it was than one sample may move it."""
    before, wanted = found.live[k], found.known[k] * factor
    found.live[k] = min(max(wanted, before / MAX_MOVE), before * MAX_MOVE)


def observe_window(found: SelfCalibration, engine: int, begin: Mark, end: Mark) -> None:
    """A resident's window between two renewals, unless prefills stretched it or it overlaps the engine's last one."""
    tokens = end.tokens - begin.tokens
    if found.live[ADAPT] == 0.0 or tokens < LEAST_TOKENS or begin.time_s < found.sampled_s[engine]:
        return
    if begin.local_tokens == UNSEEN or end.local_tokens != begin.local_tokens:
        return
    found.sampled_s[engine] = end.time_s
    requests = 0.5 * (begin.requests + end.requests)
    context = 0.5 * (begin.context_tokens + end.context_tokens)
    observe_step(found, requests, context, (end.time_s - begin.time_s) / tokens)


def observe_step(found: SelfCalibration, n_requests: float, context_tokens: float, step_s: float) -> None:
    """A mean step without prefill of a decode engine with so many sequences and context tokens."""
    live, known, sums = found.live, found.known, found.sums
    if step_s <= 0.0 or n_requests <= 0.0:
        return
    beyond_s = live[PREFILL_TOKEN_S] * max(n_requests - known[KNEE_TOKENS], 0.0)
    expected_s = step_time_s(live, n_requests, context_tokens)
    weight = outlier_weight(step_s / expected_s - 1.0)
    floor = known[FLOOR_S] / expected_s
    token = known[TOKEN_S] * min(n_requests, known[KNEE_TOKENS]) / expected_s
    context = known[CONTEXT_TOKEN_S] * context_tokens / expected_s
    observed = max(step_s - beyond_s, 0.0) / expected_s
    for k in range(PREFILL):
        sums[k] *= KEPT
    sums[MATRIX] += weight * floor * floor
    sums[MATRIX + 1] += weight * floor * token
    sums[MATRIX + 2] += weight * floor * context
    sums[MATRIX + 3] += weight * token * token
    sums[MATRIX + 4] += weight * token * context
    sums[MATRIX + 5] += weight * context * context
    sums[RIGHT] += weight * floor * observed
    sums[RIGHT + 1] += weight * token * observed
    sums[RIGHT + 2] += weight * context * observed
    sums[STEP_SAMPLES] += 1.0
    estimate_step(found)


def common_scale(found: SelfCalibration) -> float:
    """By what factor all of the step's constants are off together."""
    sums = found.sums
    matrix = sums[0] + sums[3] + sums[5] + 2.0 * (sums[1] + sums[2] + sums[4])
    right = sums[RIGHT] + sums[RIGHT + 1] + sums[RIGHT + 2]
    # Of a sample's weight, which falls with the square of the scale, the prior keeps its share.
    scale = within(right / matrix) if matrix > 0.0 else 1.0
    prior = PRIOR_SCALE / (scale * scale)
    return within((right + prior) / (matrix + prior))


def estimate_step(found: SelfCalibration) -> None:
    """Solve the normal equations; the prior of each constant is the artifact's times the common scale."""
    sums = found.sums
    scale = common_scale(found)
    prior = PRIOR_APART / (scale * scale)
    a, b, c = sums[0] + prior, sums[1], sums[2]
    d, e, f = sums[3] + prior, sums[4], sums[5] + prior
    x, y, z = sums[RIGHT] + prior * scale, sums[RIGHT + 1] + prior * scale, sums[RIGHT + 2] + prior * scale
    ca, cb, cc = d * f - e * e, c * e - b * f, b * e - c * d
    determinant = a * ca + b * cb + c * cc
    if determinant <= 0.0:
        return
    floor = within((ca * x + cb * y + cc * z) / determinant)
    token = within((cb * x + (a * f - c * c) * y + (b * c - a * e) * z) / determinant)
    context = within((cc * x + (b * c - a * e) * y + (a * d - b * b) * z) / determinant)
    # Where one is at its bound the others make up for it.
    for _ in range(3):
        floor = within((x - b * token - c * context) / a)
        token = within((y - b * floor - e * context) / d)
        context = within((z - c * floor - e * token) / f)
    move(found, FLOOR_S, floor)
    move(found, TOKEN_S, token)
    move(found, CONTEXT_TOKEN_S, context)
    if sums[PREFILL_SAMPLES] == 0.0:
        move(found, PREFILL_TOKEN_S, scale)


def prefill_starts(found: SelfCalibration, prefill: int, now_s: float) -> None:
    """An idle prefill engine has been sent a leg."""
    found.returned[prefill * N_RETURNED + 2] = now_s + found.live[OVERHEAD_S]


def prefill_disturbed(found: SelfCalibration, prefill: int, now_s: float) -> None:
    """A prefill engine that serves whole requests too has prefilled something: its times say nothing of legs."""
    at = prefill * N_RETURNED
    found.returned[at] = 0.0
    found.returned[at + 1] = 0.0
    found.returned[at + 2] = now_s


def prefill_returns(found: SelfCalibration, prefill: int, tokens: float, now_s: float) -> None:
    """A prefill engine has returned a leg of so many uncached tokens; those of one step come together."""
    at = prefill * N_RETURNED
    returned = found.returned
    busy_s = now_s - returned[at + 2]
    returned[at + 2] = now_s
    if busy_s < 0.25 * found.live[FLOOR_S]:
        returned[at] += tokens
        returned[at + 1] += max(busy_s, 0.0)
        return
    if returned[at] > 0.0:
        observe_prefill(found, returned[at], returned[at + 1])
    returned[at] = tokens
    returned[at + 1] = busy_s


def observe_prefill(found: SelfCalibration, tokens: float, busy_s: float) -> None:
    """A prefill engine took so long for so many tokens."""
    live, known, sums = found.live, found.known, found.sums
    steps = max(tokens / live[STEP_TOKENS], 1.0)
    beyond = steps * max(tokens / steps - known[KNEE_TOKENS], 0.0)
    if live[ADAPT] == 0.0 or beyond <= 0.0 or busy_s <= 0.0:
        return
    expected_s = steps * step_time_s(live, tokens / steps, 0.0)
    weight = outlier_weight(busy_s / expected_s - 1.0)
    share = known[PREFILL_TOKEN_S] * beyond / expected_s
    # What of it is not floor and first tokens, which the decode engines tell of.
    observed = (busy_s - expected_s + live[PREFILL_TOKEN_S] * beyond) / expected_s
    move(found, PREFILL_TOKEN_S, ratio_after(sums, PREFILL, weight, share, observed))
    sums[PREFILL_SAMPLES] += 1.0


def observe_pull(found: SelfCalibration, tokens: float, bound_tokens: float, waited_s: float, seen: Mark) -> None:
    """The first token of a remote request came `waited_s` after its prefill leg was returned.

    tokens: of KV that were to be pulled. bound_tokens: context of all that are bound to the engine; where that fills
    its KV the request may have waited for room, and where prefills are pending for them.
    """
    live = found.live
    if seen.local_tokens == UNSEEN or bound_tokens > ROOMY * live[KV_TOKENS]:
        return
    steps_s = step_time_s(live, seen.requests, seen.context_tokens)
    if seen.requests > 1.0:
        steps_s *= REMOTE_JOIN_STEPS
    observe_handoff(found, tokens, waited_s - live[OVERHEAD_S] - steps_s, steps_s)


def observe_handoff(found: SelfCalibration, tokens: float, handoff_s: float, steps_s: float) -> None:
    """A hand-off of so many tokens, seen as what is left of a longer time after `steps_s` of steps to wait for."""
    live, known, sums = found.live, found.known, found.sums
    known_s = known[HANDOFF_S] + known[HANDOFF_TOKEN_S] * tokens
    expected_s = live[HANDOFF_S] + live[HANDOFF_TOKEN_S] * tokens
    if live[ADAPT] == 0.0 or known_s <= 0.0:
        return
    whole_s = expected_s + steps_s
    weight = outlier_weight((handoff_s - expected_s) / whole_s)
    ratio = ratio_after(sums, HANDOFF, weight, known_s / whole_s, handoff_s / whole_s)
    move(found, HANDOFF_S, ratio)
    move(found, HANDOFF_TOKEN_S, ratio)
    sums[HANDOFF_SAMPLES] += 1.0


def ratio_after(sums: MutableSequence[float], at: int, weight: float, share: float, observed: float) -> float:
    """The ratio of observed to known after one more sample."""
    sums[at] = KEPT * sums[at] + weight * share * share
    sums[at + 1] = KEPT * sums[at + 1] + weight * share * observed
    ratio = within(sums[at + 1] / sums[at]) if sums[at] > 0.0 else 1.0
    prior = PRIOR_RATIO / (ratio * ratio)
    return within((sums[at + 1] + prior) / (sums[at] + prior))
