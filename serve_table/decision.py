"""The decision: local or remote prefill, which prefill engine, which decode engine.

Every function here is pure (no clock, network or own randomness) and written in the subset of Python that
numba compiles. The router calls them as they are, with lists; `learn` compiles the same functions for the
simulator, with arrays. Sequences are indexed by engine: prefill engines (n_prefill,), decode engines
(n_decode,). Ties between engines go to the first from `rotation` on, so equal engines take turns.
"""

from collections.abc import Sequence
from math import log
from typing import NamedTuple

LOCAL = 0
REMOTE = 1
ACTION_NAMES = ("local", "remote")

ROUND_ROBIN = 0
LEAST_LOADED = 1
LENGTH_THRESHOLD = 2
POWER_OF_TWO = 3
ALWAYS_LOCAL = 4
DYNAMO_STYLE = 5
MARGINAL_COST = 6
TABLE = 7

NO_ENGINE = -1
"""Inside decisions only: no engine of that pool; records and rows say None."""

REASON_POLICY = 0
REASON_EXPLORED = 1
REASON_NO_PREFILL_ENGINE = 2
REASON_UNSUPPORTED_REMOTE = 3
REASON_NAMES = ("policy", "explored", "no_prefill_engine", "unsupported_remote")

DYNAMO_ISL_BOUNDING = 0.0
DYNAMO_PREFILL_LOAD = 1.0
DYNAMO_ISL_OR_LOAD = 2.0


class Request(NamedTuple):
    """What is known of one request when it arrives.

    prefill_cached_tokens (n_prefill,) and decode_cached_tokens (n_decode,): tokens of its prompt that each
    engine is believed to hold. remote_allowed: False where a KV handle cannot express the request.
    """

    prompt_tokens: float
    predicted_output_tokens: float
    slo_class: int
    prefill_cached_tokens: Sequence[float]
    decode_cached_tokens: Sequence[float]
    remote_allowed: bool


class Fleet(NamedTuple):
    """Work in flight through this router, per engine; `up` is 1.0 where the engine may get work.

    prefill_tokens: uncached prompt tokens whose remote prefill has not returned. decode_tokens: prompt and
    predicted output tokens of the requests bound to a decode engine. decode_prefill_tokens: uncached prompt
    tokens being prefilled locally, until their first token.
    """

    prefill_requests: Sequence[float]
    prefill_tokens: Sequence[float]
    prefill_up: Sequence[float]
    decode_requests: Sequence[float]
    decode_tokens: Sequence[float]
    decode_prefill_tokens: Sequence[float]
    decode_up: Sequence[float]


class Table(NamedTuple):
    """The compiled table: quantised features to a cluster, cluster and regime to an action.

    grid_scale (4,): bins per unit of log(1 + tokens) of the four lengths in `Features`. grid_bins (4,):
    number of bins of each. clusters (2 * prod(grid_bins),): flat, SLO class first. actions (n_clusters *
    n_regimes,): flat. prefill_edges_tokens and decode_edges_requests: ascending regime borders.
    """

    grid_scale: Sequence[float]
    grid_bins: Sequence[int]
    clusters: Sequence[int]
    actions: Sequence[int]
    prefill_edges_tokens: Sequence[float]
    decode_edges_requests: Sequence[float]


class Features(NamedTuple):
    """The features as the decision sees them; tokens, and per-engine means for the two pressures."""

    prompt_tokens: float
    uncached_prefill_tokens: float
    uncached_decode_tokens: float
    predicted_output_tokens: float
    slo_class: int
    prefill_pressure_tokens: float
    decode_pressure_requests: float


class Draws(NamedTuple):
    """Uniform draws in [0, 1), made by the caller: whether to explore, then action and engines."""

    explore: float
    action: float
    prefill: float
    decode: float


class Decision(NamedTuple):
    """prefill is NO_ENGINE when local; cluster and regime are NO_ENGINE unless the policy is TABLE."""

    action: int
    prefill: int
    decode: int
    cluster: int
    regime: int
    propensity: float
    reason: int


def features_of(request: Request, fleet: Fleet) -> Features:
    """Cache-adjusted lengths on the best live engine of each pool, and the pools' mean pressure."""
    cached = 0.0
    pressure = 0.0
    n_up = 0
    for i in range(len(fleet.prefill_up)):
        if fleet.prefill_up[i] > 0.0:
            n_up += 1
            pressure += fleet.prefill_tokens[i]
            if request.prefill_cached_tokens[i] > cached:
                cached = request.prefill_cached_tokens[i]
    uncached_prefill = max(request.prompt_tokens - cached, 0.0)
    prefill_pressure = pressure / n_up if n_up > 0 else 0.0
    cached = 0.0
    pressure = 0.0
    n_up = 0
    for i in range(len(fleet.decode_up)):
        if fleet.decode_up[i] > 0.0:
            n_up += 1
            pressure += fleet.decode_requests[i]
            if request.decode_cached_tokens[i] > cached:
                cached = request.decode_cached_tokens[i]
    return Features(
        request.prompt_tokens,
        uncached_prefill,
        max(request.prompt_tokens - cached, 0.0),
        request.predicted_output_tokens,
        request.slo_class,
        prefill_pressure,
        pressure / n_up if n_up > 0 else 0.0,
    )


