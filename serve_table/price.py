"""The price: for every candidate the request's chance of meeting its targets, less the harm to the residents.

A candidate is local or remote prefill, a prefill engine and a decode engine; in an elastic fleet also a prefill engine
for the whole request. Its value is

    P(TTFT in time) x P(TPOT in time) - harm weight x residents expected to miss for it - small terms

with probabilities logistic in (predicted - target) / (width x target). The time that a remote prefill takes enters
the value of every decode engine alike, so the best prefill engine is found first. A whole request is worth what a
local one would be on that engine, whose legs are its pending prefill; in turn a leg harms the whole requests there.
In the subset of Python that numba compiles.
"""

from collections.abc import Sequence

from serve_table.harm import (
    Residents,
    context_tokens,
    harm,
    logistic,
    prefilled_tokens_per_s,
    remaining_tokens,
)
from serve_table.placement import count_up
from serve_table.price_params import (
    BACKLOG_WEIGHT,
    HANDOFF_S,
    HANDOFF_TOKEN_S,
    HARM_WEIGHT,
    KV_TOKENS,
    KV_WAIT,
    LATE_WEIGHT,
    LOCAL_WEIGHT,
    MAX_SEQUENCES,
    OVERHEAD_S,
    PREFILL_TOKEN_S,
    PREFILL_WEIGHT,
    SHORT_STAY,
    STEP_TOKENS,
    TABLE_WEIGHT,
    TPOT_WEIGHT,
    TPOT_WIDTH,
    TTFT_WEIGHT,
    TTFT_WIDTH,
    expected_step_s,
    tpot_target_s,
    ttft_target_s,
)
from serve_table.situation import LOCAL, NO_ENGINE, REMOTE, WHOLE, Fleet, Request, n_decode_engines
from serve_table.step_time import step_time_s

LOCAL_JOIN_STEPS = 1.5
REMOTE_JOIN_STEPS = 3.0
"""Steps of a busy engine from a request's coming to its first token; a transfer is noticed one step late."""

WHOLE_MARGIN = 0.02
"""What a whole request must be worth more: it takes a prefill engine for longer than it is seen to."""
PREFILL_CAUTION = 1.5
"""On the share of its time that a prefill engine prefills: stalls come in bursts, and TPOT targets have little room."""
MOST_BUSY = 0.9

TIE = 1e-9
"""Values and times no further apart are equal: sums over residents that have left are not quite 0."""

LEAST_BACKLOG = 0.1
"""An engine that gives nothing back for long is not taken for one that has done its work."""


def prefill_time_s(params: Sequence[float], tokens: float) -> float:
    """Time that a prefill engine needs for so many tokens, in steps as full as they can be."""
    if tokens <= 0.0:
        return 0.0
    steps = max(tokens / params[STEP_TOKENS], 1.0)
    return steps * step_time_s(params, tokens / steps, 0.0)


def prefill_backlog_s(params: Sequence[float], fleet: Fleet, residents: Residents, prefill: int) -> float:
    """Time that a prefill engine needs for what it was sent, less what it has done of it."""
    backlog_s = prefill_time_s(params, fleet.prefill_tokens[prefill])
    if backlog_s > 0.0 and len(residents.prefill_since_s) > 0:
        done_s = residents.now_s - residents.prefill_since_s[prefill]
        backlog_s = max(backlog_s - done_s, LEAST_BACKLOG * backlog_s)
    return backlog_s


def prefilled_after_s(
    params: Sequence[float], request: Request, fleet: Fleet, residents: Residents, prefill: int
) -> float:
    """Time until a prefill engine would be done with this request, its share of what is held before it included."""
    backlog_s = prefill_backlog_s(params, fleet, residents, prefill)
    if request.held_ahead_tokens > 0.0:
        backlog_s += prefill_time_s(params, request.held_ahead_tokens / max(count_up(fleet.prefill_up), 1))
    return backlog_s + prefill_time_s(params, request.prompt_tokens - request.prefill_cached_tokens[prefill])


