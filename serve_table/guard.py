"""The guard: which requests wait in the router until a prefill engine is nearly free, and which of those goes next.

A request that is to be prefilled remotely is held while its engine's backlog is longer than `hold_s`: what waits in
the router can still be overtaken by what is more urgent, and decided again when its turn comes. Whoever would be late
in the order of arrival goes first, the earliest deadline before the others; what is late anyway goes last, but not for
ever: after `late_hold` of its targets it goes before all others.
In the subset of Python that numba compiles.
"""

from collections.abc import Sequence
from math import inf

from serve_table.harm import Residents
from serve_table.price import LEAST_BACKLOG, prefill_backlog_s, prefill_time_s
from serve_table.price_params import DEADLINE_SHARE, HANDOFF_S, HOLD_S, LATE_HOLD, OVERHEAD_S, RUSH, ttft_target_s
from serve_table.situation import NO_ENGINE, Fleet, Request

OVERDUE = 0
URGENT = 1
IN_TIME = 2
LATE = 3
TIER_NAMES = ("overdue", "urgent", "in time", "late")
"""Tiers of held requests, in the order in which they go."""

MAX_TRIED = 16
"""Of the most urgent that have to wait on, so many are decided again each time that prefill engines take more."""
ROUNDING_S = 1e-9


def must_hold(params: Sequence[float], fleet: Fleet, residents: Residents, prefill: int) -> bool:
    """Whether a request that was decided for this prefill engine (NO_ENGINE: for none) is to wait in the router."""
    if params[HOLD_S] <= 0.0 or prefill == NO_ENGINE:
        return False
    return prefill_backlog_s(params, fleet, residents, prefill) > params[HOLD_S]


def takes_more(params: Sequence[float], fleet: Fleet, residents: Residents) -> bool:
    """Whether any prefill engine has so little backlog that held requests are to be decided again; also where none is
    up, since nothing is to be waited for then.
    """
    any_up = False
    for p in range(len(fleet.prefill_up)):
        if fleet.prefill_up[p] > 0.0:
            any_up = True
            if prefill_backlog_s(params, fleet, residents, p) <= params[HOLD_S]:
                return True
    return not any_up


def takes_more_at_s(params: Sequence[float], fleet: Fleet, residents: Residents) -> float:
    """When the next prefill engine will take more, if none gives anything back before; infinity where that is all
    that can be waited for.
    """
    first_s = inf
    for p in range(len(fleet.prefill_up)):
        if fleet.prefill_up[p] > 0.0:
            whole_s = prefill_time_s(params, fleet.prefill_tokens[p])
            if LEAST_BACKLOG * whole_s <= params[HOLD_S]:
                begun_s = residents.prefill_since_s[p] if len(residents.prefill_since_s) > 0 else residents.now_s
                at_s = begun_s + whole_s - params[HOLD_S] + ROUNDING_S
                if at_s > residents.now_s:
                    first_s = min(first_s, at_s)
    return first_s


def held_tier(params: Sequence[float], request: Request, tokens_before: float) -> int:
    """OVERDUE, URGENT, IN_TIME or LATE, from its class, prompt and the time that it has waited.

    tokens_before: uncached prompt tokens of the held requests that came before it; who would be late for them is
    urgent.
    """
    target_s = ttft_target_s(params, request.slo_class, request.prompt_tokens)
    if request.waited_s > params[LATE_HOLD] * target_s:
        return OVERDUE
    own_s = prefill_time_s(params, request.prompt_tokens)
    left_s = target_s - request.waited_s - 2.0 * params[OVERHEAD_S] - own_s - params[HANDOFF_S]
    if left_s < 0.0:
        return LATE
    return URGENT if params[RUSH] * prefill_time_s(params, tokens_before) > left_s else IN_TIME


def held_key(params: Sequence[float], request: Request, tokens_before: float) -> tuple[int, float]:
    """Sorts held requests: the tier, then for the urgent the time left to the deadline, for the others who came first.

    Those in time may go by their deadlines too (`deadline_share`); a share of them spares long prompts, whose targets
    are long, the longest waits.
    """
    tier = held_tier(params, request, tokens_before)
    target_s = ttft_target_s(params, request.slo_class, request.prompt_tokens)
    if tier == URGENT:
        return tier, target_s - request.waited_s
    if tier == IN_TIME:
        return tier, params[DEADLINE_SHARE] * target_s - request.waited_s
    return tier, -request.waited_s
