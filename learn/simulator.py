"""The simulator: the engine model under an event queue, compiled; a router's view of the fleet beside it.

What happens: ends of engine steps, events (legs that reach their engine, KV transfers that complete) and arrivals
from the trace. Equal times are taken in that order, events in the order they were made, so a run is deterministic.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from learn.compiled import compile_with_callees, jit
from learn.core import HELD, LOCAL, PREFILL_LEG, PULL, Core
from learn.decision_arrays import note_features
from learn.engine import begin_step, end_step, loaded, release, submit
from learn.events import PULLED, SUBMIT, Events, drop_first_event, push_event
from learn.kv_cache import cached_entries
from learn.planned_steps import interrupt, settle_blocks
from learn.residents import Bound, bind, leg_returned, renew_shares, residents_at, unbind
from serve_table import decision, situation, step_time
from serve_table.lookup import Table
from serve_table.situation import Decision, Draws, Request

decide = compile_with_callees(decision.decide)
handoff_time_s = compile_with_callees(step_time.handoff_time_s)

FORCED = -1
"""In place of a policy: the choices are given."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Load(NamedTuple):
    """What arrives: columns of a trace (n_requests,), with predicted output tokens and draws (n_requests, 4)."""

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    predicted_tokens: Floats
    slo_class: Ints
    chain_start: Ints
    chain_length: Ints
    draws: Floats


class Outcome(NamedTuple):
    """What happened: columns (n_requests,). prefill is -1 where local; times NaN where unanswered.

    features (n_requests, 7): as the decision saw them, in the order of `Features`; no rows where not wanted.
    """

    action: Ints
    prefill: Ints
    decode: Ints
    first_token_s: Floats
    finish_s: Floats
    cached_tokens: Ints
    propensity: Floats
    features: Floats


class State(NamedTuple):
    """The run's own state. next_end_s (n_engines,): infinity where idle.

    prefill_uncached and decode_uncached (n_requests,): what the router reserved for a request. bound: of as many
    requests where the policy is the price, else empty.
    """

    events: Events
    next_end_s: Floats
    prefill_uncached: Floats
    decode_uncached: Floats
    bound: Bound


@jit
def _start(core: Core, state: State, e: int, now_s: float, handoff: Any) -> None:
    """Begin the engine's next step, if there is one, and the KV transfers that it schedules."""
    begun = begin_step(core, e, now_s)
    for k in range(core.engines[e].pulls):
        s = core.pulls[e, k]
        tokens = core.sequences[s].prompt_tokens - core.sequences[s].cached_tokens
        push_event(state.events, now_s + handoff_time_s(handoff, float(tokens)), PULLED, s)
    state.next_end_s[e] = core.engines[e].step_end_s if begun else np.inf


@jit
def _wake(core: Core, state: State, e: int, now_s: float, handoff: Any) -> None:
    """Something has changed for an engine: start it if idle; a busy one sees it where its planned steps end."""
    if core.engines[e].busy == 1:
        state.next_end_s[e] = core.engines[e].step_end_s
    else:
        _start(core, state, e, now_s, handoff)


@jit
def _cached_tokens(core: Core, load: Load, i: int, first_engine: int, cached: Floats) -> None:
    """Tokens of request i's prompt that each engine of a pool holds, into `cached`."""
    for k in range(len(cached)):
        e = first_engine + k
        settle_blocks(core, e, load.arrival_s[i])
        entries = cached_entries(core, e, load.chain_start[i], load.chain_length[i], load.prompt_tokens[i])
        cached[k] = float(entries * core.engines[e].entry_tokens)


@jit
def _reserve(load: Load, fleet: Any, state: State, i: int, chosen: Decision, request: Request, policy: int) -> None:
    """Count a request's work where it is bound, as the router does at the decision."""
    d = chosen.decode
    if policy == decision.PRICE:
        uncached_tokens = request.prompt_tokens - request.decode_cached_tokens[d]
        bind(state.bound, fleet, i, chosen, uncached_tokens, load.arrival_s[i])
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
def _arrive(
    core: Core,
    load: Load,
    outcome: Outcome,
    fleet: Any,
    state: State,
    i: int,
    n_prefill: int,
    policy: int,
    params: Any,
    table: Table,
    explore: float,
    cached: Any,
) -> int:
    """Decide for request i and reserve; returns the sequence of its first leg."""
    prefill_cached, decode_cached = cached
    if load.chain_length[i] > 0:
        _cached_tokens(core, load, i, 0, prefill_cached)
        _cached_tokens(core, load, i, n_prefill, decode_cached)
    else:
        prefill_cached[:] = 0.0
        decode_cached[:] = 0.0
    request = Request(
        float(load.prompt_tokens[i]),
        load.predicted_tokens[i],
        load.slo_class[i],
        prefill_cached,
        decode_cached,
        True,
        0.0,
        0.0,
    )
    if policy == FORCED:
        chosen = Decision(outcome.action[i], outcome.prefill[i], outcome.decode[i], -1, -1, 1.0, 0)
    else:
        draws = Draws(load.draws[i, 0], load.draws[i, 1], load.draws[i, 2], load.draws[i, 3])
        if policy == decision.PRICE:
            renew_shares(core, load, outcome, fleet, state.bound, params, load.arrival_s[i])
        residents = residents_at(state.bound, load.arrival_s[i])
        chosen = decide(policy, params, table, request, fleet, i, explore, draws, residents)
    if len(outcome.features) > 0:
        note_features(outcome.features, i, request, fleet)
    outcome.action[i] = chosen.action
    outcome.prefill[i] = chosen.prefill
    outcome.decode[i] = chosen.decode
    outcome.propensity[i] = chosen.propensity
    _reserve(load, fleet, state, i, chosen, request, policy)
    if chosen.action == situation.REMOTE:
        _make_sequence(core, load, i, 2 * i, PREFILL_LEG)
        _make_sequence(core, load, i, 2 * i + 1, PULL)
        return 2 * i
    _make_sequence(core, load, i, 2 * i + 1, LOCAL)
    return 2 * i + 1