def leg_harm(params: Sequence[float], request: Request, fleet: Fleet, residents: Residents, prefill: int) -> float:
    """What a prefill leg's stall costs the whole requests on its engine; 0 where the fleet is not elastic."""
    if fleet.whole_engines == 0 or len(residents.shares) == 0:
        return 0.0
    d = n_decode_engines(fleet) + prefill
    pending_s = params[PREFILL_TOKEN_S] * fleet.decode_prefill_tokens[d]
    stall_s = params[PREFILL_TOKEN_S] * max(request.prompt_tokens - request.prefill_cached_tokens[prefill], 0.0)
    return params[HARM_WEIGHT] * harm(params, residents, d, fleet.decode_requests[d], 0.0, pending_s, stall_s)


def best_prefill(
    params: Sequence[float], request: Request, fleet: Fleet, residents: Residents, rotation: int
) -> tuple[int, float]:
    """The prefill engine that would be done first, and when; ties in rotation.

    Harm to whole requests there counts as the time that costs as much of the chance to meet a TTFT target in reach.
    """
    n = len(fleet.prefill_up)
    best = NO_ENGINE
    best_s = 0.0
    best_cost_s = 0.0
    for k in range(n):
        p = (rotation + k) % n
        if fleet.prefill_up[p] > 0.0:
            after_s = prefilled_after_s(params, request, fleet, residents, p)
            cost_s = after_s
            if fleet.whole_engines > 0:
                slo_class = 1 if request.slo_class == 1 else 0
                harm_s = 4.0 * params[TTFT_WIDTH] * ttft_target_s(params, slo_class, request.prompt_tokens)
                cost_s += harm_s * leg_harm(params, request, fleet, residents, p)
            if best == NO_ENGINE or cost_s < best_cost_s - TIE:
                best, best_s, best_cost_s = p, after_s, cost_s
    return best, best_s


def share_to_leave(params: Sequence[float], context: float, n: float) -> float:
    """Of the residents of a decode engine that cannot hold so many tokens and sequences; 0 where it can."""
    return max(1.0 - params[KV_TOKENS] / max(context, 1.0), 1.0 - params[MAX_SEQUENCES] / n, 0.0)


def decode_values(
    params: Sequence[float],
    request: Request,
    fleet: Fleet,
    residents: Residents,
    prefilled_s: float,
    prefill_tokens: float,
    d: int,
    slowdown: float = 1.0,
) -> tuple[float, float]:
    """Value of a request on decode engine d: prefilled there, and elsewhere after `prefilled_s`.

    prefill_tokens: what would be computed elsewhere. slowdown: of the engine's steps.
    """
    known = len(residents.shares) > 0
    n = fleet.decode_requests[d]
    context = context_tokens(residents, d) if known else fleet.decode_tokens[d]
    prompt = request.prompt_tokens
    slo_class = 1 if request.slo_class == 1 else 0
    step_s = slowdown * expected_step_s(params, n, context)
    joined_s = slowdown * expected_step_s(params, n + 1.0, context + prompt + 0.5 * request.predicted_output_tokens)
    uncached = max(prompt - request.decode_cached_tokens[d], 0.0)
    pending_s = params[PREFILL_TOKEN_S] * fleet.decode_prefill_tokens[d]
    stall_s = params[PREFILL_TOKEN_S] * uncached
    left = remaining_tokens(residents, d) / max(n, 1.0) if known else 0.0
    wait_s = params[KV_WAIT] * share_to_leave(params, context + prompt, n + 1.0) * left * step_s
    local_steps = LOCAL_JOIN_STEPS if n > 0.0 else 1.0
    local_steps += (fleet.decode_prefill_tokens[d] + uncached) / params[STEP_TOKENS]
    local_s = request.waited_s + params[OVERHEAD_S] + wait_s + pending_s + stall_s + local_steps * joined_s
    handoff_s = params[HANDOFF_S] + params[HANDOFF_TOKEN_S] * uncached
    remote_steps = REMOTE_JOIN_STEPS if n > 0.0 else 1.0
    remote_s = request.waited_s + 2.0 * params[OVERHEAD_S] + prefilled_s + handoff_s + wait_s + remote_steps * joined_s
    target_s = ttft_target_s(params, slo_class, prompt)
    tpot_share = joined_s / tpot_target_s(params, slo_class)
    in_time = logistic((1.0 - tpot_share) / params[TPOT_WIDTH])
    small = params[TPOT_WEIGHT] * tpot_share + params[BACKLOG_WEIGHT] * fleet.decode_tokens[d] / params[KV_TOKENS]
    local = in_time * logistic((1.0 - local_s / target_s) / params[TTFT_WIDTH]) - small
    local -= (params[TTFT_WEIGHT] * local_s + params[LOCAL_WEIGHT] * stall_s) / target_s
    local -= params[LATE_WEIGHT] * max(local_s / target_s - 1.0, 0.0)
    remote = in_time * logistic((1.0 - remote_s / target_s) / params[TTFT_WIDTH]) - small
    work_s = params[PREFILL_TOKEN_S] * prefill_tokens
    remote -= (params[TTFT_WEIGHT] * remote_s + params[PREFILL_WEIGHT] * work_s) / target_s
    remote -= params[LATE_WEIGHT] * max(remote_s / target_s - 1.0, 0.0)
    if known:
        rise_s, weight = joined_s - step_s, params[HARM_WEIGHT]
        stay = min(request.predicted_output_tokens / max(left, 1.0), 1.0)
        rise_s *= 1.0 - params[SHORT_STAY] * (1.0 - stay)
        local -= weight * harm(params, residents, d, n, rise_s, pending_s, stall_s)
        remote -= weight * harm(params, residents, d, n, rise_s, pending_s, 0.0)
    return local, remote


