"""The scheduling rules of a vLLM v1 engine, step by step: the one implementation.

The simulator and the emulated engines both drive these functions; only their clocks differ. The rules follow
vLLM v1's scheduler: running sequences first (decodes, then the one partial prefill), then the waiting queue
in order of arrival under the token budget; prefills are chunked; a sequence that finds no KV block for its next
token preempts the one admitted last, which starts over from its prefix-cache hit. A sequence whose KV comes from
a prefill engine gets its blocks when its turn in the queue comes, waits for the transfer outside the batch, and
joins the first step after it, which computes the last prompt token again.

    submit -> begin_step -> end_step -> begin_step ...        (the caller owns the clock)
    pulls after begin_step: start transfers, then `loaded` on this engine and `release` on the prefill engine
    finished after end_step: answered sequences; prefill legs among them hold their blocks until `release`
"""

import math

from learn.compiled import compile_with_callees, jit
from learn.core import (
    DECODING,
    DONE,
    HELD,
    LOADED,
    LOCAL,
    NONE,
    PREFILL_LEG,
    PREFILLING,
    PULL,
    PULLING,
    WAITING,
    Core,
)
from learn.kv_cache import allocate, cached_entries, claim, claimable_blocks, free_sequence, register
from learn.queues import (
    blocks_for,
    heap_index,
    join_decode,
    last_admitted,
    leave_decode,
    push_loaded,
    push_waiting,
    remove_loaded,
    remove_waiting,
)
from serve_table import step_time

step_time_s = compile_with_callees(step_time.step_time_s)


@jit
def submit(core: Core, e: int, s: int) -> None:
    """Queue a sequence whose lengths, kind and chain are set."""
    core.sequences[s].state = WAITING
    push_waiting(core, e, s, False)


@jit
def loaded(core: Core, e: int, s: int) -> None:
    """The KV transfer of a pulling sequence is complete: it joins at the next step."""
    sequence = core.sequences[s]
    sequence.state = LOADED
    # The last prompt token is computed here, to sample the first output token.
    sequence.computed = sequence.prompt_tokens - 1
    register(core, e, s)
    push_loaded(core, e, s)


@jit
def release(core: Core, e: int, s: int) -> None:
    """Free the blocks that a finished prefill leg held for its decode engine."""
    free_sequence(core, e, s)
    core.sequences[s].state = DONE


@jit
def _preempt(core: Core, e: int, s: int) -> None:
    """Back to the head of the queue; its KV is gone and will be computed here, wherever it came from."""
    engine = core.engines[e]
    sequence = core.sequences[s]
    free_sequence(core, e, s)
    sequence.computed = 0
    sequence.state = WAITING
    if sequence.kind == PULL:
        sequence.kind = LOCAL
    engine.preemptions += 1
    push_waiting(core, e, s, True)


@jit
def _grow_decodes(core: Core, e: int) -> bool:
    """Give every decoding sequence the block its next token needs; True if that took preemption."""
    engine = core.engines[e]
    preempted = False
    slot = engine.step % engine.block_tokens
    while core.growth[e, slot] > engine.free_blocks:
        preempted = True
        if engine.prefilling != NONE:
            s = engine.prefilling
            engine.prefilling = NONE
        else:
            s = leave_decode(core, e, last_admitted(core, e))
        _preempt(core, e, s)
    allocate(core, e, core.growth[e, slot])
    return preempted


@jit
def _add_chunk(core: Core, e: int, s: int, n_tokens: int) -> None:
    engine = core.engines[e]
    core.chunk_sequence[e, engine.chunks] = s
    core.chunk_tokens[e, engine.chunks] = n_tokens
    engine.chunks += 1
    if n_tokens > 0:
        engine.prefills += 1


@jit
def _continue_prefill(core: Core, e: int, budget: int) -> int:
    """Schedule the next chunk of the partial prefill; tokens scheduled, or NONE if it preempted itself."""
    engine = core.engines[e]
    s = engine.prefilling
    sequence = core.sequences[s]
    left = sequence.prompt_tokens + sequence.generated - sequence.computed
    chunk = min(left, budget)
    if chunk <= 0:
        return 0
    blocks = blocks_for(sequence.computed + chunk, engine.block_tokens) - sequence.blocks
    if blocks > engine.free_blocks:
        engine.prefilling = NONE
        _preempt(core, e, s)
        return NONE
    if blocks > 0:
        allocate(core, e, blocks)
        sequence.blocks += blocks
    _add_chunk(core, e, s, chunk)
    if chunk == left:
        engine.prefilling = NONE
    return int(chunk)


@jit
def _admit_loaded(core: Core, e: int, budget: int) -> int:
    """Let sequences whose transfer is complete join the batch; tokens scheduled."""
    engine = core.engines[e]
    used = 0
    while engine.loaded_head != NONE and used < budget:
        if engine.decoding + engine.prefills >= engine.max_num_seqs:
            break
        s = engine.loaded_head
        grows = core.sequences[s].computed % engine.block_tokens == 0
        if grows and engine.free_blocks < 1:
            break
        remove_loaded(core, e, s)
        core.sequences[s].order = engine.next_order
        engine.next_order += 1
        join_decode(core, e, s)
        if grows:
            allocate(core, e, 1)
            core.sequences[s].blocks += 1
        _add_chunk(core, e, s, 0)
        used += 1
    return used


