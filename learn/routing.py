"""The router's part of a simulated run: decide for what arrives, reserve its work, hold what is to wait."""

from typing import Any

import numpy as np

from learn.compiled import compile_with_callees, jit
from learn.core import LOCAL, NONE, PREFILL_LEG, PULL, Core
from learn.decision_arrays import note_features
from learn.events import SUBMIT, push_event
from learn.kv_cache import cached_entries
from learn.planned_steps import settle_blocks
from learn.residents import bind, expected_tokens, renew_shares, residents_at
from learn.run_state import Floats, Held, Load, Outcome, Routing, State
from serve_table import decision, guard, situation
from serve_table.situation import Decision, Draws, Request

decide = compile_with_callees(decision.decide)
must_hold = compile_with_callees(guard.must_hold)
takes_more = compile_with_callees(guard.takes_more)
takes_more_at_s = compile_with_callees(guard.takes_more_at_s)
held_key = compile_with_callees(guard.held_key)

FORCED = -1
"""In place of a policy: the choices are given."""


@jit
def _cached_tokens(core: Core, load: Load, i: int, first_engine: int, cached: Floats, now_s: float) -> None:
    """Tokens of request i's prompt that each engine of a pool holds, into `cached`; after the last comes the first."""
    for k in range(len(cached)):
        e = first_engine + k
        if e >= len(core.engines):
            e -= len(core.engines)
        settle_blocks(core, e, now_s)
        entries = cached_entries(core, e, load.chain_start[i], load.chain_length[i], load.prompt_tokens[i])
        cached[k] = float(entries * core.engines[e].entry_tokens)


@jit
def _reserve(
    load: Load, fleet: Any, state: State, i: int, chosen: Decision, request: Request, policy: int, now_s: float
) -> None:
    """Count a request's work where it is bound, as the router does at the decision."""
    d = chosen.decode
    if policy == decision.PRICE:
        bind(state.bound, fleet, i, chosen, request.prompt_tokens - request.decode_cached_tokens[d], now_s)
    fleet.decode_requests[d] += 1.0
    fleet.decode_tokens[d] += load.prompt_tokens[i] + load.predicted_tokens[i]
    if chosen.action == situation.REMOTE:
        uncached = request.prompt_tokens - request.prefill_cached_tokens[chosen.prefill]
        state.prefill_uncached[i] = uncached
        fleet.prefill_requests[chosen.prefill] += 1.0
        fleet.prefill_tokens[chosen.prefill] += uncached
    else:
        state.decode_uncached[i] = request.prompt_tokens - request.decode_cached_tokens[d]
        fleet.decode_prefill_tokens[d] += state.decode_uncached[i]


@jit
def _make_sequence(core: Core, load: Load, i: int, s: int, kind: int) -> None:
    sequence = core.sequences[s]
    sequence.prompt_tokens = load.prompt_tokens[i]
    sequence.output_tokens = 1 if kind == PREFILL_LEG else load.output_tokens[i]
    sequence.kind = kind
    sequence.chain_start = load.chain_start[i]
    sequence.chain_length = load.chain_length[i]


@jit
def _request(core: Core, load: Load, routing: Routing, i: int, now_s: float, ahead_tokens: float) -> Request:
    """What the router knows of request i now. ahead_tokens: of held requests that go before it."""
    if load.chain_length[i] > 0:
        _cached_tokens(core, load, i, 0, routing.prefill_cached, now_s)
        _cached_tokens(core, load, i, len(routing.prefill_cached), routing.decode_cached, now_s)
    else:
        routing.prefill_cached[:] = 0.0
        routing.decode_cached[:] = 0.0
    return Request(
        float(load.prompt_tokens[i]),
        load.predicted_tokens[i],
        load.slo_class[i],
        routing.prefill_cached,
        routing.decode_cached,
        True,
        now_s - load.arrival_s[i],
        ahead_tokens,
    )


@jit
def _decided(
    core: Core,
    load: Load,
    outcome: Outcome,
    fleet: Any,
    state: State,
    routing: Routing,
    i: int,
    request: Request,
    now_s: float,
) -> Decision:
    if routing.policy == FORCED:
        return Decision(outcome.action[i], outcome.prefill[i], outcome.decode[i], -1, -1, 1.0, 0)
    draws = Draws(load.draws[i, 0], load.draws[i, 1], load.draws[i, 2], load.draws[i, 3])
    if routing.policy == decision.PRICE:
        renew_shares(core, load, outcome, fleet, state.bound, routing.params, now_s)
    residents = residents_at(state.bound, now_s)
    return decide(routing.policy, routing.params, routing.table, request, fleet, i, routing.explore, draws, residents)


@jit
def _send(
    core: Core,
    load: Load,
    outcome: Outcome,
    fleet: Any,
    state: State,
    routing: Routing,
    i: int,
    request: Request,
    chosen: Decision,
    now_s: float,
) -> None:
    """Reserve a request's engines and send its first leg."""
    outcome.action[i] = chosen.action
    outcome.prefill[i] = chosen.prefill
    outcome.decode[i] = chosen.decode
    outcome.propensity[i] = chosen.propensity
    _reserve(load, fleet, state, i, chosen, request, routing.policy, now_s)
    first = 2 * i + 1
    if chosen.action == situation.REMOTE:
        first = 2 * i
        _make_sequence(core, load, i, 2 * i, PREFILL_LEG)
        _make_sequence(core, load, i, 2 * i + 1, PULL)
    else:
        _make_sequence(core, load, i, 2 * i + 1, LOCAL)
    sent_s = now_s
    if routing.policy == FORCED:
        sent_s += outcome.held_s[i]
    else:
        outcome.held_s[i] = now_s - load.arrival_s[i]
    push_event(state.events, sent_s + routing.overhead_s, SUBMIT, first)


