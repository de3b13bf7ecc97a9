"""The scheduling rules of a vLLM v1 engine, step by step: the one implementation.

The simulator and the emulated engines both drive these functions; only their clocks differ. The rules follow
vLLM v1's scheduler: running sequences first (decodes, then the one partial prefill), then the waiting queue
in order of arrival under the token budget; prefills are chunked, but admitted only where the whole prompt fits;
what a step computes can be shared from the moment it is scheduled; a sequence that finds no KV block for its next
token preempts the one admitted last, which starts over from its prefix-cache hit. A sequence whose KV comes from
a prefill engine gets its blocks when its turn in the queue comes, waits for the transfer outside the batch, and joins
the batch one step after the first that begins with the transfer complete; there its last prompt token is computed
again. An engine with nothing to compute lets it join at once.

    submit -> begin_step -> end_step -> begin_step ...        (the caller owns the clock)
    pulls after begin_step: start transfers, then `loaded` on this engine and `release` on the prefill engine
    finished after end_step: answered sequences; prefill legs among them hold their blocks until `release`
"""

from learn.compiled import compile_with_callees, jit
from learn.core import (
    DECODING,
    DONE,
    HELD,
    LOADED,
    NONE,
    PREFILL_LEG,
    PREFILLING,
    WAITING,
    Core,
)
from learn.kv_cache import free_sequence, register
from learn.planned_steps import cut_planned, end_of_steps_s, grow_planned, plan_steps, steps_begun
from learn.queues import (
    heap_index,
    join_decode,
    leave_decode,
    push_loaded,
    push_waiting,
    remove_loaded,
    remove_waiting,
)
from learn.scheduling import admit_loaded, admit_waiting, continue_prefill, grow_decodes
from serve_table import step_time

step_time_s = compile_with_callees(step_time.step_time_s)


@jit
def submit(core: Core, e: int, s: int) -> None:
    """Queue a sequence whose lengths, kind and chain are set."""
    core.sequences[s].state = WAITING
    push_waiting(core, e, s, False)


@jit
def loaded(core: Core, e: int, s: int, now_s: float) -> None:
    """The KV transfer of a pulling sequence is complete.

    vLLM's worker asks its connector as soon as it has launched a step's computation, and the answer reaches the
    scheduler with the output of that step. So a transfer that ends within a step is found by the next one, and its
    sequence joins the one after that. Planned steps go on until then.
    """
    engine = core.engines[e]
    sequence = core.sequences[s]
    begun = steps_begun(core, e, now_s) if engine.busy == 1 else 0
    sequence.state = LOADED
    # The last prompt token is computed here, to sample the first output token.
    sequence.computed = sequence.prompt_tokens - 1
    sequence.join_step = engine.step + begun + 1
    grow_planned(core, e, begun)
    register(core, e, s, sequence.prompt_tokens)
    push_loaded(core, e, s)
    if engine.busy == 1:
        cut_planned(core, e, begun + 1)


@jit
def release(core: Core, e: int, s: int) -> None:
    """Free the blocks that a finished prefill leg held for its decode engine."""
    free_sequence(core, e, s)
    core.sequences[s].state = DONE


@jit
def _step_s(core: Core, e: int) -> float:
    """Length of the step that has just been scheduled."""
    engine = core.engines[e]
    context = engine.context_tokens
    for k in range(engine.chunks):
        if core.chunk_tokens[e, k] > 0:
            context += core.sequences[core.chunk_sequence[e, k]].computed
    return step_time_s(engine.step_time, float(engine.step_tokens), float(context))


