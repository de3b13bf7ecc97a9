"""The decision: local or remote prefill, which prefill engine, which decode engine.

The price may also give a whole request to a prefill engine, where the fleet is elastic; nothing else does.

Every function here is pure (no clock, network or own randomness) and written in the subset of Python that
numba compiles. The router calls them as they are, with lists; `learn` compiles the same functions for the
simulator, with arrays. Sequences are indexed by engine: prefill engines (n_prefill,), decode engines
(n_decode,). Ties between engines go to the first from `rotation` on, so equal engines take turns.
"""

from collections.abc import Sequence

from serve_table.harm import NO_RESIDENTS, Residents
from serve_table.lookup import Table, action_of, cluster_of, regime_of
from serve_table.placement import (
    better_of_two,
    class_aware_decode,
    count_first_up,
    count_up,
    least,
    length_split_decode,
    marginal_decode,
    marginal_prefill,
    nth_up,
    place_decode,
    place_prefill,
)
from serve_table.price import best_candidate
from serve_table.situation import (
    LOCAL,
    NO_ENGINE,
    REASON_EXPLORED,
    REASON_NO_PREFILL_ENGINE,
    REASON_POLICY,
    REASON_UNSUPPORTED_REMOTE,
    REMOTE,
    WHOLE,
    Decision,
    Draws,
    Fleet,
    Request,
    features_of,
    n_decode_engines,
)

ROUND_ROBIN = 0
LEAST_LOADED = 1
LENGTH_THRESHOLD = 2
POWER_OF_TWO = 3
ALWAYS_LOCAL = 4
DYNAMO_STYLE = 5
MARGINAL_COST = 6
TABLE = 7
PRICE = 8
CLASS_AWARE = 9

DYNAMO_ISL_BOUNDING = 0.0
DYNAMO_PREFILL_LOAD = 1.0
DYNAMO_ISL_OR_LOAD = 2.0


def dynamo_goes_local(params: Sequence[float], request: Request, fleet: Fleet, prefill: int, decode: int) -> bool:
    """NVIDIA Dynamo 1.6's conditional disaggregation.

    params: [policy, eff_isl_threshold, eff_isl_ratio_threshold, prefill_busy_tokens, decode_busy_requests].
    isl_bounding: local if the tokens not cached on the decode engine are below both the threshold and the
    ratio of the prompt. prefill_load: local if the prefill engine's tokens exceed the busy threshold. A
    decode engine at its busy threshold vetoes local; a threshold of 0 tokens never goes local by length.
    """
    if fleet.decode_requests[decode] >= params[4]:
        return False
    uncached = max(request.prompt_tokens - request.decode_cached_tokens[decode], 0.0)
    by_length = uncached < params[1] and uncached < params[2] * request.prompt_tokens
    by_load = prefill != NO_ENGINE and fleet.prefill_tokens[prefill] > params[3]
    if params[0] == DYNAMO_ISL_BOUNDING:
        return by_length
    if params[0] == DYNAMO_PREFILL_LOAD:
        return by_load
    return by_length or by_load


def propensity_of(
    action: int, is_greedy: bool, both_actions: bool, n_prefill: int, n_decode: int, explore: float
) -> float:
    """Probability of a choice when a share `explore` of requests draws an action, then engines, uniformly.

    A whole request is never drawn.
    """
    if action == WHOLE:
        return 1.0 - explore if is_greedy else 0.0
    uniform = 1.0 / n_decode
    if both_actions:
        uniform *= 0.5
    if action == REMOTE:
        uniform /= n_prefill
    return explore * uniform + (1.0 - explore if is_greedy else 0.0)