@jit
def arrive(core: Core, load: Load, outcome: Outcome, fleet: Any, state: State, routing: Routing, i: int) -> None:
    """Decide for request i, which comes now, and send it or hold it."""
    now_s = load.arrival_s[i]
    held = state.held
    if routing.policy == decision.PRICE:
        prompt_tokens = float(load.prompt_tokens[i])
        load.predicted_tokens[i] = expected_tokens(state.bound, i, prompt_tokens, load.predicted_tokens[i])
    request = _request(core, load, routing, i, now_s, 0.0)
    if held.size[0] > 0:
        ahead = _tokens_ahead(load, state, routing, request, now_s)
        request = _request(core, load, routing, i, now_s, ahead)
    chosen = _decided(core, load, outcome, fleet, state, routing, i, request, now_s)
    if len(outcome.features) > 0:
        note_features(outcome.features, i, request, fleet)
    if routing.policy == decision.PRICE and chosen.action == situation.REMOTE:
        residents = residents_at(state.bound, now_s)
        if held.size[0] > 0 or must_hold(routing.params, fleet, residents, chosen.prefill):
            held.queue[held.size[0]] = i
            held.size[0] += 1
            held.uncached_tokens[i] = _uncached_tokens(request)
            pump(core, load, outcome, fleet, state, routing, now_s)
            return
    _send(core, load, outcome, fleet, state, routing, i, request, chosen, now_s)


@jit
def _uncached_tokens(request: Request) -> float:
    """Of its prompt, on the prefill engine that holds most of it."""
    cached = 0.0
    for tokens in request.prefill_cached_tokens:
        cached = max(cached, tokens)
    return request.prompt_tokens - cached


@jit
def _waiting(load: Load, request: Request, i: int, now_s: float) -> Request:
    """Of a held request what its place in the queue follows from, with the caches of another."""
    return Request(
        float(load.prompt_tokens[i]),
        load.predicted_tokens[i],
        load.slo_class[i],
        request.prefill_cached_tokens,
        request.decode_cached_tokens,
        True,
        now_s - load.arrival_s[i],
        0.0,
    )


@jit
def _tokens_ahead(load: Load, state: State, routing: Routing, request: Request, now_s: float) -> float:
    """Uncached prompt tokens of the held requests that go before one that comes now."""
    held = state.held
    before = 0.0
    for k in range(held.size[0]):
        before += held.uncached_tokens[held.queue[k]]
    tier, order = held_key(routing.params, request, before)
    tokens = 0.0
    before = 0.0
    for k in range(held.size[0]):
        i = held.queue[k]
        other_tier, other_order = held_key(routing.params, _waiting(load, request, i, now_s), before)
        if other_tier < tier or (other_tier == tier and other_order <= order):
            tokens += held.uncached_tokens[i]
        before += held.uncached_tokens[i]
    return tokens


@jit
def _next_held(load: Load, state: State, routing: Routing, now_s: float) -> int:
    """Place in the queue of the request that goes next, of those that were not tried yet; NONE where all were."""
    held = state.held
    best = NONE
    best_tier, best_order = 0, 0.0
    before = 0.0
    request = Request(0.0, 0.0, 0, routing.prefill_cached, routing.decode_cached, True, 0.0, 0.0)
    for k in range(held.size[0]):
        i = held.queue[k]
        if held.tried[i] == 0:
            tier, order = held_key(routing.params, _waiting(load, request, i, now_s), before)
            if best == NONE or tier < best_tier or (tier == best_tier and order < best_order):
                best, best_tier, best_order = k, tier, order
        before += held.uncached_tokens[i]
    return best


@jit
def _take(held: Held, k: int) -> None:
    """Take the request at place k out of the queue."""
    for place in range(k, held.size[0] - 1):
        held.queue[place] = held.queue[place + 1]
    held.size[0] -= 1


@jit
def pump(core: Core, load: Load, outcome: Outcome, fleet: Any, state: State, routing: Routing, now_s: float) -> None:
    """Send held requests while prefill engines take more, the most urgent first, each decided again."""
    held = state.held
    for k in range(held.size[0]):
        held.tried[held.queue[k]] = 0
    n_tried = 0
    ahead_tokens = 0.0
    while n_tried < guard.MAX_TRIED:
        residents = residents_at(state.bound, now_s)
        k = NONE
        if takes_more(routing.params, fleet, residents):
            k = _next_held(load, state, routing, now_s)
        if k == NONE:
            break
        i = held.queue[k]
        request = _request(core, load, routing, i, now_s, ahead_tokens)
        chosen = _decided(core, load, outcome, fleet, state, routing, i, request, now_s)
        if must_hold(routing.params, fleet, residents, chosen.prefill):
            held.uncached_tokens[i] = _uncached_tokens(request)
            ahead_tokens += held.uncached_tokens[i]
            held.tried[i] = 1
            n_tried += 1
        else:
            _take(held, k)
            _send(core, load, outcome, fleet, state, routing, i, request, chosen, now_s)
    held.timer_s[0] = np.inf
    if held.size[0] > 0:
        held.timer_s[0] = takes_more_at_s(routing.params, fleet, residents_at(state.bound, now_s))