def whole_value(params: Sequence[float], request: Request, fleet: Fleet, residents: Residents, prefill: int) -> float:
    """Value of a whole request on a prefill engine, whose steps legs will stretch as they did of late."""
    busy = 0.0
    if len(residents.prefilled_tokens) > 0:
        busy = params[PREFILL_TOKEN_S] * prefilled_tokens_per_s(residents, prefill)
    slowdown = 1.0 / (1.0 - min(PREFILL_CAUTION * busy, MOST_BUSY))
    d = n_decode_engines(fleet) + prefill
    value, _ = decode_values(params, request, fleet, residents, 0.0, 0.0, d, slowdown)
    return value - WHOLE_MARGIN


def best_candidate(
    params: Sequence[float], request: Request, fleet: Fleet, residents: Residents, rotation: int, favoured: int
) -> tuple[int, int, int]:
    """(action, prefill, decode) of the highest value; ties in rotation, of equal actions the remote one and last whole.

    favoured: the action that the table has for the request, worth `table_weight` more.
    """
    prefill = NO_ENGINE
    prefilled_s = 0.0
    if request.remote_allowed:
        prefill, prefilled_s = best_prefill(params, request, fleet, residents, rotation)
    prefill_tokens = 0.0
    remote_harm = 0.0
    if prefill != NO_ENGINE:
        prefill_tokens = request.prompt_tokens - request.prefill_cached_tokens[prefill]
        remote_harm = leg_harm(params, request, fleet, residents, prefill)
    best_action = LOCAL
    best = NO_ENGINE
    best_value = 0.0
    local_worth = params[TABLE_WEIGHT] if favoured == LOCAL else -params[TABLE_WEIGHT]
    n = n_decode_engines(fleet)
    for k in range(n):
        d = (rotation + k) % n
        if fleet.decode_up[d] > 0.0:
            local, remote = decode_values(params, request, fleet, residents, prefilled_s, prefill_tokens, d)
            local += local_worth
            remote -= remote_harm
            if prefill != NO_ENGINE and (best == NO_ENGINE or remote > best_value + TIE):
                best_action, best, best_value = REMOTE, d, remote
            if best == NO_ENGINE or local > best_value + TIE:
                best_action, best, best_value = LOCAL, d, local
    for k in range(fleet.whole_engines):
        p = (rotation + k) % fleet.whole_engines
        if fleet.decode_up[n + p] > 0.0:
            whole = whole_value(params, request, fleet, residents, p)
            if best == NO_ENGINE or whole > best_value + TIE:
                best_action, best, best_value = WHOLE, n + p, whole
    return best_action, prefill if best_action == REMOTE else NO_ENGINE, best
