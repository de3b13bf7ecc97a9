"""The simulator: the engine model under an event queue, compiled; a router's view of the fleet beside it.

What happens: ends of engine steps, events (legs that reach their engine, KV transfers that complete) and arrivals
from the trace. Equal times are taken in that order, events in the order they were made, so a run is deterministic.
"""

from typing import Any

import numpy as np

from learn.compiled import compile_with_callees, jit
from learn.core import HELD, Core
from learn.engine import begin_step, end_step, loaded, release, submit
from learn.events import PULLED, SUBMIT, drop_first_event, push_event
from learn.planned_steps import interrupt
from learn.residents import leg_returned, observe_length, unbind, whole_prefilled
from learn.routing import arrive, pump
from learn.run_state import Floats, Ints, Load, Outcome, Routing, State
from serve_table import decision, situation, step_time

handoff_time_s = compile_with_callees(step_time.handoff_time_s)


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
def _end_leg(
    core: Core, outcome: Outcome, fleet: Any, state: State, e: int, s: int, policy: int, sent_s: float
) -> None:
    """A prefill leg is over; sent_s: when its second leg reaches the decode engine."""
    i = s // 2
    fleet.prefill_requests[e] -= 1.0
    fleet.prefill_tokens[e] -= state.prefill_uncached[i]
    if policy == decision.PRICE:
        leg_returned(state.bound, i, e, state.prefill_uncached[i], core.engines[e].step_end_s)
    outcome.cached_tokens[i] = core.sequences[s].cached_tokens
    push_event(state.events, sent_s, SUBMIT, s + 1)


@jit
def _answered(
    load: Load, outcome: Outcome, fleet: Any, state: State, i: int, d: int, now_s: float, policy: int
) -> None:
    """Request i is over."""
    outcome.finish_s[i] = now_s
    fleet.decode_requests[d] -= 1.0
    fleet.decode_tokens[d] -= load.prompt_tokens[i] + load.predicted_tokens[i]
    if policy == decision.PRICE:
        unbind(state.bound, i, d, fleet.decode_requests[d])
        prompt_tokens, tokens = float(load.prompt_tokens[i]), float(load.output_tokens[i])
        observe_length(state.bound.lengths, prompt_tokens, state.bound.predicted_tokens[i], tokens)


@jit
def _sort(values: Ints, n: int) -> None:
    """Put the first n, of which there are few, in order: in which an engine's step ends them must not matter."""
    for k in range(1, n):
        value = values[k]
        place = k
        while place > 0 and values[place - 1] > value:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value


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
            _end_leg(core, outcome, fleet, state, e, core.finished[e, k], policy, engine.step_end_s + overhead_s)
        return answered
    d = e - n_prefill
    for k in range(engine.first_tokens):
        i = core.first_tokens[e, k] // 2
        outcome.first_token_s[i] = engine.step_end_s
        if outcome.action[i] == situation.LOCAL:
            fleet.decode_prefill_tokens[d] -= state.decode_uncached[i]
            outcome.cached_tokens[i] = core.sequences[2 * i + 1].cached_tokens
    _sort(core.finished[e], engine.finished)
    for k in range(engine.finished):
        _answered(load, outcome, fleet, state, core.finished[e, k] // 2, d, engine.step_end_s, policy)
        answered += 1
    return answered


@jit
def _complete_both(
    core: Core, load: Load, outcome: Outcome, fleet: Any, state: State, e: int, policy: int, overhead_s: float
) -> int:
    """The same of a prefill engine that serves whole requests too; apart, since it would slow down all others."""
    engine = core.engines[e]
    d = len(fleet.decode_up) - fleet.whole_engines + e
    answered = 0
    for k in range(engine.first_tokens):
        s = core.first_tokens[e, k]
        if s % 2 == 1:
            i = s // 2
            outcome.first_token_s[i] = engine.step_end_s
            fleet.decode_prefill_tokens[d] -= state.decode_uncached[i]
            outcome.cached_tokens[i] = core.sequences[s].cached_tokens
            if policy == decision.PRICE:
                whole_prefilled(state.bound, e, state.decode_uncached[i], engine.step_end_s)
    _sort(core.finished[e], engine.finished)
    for k in range(engine.finished):
        s = core.finished[e, k]
        if s % 2 == 0:
            _end_leg(core, outcome, fleet, state, e, s, policy, engine.step_end_s + overhead_s)
        else:
            _answered(load, outcome, fleet, state, s // 2, d, engine.step_end_s, policy)
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
    routing: Routing,
    handoff: Any,
) -> int:
    """Run the whole load; returns how many requests were answered.

    core: new engines, prefill engines first. handoff: (2,).
    """
    n = len(load.arrival_s)
    n_prefill = len(routing.prefill_cached)
    n_engines = len(core.engines)
    events = state.events
    held = state.held
    arrived = 0
    answered = 0
    while answered < n:
        e = _next_end(state.next_end_s)
        engine_s = state.next_end_s[e]
        event_s = events.time_s[0] if events.size[0] > 0 else np.inf
        arrival_s = load.arrival_s[arrived] if arrived < n else np.inf
        if held.timer_s[0] < min(engine_s, event_s, arrival_s):
            pump(core, load, outcome, fleet, state, routing, held.timer_s[0])
        elif engine_s <= event_s and engine_s <= arrival_s:
            if engine_s == np.inf:
                break
            end_step(core, e)
            policy, overhead_s = routing.policy, routing.overhead_s
            if e < fleet.whole_engines:
                answered += _complete_both(core, load, outcome, fleet, state, e, policy, overhead_s)
            else:
                answered += _complete(core, load, outcome, fleet, state, e, n_prefill, policy, overhead_s)
            _start(core, state, e, engine_s, handoff)
            if e < n_prefill and held.size[0] > 0:
                pump(core, load, outcome, fleet, state, routing, engine_s)
        elif event_s <= arrival_s:
            kind = events.kind[0]
            s = events.sequence[0]
            drop_first_event(events)
            i = s // 2
            e = outcome.prefill[i] if s % 2 == 0 else n_prefill + outcome.decode[i]
            if e >= n_engines:  # a whole request
                e -= n_engines
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
            arrive(core, load, outcome, fleet, state, routing, arrived)
            arrived += 1
    return answered