@jit
def _complete(
    core: Core,
    load: Load,
    outcome: Outcome,
    fleet: Any,
    state: State,
    e: int,
    n_prefill: int,
    policy: int,
    overhead_s: float,
) -> int:
    """Take note of what the end of a step on engine e brought; returns how many requests were answered."""
    engine = core.engines[e]
    answered = 0
    if e < n_prefill:
        for k in range(engine.finished):
            s = core.finished[e, k]
            i = s // 2
            fleet.prefill_requests[e] -= 1.0
            fleet.prefill_tokens[e] -= state.prefill_uncached[i]
            if policy == decision.PRICE:
                leg_returned(state.bound, i, e, state.prefill_uncached[i], engine.step_end_s)
            outcome.cached_tokens[i] = core.sequences[s].cached_tokens
            push_event(state.events, engine.step_end_s + overhead_s, SUBMIT, s + 1)
        return answered
    d = e - n_prefill
    for k in range(engine.first_tokens):
        i = core.first_tokens[e, k] // 2
        outcome.first_token_s[i] = engine.step_end_s
        if outcome.action[i] == situation.LOCAL:
            fleet.decode_prefill_tokens[d] -= state.decode_uncached[i]
            outcome.cached_tokens[i] = core.sequences[2 * i + 1].cached_tokens
    for k in range(engine.finished):
        i = core.finished[e, k] // 2
        outcome.finish_s[i] = engine.step_end_s
        fleet.decode_requests[d] -= 1.0
        fleet.decode_tokens[d] -= load.prompt_tokens[i] + load.predicted_tokens[i]
        if policy == decision.PRICE:
            unbind(state.bound, i, d, fleet.decode_requests[d])
        answered += 1
    return answered


@jit
def _next_end(next_end_s: Floats) -> int:
    best = 0
    for e in range(1, len(next_end_s)):
        if next_end_s[e] < next_end_s[best]:
            best = e
    return best


@jit
def run(
    core: Core,
    load: Load,
    outcome: Outcome,
    fleet: Any,
    state: State,
    n_prefill: int,
    policy: int,
    params: Any,
    table: Table,
    explore: float,
    overhead_s: float,
    handoff: Any,
    cached: Any,
) -> int:
    """Run the whole load; returns how many requests were answered.

    core: new engines, prefill engines first. policy: a number of serve_table.decision, or FORCED with the choices
    in `outcome`. overhead_s: time that each leg spends outside its engine (router and HTTP). handoff: (2,).
    cached: scratch arrays (n_prefill,) and (n_decode,), since compiled functions do not allocate.
    """
    n = len(load.arrival_s)
    events = state.events
    arrived = 0
    answered = 0
    while answered < n:
        e = _next_end(state.next_end_s)
        engine_s = state.next_end_s[e]
        event_s = events.time_s[0] if events.size[0] > 0 else np.inf
        arrival_s = load.arrival_s[arrived] if arrived < n else np.inf
        if engine_s <= event_s and engine_s <= arrival_s:
            if engine_s == np.inf:
                break
            end_step(core, e)
            answered += _complete(core, load, outcome, fleet, state, e, n_prefill, policy, overhead_s)
            _start(core, state, e, engine_s, handoff)
        elif event_s <= arrival_s:
            kind = events.kind[0]
            s = events.sequence[0]
            drop_first_event(events)
            i = s // 2
            e = outcome.prefill[i] if s % 2 == 0 else n_prefill + outcome.decode[i]
            if kind == SUBMIT:
                submit(core, e, s)
                interrupt(core, e, event_s)
            else:
                loaded(core, e, s, event_s)
                p = outcome.prefill[i]
                if core.sequences[s - 1].state == HELD:
                    release(core, p, s - 1)
                interrupt(core, p, event_s)
                _wake(core, state, p, event_s, handoff)
            _wake(core, state, e, event_s, handoff)
        else:
            s = _arrive(core, load, outcome, fleet, state, arrived, n_prefill, policy, params, table, explore, cached)
            push_event(state.events, arrival_s + overhead_s, SUBMIT, s)
            arrived += 1
    return answered