@jit
def _admit_waiting(core: Core, e: int, budget: int) -> int:
    """Admit from the waiting queue in order until tokens, sequences or blocks run out; tokens scheduled."""
    engine = core.engines[e]
    used = 0
    while engine.waiting_head != NONE and used < budget and engine.prefilling == NONE:
        if engine.decoding + engine.prefills >= engine.max_num_seqs:
            break
        s = engine.waiting_head
        sequence = core.sequences[s]
        need = sequence.prompt_tokens + sequence.generated
        hits = cached_entries(core, e, sequence.chain_start, sequence.chain_length, need)
        cached = hits * engine.entry_tokens
        chunk = need - 1 - cached if sequence.kind == PULL else min(need - cached, budget - used)
        blocks = blocks_for(cached + chunk, engine.block_tokens) - hits * engine.entry_blocks
        if blocks + claimable_blocks(core, e, s, hits) > engine.free_blocks:
            break
        remove_waiting(core, e, s)
        claim(core, e, s, hits)
        allocate(core, e, blocks)
        sequence.blocks += blocks
        if sequence.generated == 0:
            sequence.cached_tokens = cached
        if sequence.kind == PULL:
            sequence.state = PULLING
            core.pulls[e, engine.pulls] = s
            engine.pulls += 1
        else:
            sequence.state = PREFILLING
            sequence.order = engine.next_order
            engine.next_order += 1
            _add_chunk(core, e, s, chunk)
            used += chunk
            if cached + chunk < need:
                engine.prefilling = s
    return used


@jit
def _plan_steps(core: Core, e: int) -> int:
    """How many equal decode steps can follow each other before any scheduling decision could differ."""
    engine = core.engines[e]
    if engine.macro_steps == 0 or engine.chunks > 0 or engine.decoding == 0:
        return 1
    if engine.waiting_head != NONE or engine.loaded_head != NONE or engine.prefilling != NONE:
        return 1
    steps = core.heap_step[e, 0] - engine.step
    if engine.decoding * (steps // engine.block_tokens + 1) > engine.free_blocks:
        return 1
    return int(steps)


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
def end_of_steps_s(core: Core, e: int, n_steps: int) -> float:
    """Time at which the first n planned steps are done; each adds one context token a sequence."""
    engine = core.engines[e]
    growth_s = engine.step_time[4] * engine.decoding
    return float(engine.step_start_s + n_steps * engine.step_s + growth_s * (n_steps * (n_steps - 1)) * 0.5)


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
    preempted = _grow_decodes(core, e)
    budget = engine.max_num_batched_tokens - engine.decoding
    if engine.prefilling != NONE:
        chunk = _continue_prefill(core, e, budget)
        if chunk == NONE:
            preempted = True
        else:
            budget -= chunk
    if not preempted:
        budget -= _admit_loaded(core, e, budget)
        budget -= _admit_waiting(core, e, budget)
    engine.step_tokens = engine.max_num_batched_tokens - budget
    if engine.step_tokens == 0:
        engine.busy = 0
        return False
    engine.busy = 1
    engine.step_start_s = now_s
    engine.step_s = _step_s(core, e)
    engine.planned_steps = _plan_steps(core, e)
    engine.step_end_s = end_of_steps_s(core, e, engine.planned_steps)
    return True


@jit
def interrupt(core: Core, e: int, now_s: float) -> None:
    """Cut a run of planned steps at the first step boundary from `now_s` on: something has arrived."""
    engine = core.engines[e]
    if engine.busy == 0 or engine.planned_steps <= 1:
        return
    step_s = engine.step_s
    half_growth_s = 0.5 * engine.step_time[4] * engine.decoding
    elapsed_s = now_s - engine.step_start_s
    # Smallest n with n * step + half * n * (n - 1) >= elapsed.
    linear = step_s - half_growth_s
    root = linear * linear + 4.0 * half_growth_s * elapsed_s
    n = 1
    if elapsed_s > 0.0:
        guess = 2.0 * elapsed_s / (linear + math.sqrt(root)) if root > 0.0 else elapsed_s / step_s
        n = max(int(guess), 1)
    while n > 1 and end_of_steps_s(core, e, n - 1) >= now_s:
        n -= 1
    while n < engine.planned_steps and end_of_steps_s(core, e, n) < now_s:
        n += 1
    if n < engine.planned_steps:
        engine.planned_steps = n
        engine.step_end_s = end_of_steps_s(core, e, n)


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
def _grow_planned(core: Core, e: int) -> None:
    """Blocks that the planned steps after the first have used."""
    engine = core.engines[e]
    later = engine.planned_steps - 1
    if later <= 0:
        return
    blocks = engine.decoding * (later // engine.block_tokens)
    for k in range(later % engine.block_tokens):
        blocks += core.growth[e, (engine.step + 1 + k) % engine.block_tokens]
    allocate(core, e, blocks)


@jit
def end_step(core: Core, e: int) -> None:
    """Complete the planned steps at `step_end_s`.

    Answered sequences are in `core.finished[e]`, those that emitted their first token in `core.first_tokens[e]`.
    """
    engine = core.engines[e]
    now_s = engine.step_end_s
    engine.finished = 0
    engine.first_tokens = 0
    _grow_planned(core, e)
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
    register(core, e, s)
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

    Its record must not be used again before the step under way has ended.
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
