"""Which sequences a step takes: vLLM v1's scheduling rules, described in `learn.engine`."""

from learn.compiled import jit
from learn.core import LOCAL, NONE, PREFILLING, PULL, PULLING, WAITING, Core
from learn.kv_cache import allocate, cached_entries, claim, claimable_blocks, free_sequence, register
from learn.queues import (
    blocks_for,
    join_decode,
    last_admitted,
    leave_decode,
    push_waiting,
    remove_loaded,
    remove_waiting,
)


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
def grow_decodes(core: Core, e: int) -> bool:
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
def continue_prefill(core: Core, e: int, budget: int) -> int:
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
    register(core, e, s, sequence.computed + chunk)
    _add_chunk(core, e, s, chunk)
    if chunk == left:
        engine.prefilling = NONE
    return int(chunk)


@jit
def admit_loaded(core: Core, e: int, budget: int, step: int) -> int:
    """Let sequences that may join by a step join the batch; tokens scheduled.

    They hold the blocks of their whole prompt since the transfer began.
    """
    engine = core.engines[e]
    used = 0
    while engine.loaded_head != NONE and used < budget:
        if engine.decoding + engine.prefills >= engine.max_num_seqs:
            break
        s = engine.loaded_head
        if core.sequences[s].join_step > step:
            break
        remove_loaded(core, e, s)
        core.sequences[s].order = engine.next_order
        engine.next_order += 1
        join_decode(core, e, s)
        _add_chunk(core, e, s, 0)
        used += 1
    return used


@jit
def admit_waiting(core: Core, e: int, budget: int) -> int:
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
        blocks = blocks_for(need, engine.block_tokens) - hits * engine.entry_blocks
        if blocks + claimable_blocks(core, e, s, hits) > engine.free_blocks:
            break
        chunk = min(need - cached, budget - used)
        if sequence.kind != PULL:
            blocks = blocks_for(cached + chunk, engine.block_tokens) - hits * engine.entry_blocks
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
            register(core, e, s, cached + chunk)
            _add_chunk(core, e, s, chunk)
            used += chunk
            if cached + chunk < need:
                engine.prefilling = s
    return used
