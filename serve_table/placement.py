"""Placement: which engine of a pool, by each policy's measure of load.

In the subset of Python that numba compiles. Ties between engines go to the first from `rotation` on, so equal
engines take turns.
"""

from collections.abc import Sequence

from serve_table.situation import LOCAL, NO_ENGINE, Fleet, Request


def count_up(up: Sequence[float]) -> int:
    return count_first_up(up, len(up))


def count_first_up(up: Sequence[float], n: int) -> int:
    """How many of the first n engines are live."""
    n_up = 0
    for i in range(n):
        if up[i] > 0.0:
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


def class_aware_decode(fleet: Fleet, params: Sequence[float], slo_class: int, rotation: int) -> int:
    """Decode engine of fewest requests, where one that prefers the other SLO class counts as busier.

    params: the five of Dynamo's rule, then [5] share of engines that prefer tight requests, requests added to an
    engine of the other side [6] for a tight request, [7] for a loose one. Where a side is down, the other serves.
    """
    n = len(fleet.decode_up)
    n_tight = int(params[5] * n + 0.5)
    is_tight = slo_class == 1
    added = params[6] if is_tight else params[7]
    best = NO_ENGINE
    best_load = 0.0
    for k in range(n):
        i = (rotation + k) % n
        if fleet.decode_up[i] > 0.0:
            load = fleet.decode_requests[i] + (0.0 if (i < n_tight) == is_tight else added)
            if best == NO_ENGINE or load < best_load:
                best = i
                best_load = load
    return best


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