def length_bin(scale: float, n_bins: int, tokens: float) -> int:
    """Bin of a length on a grid uniform in log(1 + tokens); ends are open, a missing length is bin 0."""
    if not tokens > 0.0:
        return 0
    if tokens > 1e12:  # keeps infinity an integer
        tokens = 1e12
    index = int(log(1.0 + tokens) * scale)
    return index if index < n_bins else n_bins - 1


def cluster_of(table: Table, features: Features) -> int:
    """Cluster of a request by table look-up."""
    scale, bins, clusters, _, _, _ = table
    prompt, uncached_prefill, uncached_decode, output, slo_class, _, _ = features
    index = 1 if slo_class == 1 else 0
    n_bins = bins[0]
    index = index * n_bins + length_bin(scale[0], n_bins, prompt)
    n_bins = bins[1]
    index = index * n_bins + length_bin(scale[1], n_bins, uncached_prefill)
    n_bins = bins[2]
    index = index * n_bins + length_bin(scale[2], n_bins, uncached_decode)
    n_bins = bins[3]
    index = index * n_bins + length_bin(scale[3], n_bins, output)
    return int(clusters[index])


def regime_of(table: Table, features: Features) -> int:
    """Load regime by table look-up: prefill pressure major, decode pressure minor.

    A value equal to a border belongs to the regime above it.
    """
    _, _, _, _, prefill_edges, decode_edges = table
    _, _, _, _, _, prefill_pressure, decode_pressure = features
    prefill = 0
    for edge in prefill_edges:
        if prefill_pressure >= edge:
            prefill += 1
    decode = 0
    for edge in decode_edges:
        if decode_pressure >= edge:
            decode += 1
    return prefill * (len(decode_edges) + 1) + decode


def action_of(table: Table, cluster: int, regime: int) -> int:
    """The learned action of a cluster in a regime."""
    _, _, _, actions, prefill_edges, decode_edges = table
    return int(actions[cluster * (len(prefill_edges) + 1) * (len(decode_edges) + 1) + regime])


def count_up(up: Sequence[float]) -> int:
    n_up = 0
    for value in up:
        if value > 0.0:
            n_up += 1
    return n_up


def nth_up(up: Sequence[float], n: int) -> int:
    """Index of the live engine number n modulo the live ones; NO_ENGINE if none is."""
    n_up = count_up(up)
    if n_up == 0:
        return NO_ENGINE
    left = n % n_up
    for i in range(len(up)):
        if up[i] > 0.0:
            if left == 0:
                return i
            left -= 1
    return NO_ENGINE


def least(load: Sequence[float], up: Sequence[float], rotation: int) -> int:
    """The live engine of least load, ties in rotation; NO_ENGINE if none is live."""
    n = len(up)
    best = NO_ENGINE
    best_load = 0.0
    for k in range(n):
        i = (rotation + k) % n
        if up[i] > 0.0 and (best == NO_ENGINE or load[i] < best_load):
            best = i
            best_load = load[i]
    return best


def better_of_two(load: Sequence[float], up: Sequence[float], draw_a: float, draw_b: float) -> int:
    """The less loaded of two different live engines drawn at random (power of two choices)."""
    n_up = count_up(up)
    if n_up <= 1:
        return nth_up(up, 0)
    a = int(draw_a * n_up)
    b = (a + 1 + int(draw_b * (n_up - 1))) % n_up
    first = nth_up(up, a)
    second = nth_up(up, b)
    return second if load[second] < load[first] else first


def length_split_decode(fleet: Fleet, params: Sequence[float], predicted_tokens: float, rotation: int) -> int:
    """Least loaded decode engine of the requests' side of a split pool.

    params: [threshold in predicted output tokens, share of engines kept for longer answers]. Falls back to the
    whole pool where that side has no live engine.
    """
    n = len(fleet.decode_up)
    n_long = int(params[1] * n + 0.5)
    is_long = predicted_tokens >= params[0]
    best = NO_ENGINE
    best_load = 0.0
    for k in range(n):
        i = (rotation + k) % n
        if fleet.decode_up[i] > 0.0 and (i < n_long) == is_long:
            load = fleet.decode_requests[i]
            if best == NO_ENGINE or load < best_load:
                best = i
                best_load = load
    return best if best != NO_ENGINE else least(fleet.decode_requests, fleet.decode_up, rotation)


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


def marginal_prefill(fleet: Fleet, params: Sequence[float], request: Request, rotation: int) -> int:
    """Prefill engine of least marginal cost: committed backlog plus this request's uncached work, in seconds.

    params: as `marginal_decode`.
    """
    n = len(fleet.prefill_up)
    best = NO_ENGINE
    best_cost = 0.0
    for k in range(n):
        i = (rotation + k) % n
        if fleet.prefill_up[i] > 0.0:
            uncached = max(request.prompt_tokens - request.prefill_cached_tokens[i], 0.0)
            cost = params[0] * (fleet.prefill_tokens[i] + uncached)
            if best == NO_ENGINE or cost < best_cost:
                best = i
                best_cost = cost
    return best