def choose(
    policy: int,
    params: Sequence[float],
    table: Table,
    request: Request,
    fleet: Fleet,
    rotation: int,
    draws: Draws,
    residents: Residents,
) -> tuple[int, int, int, int, int]:
    """The policy's own choice, before exploration: (action, prefill, decode, cluster, regime).

    At least one decode engine must be up. Without a live prefill engine every policy goes local. Only the price may be
    given an elastic fleet.
    """
    prefill = NO_ENGINE
    decode = NO_ENGINE
    cluster = NO_ENGINE
    regime = NO_ENGINE
    action = REMOTE
    if policy == ROUND_ROBIN:
        prefill = nth_up(fleet.prefill_up, rotation)
        decode = nth_up(fleet.decode_up, rotation)
    elif policy == LEAST_LOADED or policy == ALWAYS_LOCAL:
        prefill = least(fleet.prefill_requests, fleet.prefill_up, rotation)
        decode = least(fleet.decode_requests, fleet.decode_up, rotation)
        action = LOCAL if policy == ALWAYS_LOCAL else REMOTE
    elif policy == LENGTH_THRESHOLD:
        prefill = least(fleet.prefill_requests, fleet.prefill_up, rotation)
        decode = length_split_decode(fleet, params, request.predicted_output_tokens, rotation)
    elif policy == POWER_OF_TWO:
        prefill = better_of_two(fleet.prefill_requests, fleet.prefill_up, draws.prefill, draws.action)
        decode = better_of_two(fleet.decode_requests, fleet.decode_up, draws.decode, draws.action)
    elif policy == DYNAMO_STYLE or policy == CLASS_AWARE:
        prefill = least(fleet.prefill_tokens, fleet.prefill_up, rotation)
        if policy == CLASS_AWARE:
            decode = class_aware_decode(fleet, params, request.slo_class, rotation)
        else:
            decode = least(fleet.decode_requests, fleet.decode_up, rotation)
        if dynamo_goes_local(params, request, fleet, prefill, decode):
            action = LOCAL
    elif policy == MARGINAL_COST:
        prefill = marginal_prefill(fleet, params, request, rotation)
        decode = marginal_decode(fleet, params, request, rotation)
    else:
        features = features_of(request, fleet)
        cluster = cluster_of(table, features)
        regime = regime_of(table, features)
        action = action_of(table, cluster, regime)
        if policy == PRICE:
            action, prefill, decode = best_candidate(params, request, fleet, residents, rotation, action)
            return action, prefill, decode, cluster, regime
        if action == REMOTE:
            prefill = place_prefill(fleet, params, request, rotation)
        if prefill == NO_ENGINE:
            action = LOCAL
        decode = place_decode(fleet, params, request, action, rotation)
    return action, prefill, decode, cluster, regime


def decide(
    policy: int,
    params: Sequence[float],
    table: Table,
    request: Request,
    fleet: Fleet,
    rotation: int,
    explore: float,
    draws: Draws,
    residents: Residents = NO_RESIDENTS,
) -> Decision:
    """Decide for one request.

    policy: one of the constants above, its params documented at its function. explore: share of requests that
    choose at random. residents: the price alone reads them. The propensity is the probability of the executed choice
    given the policy's own choice (for POWER_OF_TWO, given its draws). At least one decode engine must be up.
    """
    action, prefill, decode, cluster, regime = choose(policy, params, table, request, fleet, rotation, draws, residents)
    n_prefill = count_up(fleet.prefill_up)
    n_decode = count_first_up(fleet.decode_up, n_decode_engines(fleet))
    remote_possible = n_prefill > 0 and request.remote_allowed
    reason = REASON_POLICY
    if action == REMOTE and not remote_possible:
        action = LOCAL
        reason = REASON_UNSUPPORTED_REMOTE if n_prefill > 0 else REASON_NO_PREFILL_ENGINE
    if action == LOCAL:
        prefill = NO_ENGINE
    if draws.explore >= explore:
        propensity = propensity_of(action, True, remote_possible, n_prefill, n_decode, explore)
        return Decision(action, prefill, decode, cluster, regime, propensity, reason)
    greedy_action = action
    greedy_prefill = prefill
    greedy_decode = decode
    action = REMOTE if remote_possible and draws.action >= 0.5 else LOCAL
    prefill = nth_up(fleet.prefill_up, int(draws.prefill * n_prefill)) if action == REMOTE else NO_ENGINE
    decode = nth_up(fleet.decode_up, int(draws.decode * n_decode))
    is_greedy = action == greedy_action and prefill == greedy_prefill and decode == greedy_decode
    propensity = propensity_of(action, is_greedy, remote_possible, n_prefill, n_decode, explore)
    return Decision(action, prefill, decode, cluster, regime, propensity, REASON_EXPLORED)