@jit
def begin_step(core: Core, e: int, now_s: float) -> bool:
    """Schedule the next step from `now_s`; False if there is nothing to do and the engine goes idle.

    Sequences that start pulling their KV are in `core.pulls[e]`, counted in the engine's `pulls`, also where the
    engine goes idle.
    """
    engine = core.engines[e]
    engine.chunks = 0
    engine.prefills = 0
    engine.pulls = 0
    preempted = grow_decodes(core, e)
    budget = engine.max_num_batched_tokens - engine.decoding
    if engine.prefilling != NONE:
        chunk = continue_prefill(core, e, budget)
        if chunk == NONE:
            preempted = True
        else:
            budget -= chunk
    # vLLM admits nothing in a step that preempted; an empty step takes no time, so the next one is this one.
    if not preempted or budget == engine.max_num_batched_tokens:
        budget -= admit_loaded(core, e, budget, engine.step)
        budget -= admit_waiting(core, e, budget)
    if budget == engine.max_num_batched_tokens:
        # A step that computes nothing takes no time: what it has heard of joins the next one, which is this one.
        budget -= admit_loaded(core, e, budget, engine.step + 1)
    engine.step_tokens = engine.max_num_batched_tokens - budget
    if engine.step_tokens == 0:
        engine.busy = 0
        return False
    engine.busy = 1
    engine.step_start_s = now_s
    engine.step_s = _step_s(core, e)
    engine.planned_steps = plan_steps(core, e)
    engine.grown_steps = 1
    engine.step_end_s = end_of_steps_s(core, e, engine.planned_steps)
    return True


@jit
def _finish(core: Core, e: int, s: int, now_s: float) -> None:
    engine = core.engines[e]
    sequence = core.sequences[s]
    sequence.finish_s = now_s
    if sequence.kind == PREFILL_LEG:
        sequence.state = HELD
    else:
        free_sequence(core, e, s)
        sequence.state = DONE
    core.finished[e, engine.finished] = s
    engine.finished += 1


@jit
def _first_token(core: Core, e: int, s: int, now_s: float) -> None:
    engine = core.engines[e]
    core.sequences[s].first_token_s = now_s
    core.first_tokens[e, engine.first_tokens] = s
    engine.first_tokens += 1


@jit
def end_step(core: Core, e: int) -> None:
    """Complete the planned steps at `step_end_s`.

    Answered sequences are in `core.finished[e]`, those that emitted their first token in `core.first_tokens[e]`.
    """
    engine = core.engines[e]
    now_s = engine.step_end_s
    engine.finished = 0
    engine.first_tokens = 0
    grow_planned(core, e, engine.planned_steps)
    engine.context_tokens += engine.planned_steps * engine.decoding
    engine.step += engine.planned_steps
    while engine.decoding > 0 and core.heap_step[e, 0] <= engine.step:
        s = leave_decode(core, e, 0)
        if core.sequences[s].output_tokens == 1:
            _first_token(core, e, s, now_s)
        _finish(core, e, s, now_s)
    for k in range(engine.chunks):
        _end_chunk(core, e, core.chunk_sequence[e, k], core.chunk_tokens[e, k], now_s)
    engine.busy = 0


@jit
def _end_chunk(core: Core, e: int, s: int, n_tokens: int, now_s: float) -> None:
    sequence = core.sequences[s]
    if n_tokens == 0:
        if sequence.state == DECODING:
            _first_token(core, e, s, now_s)
        return
    if sequence.state != PREFILLING:
        return
    sequence.computed += n_tokens
    if sequence.computed < sequence.prompt_tokens + sequence.generated:
        return
    sequence.generated += 1
    if sequence.generated == 1:
        _first_token(core, e, s, now_s)
    if sequence.generated >= sequence.output_tokens:
        _finish(core, e, s, now_s)
    else:
        join_decode(core, e, s)


@jit
def abort(core: Core, e: int, s: int) -> None:
    """Take a sequence out, wherever it is, and free what it holds.

    Its record must not be used again before the step under way has ended. Not for engines with `macro_steps`: a
    run of planned steps cannot be changed in its middle.
    """
    engine = core.engines[e]
    sequence = core.sequences[s]
    if sequence.state == WAITING:
        remove_waiting(core, e, s)
    elif sequence.state == LOADED:
        remove_loaded(core, e, s)
    elif sequence.state == PREFILLING and engine.prefilling == s:
        engine.prefilling = NONE
    elif sequence.state == DECODING:
        leave_decode(core, e, heap_index(core, e, s))
        if engine.busy == 1 and sequence.computed % engine.block_tokens == 0:
            sequence.blocks += 1  # already allocated for the step under way
    free_sequence(core, e, s)
    sequence.state = DONE