def marginal_decode(fleet: Fleet, params: Sequence[float], request: Request, rotation: int) -> int:
    """Decode engine of least marginal cost (after arXiv 2609.16206): backlog + own work + KV pressure.

    params: [prefill seconds a token, decode seconds a token, KV tokens an engine, KV pressure weight in
    seconds, multiplier of tight requests on the pressure terms]. The backlog is the committed tokens of the
    engine; own work grows with the batch that the request joins.
    """
    n = len(fleet.decode_up)
    weight = params[4] if request.slo_class == 1 else 1.0
    own_tokens = request.prompt_tokens + request.predicted_output_tokens
    best = NO_ENGINE
    best_cost = 0.0
    for k in range(n):
        i = (rotation + k) % n
        if fleet.decode_up[i] > 0.0:
            backlog_s = params[1] * fleet.decode_tokens[i] + params[0] * fleet.decode_prefill_tokens[i]
            own_s = params[1] * request.predicted_output_tokens * (1.0 + fleet.decode_requests[i])
            occupancy = (fleet.decode_tokens[i] + own_tokens) / params[2]
            cost = own_s + weight * (backlog_s + params[3] * occupancy * occupancy)
            if best == NO_ENGINE or cost < best_cost:
                best = i
                best_cost = cost
    return best


def prefill_load(fleet: Fleet, params: Sequence[float], request: Request, i: int) -> float:
    """Weighted load of a prefill engine as the table's placement sees it.

    params (7,), all per 1,000 tokens but [0] and [3]: prefill engine [0] request, [1] pending token, [2] token of
    this prompt not cached there; decode engine [3] request, [4] committed token, [5] pending local prefill token,
    [6] token of this prompt not cached there (counts for local only). Tokens that every engine would have to
    compute are left out: they change no choice.
    """
    tokens = params[1] * fleet.prefill_tokens[i] - params[2] * request.prefill_cached_tokens[i]
    return params[0] * fleet.prefill_requests[i] + 0.001 * tokens


def decode_load(fleet: Fleet, params: Sequence[float], request: Request, action: int, i: int) -> float:
    """Weighted load of a decode engine; params as `prefill_load`."""
    tokens = params[4] * fleet.decode_tokens[i] + params[5] * fleet.decode_prefill_tokens[i]
    if action == LOCAL:
        tokens -= params[6] * request.decode_cached_tokens[i]
    return params[3] * fleet.decode_requests[i] + 0.001 * tokens


def place_prefill(fleet: Fleet, params: Sequence[float], request: Request, rotation: int) -> int:
    """Prefill engine of least `prefill_load`."""
    n = len(fleet.prefill_up)
    best = NO_ENGINE
    best_load = 0.0
    for k in range(n):
        i = (rotation + k) % n
        if fleet.prefill_up[i] > 0.0:
            load = prefill_load(fleet, params, request, i)
            if best == NO_ENGINE or load < best_load:
                best = i
                best_load = load
    return best


def place_decode(fleet: Fleet, params: Sequence[float], request: Request, action: int, rotation: int) -> int:
    """Decode engine of least `decode_load`."""
    n = len(fleet.decode_up)
    best = NO_ENGINE
    best_load = 0.0
    for k in range(n):
        i = (rotation + k) % n
        if fleet.decode_up[i] > 0.0:
            load = decode_load(fleet, params, request, action, i)
            if best == NO_ENGINE or load < best_load:
                best = i
                best_load = load
    return best


def propensity_of(
    action: int, is_greedy: bool, both_actions: bool, n_prefill: int, n_decode: int, explore: float
) -> float:
    """Probability of a choice when a share `explore` of requests draws an action, then engines, uniformly."""
    uniform = 1.0 / n_decode
    if both_actions:
        uniform *= 0.5
    if action == REMOTE:
        uniform /= n_prefill
    return explore * uniform + (1.0 - explore if is_greedy else 0.0)


def choose(
    policy: int, params: Sequence[float], table: Table, request: Request, fleet: Fleet, rotation: int, draws: Draws
) -> tuple[int, int, int, int, int]:
    """The policy's own choice, before exploration: (action, prefill, decode, cluster, regime).

    At least one decode engine must be up. Without a live prefill engine every policy goes local.
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
    elif policy == DYNAMO_STYLE:
        prefill = least(fleet.prefill_tokens, fleet.prefill_up, rotation)
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
) -> Decision:
    """Decide for one request.

    policy: one of the constants above, its params documented at its function. explore: share of requests that
    choose at random. The propensity is the probability of the executed choice given the policy's own choice
    (for POWER_OF_TWO, given its draws). At least one decode engine must be up.
    """
    action, prefill, decode, cluster, regime = choose(policy, params, table, request, fleet, rotation, draws)
    n_prefill = count_up(fleet.prefill_up)
    n_decode = count_up(fleet.decode_up)
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
