"""Queues of one engine: the FCFS waiting queues, and the decoding sequences by the step they finish in."""

from learn.compiled import jit
from learn.core import DECODING, NONE, Core


@jit
def blocks_for(tokens: int, block_tokens: int) -> int:
    return (tokens + block_tokens - 1) // block_tokens


@jit
def push_waiting(core: Core, e: int, s: int, front: bool) -> None:
    engine = core.engines[e]
    sequence = core.sequences[s]
    engine.waiting += 1
    if engine.waiting_head == NONE:
        sequence.next = NONE
        sequence.previous = NONE
        engine.waiting_head = s
        engine.waiting_tail = s
    elif front:
        sequence.previous = NONE
        sequence.next = engine.waiting_head
        core.sequences[engine.waiting_head].previous = s
        engine.waiting_head = s
    else:
        sequence.next = NONE
        sequence.previous = engine.waiting_tail
        core.sequences[engine.waiting_tail].next = s
        engine.waiting_tail = s


@jit
def remove_waiting(core: Core, e: int, s: int) -> None:
    engine = core.engines[e]
    sequence = core.sequences[s]
    engine.waiting -= 1
    if sequence.previous == NONE:
        engine.waiting_head = sequence.next
    else:
        core.sequences[sequence.previous].next = sequence.next
    if sequence.next == NONE:
        engine.waiting_tail = sequence.previous
    else:
        core.sequences[sequence.next].previous = sequence.previous


@jit
def push_loaded(core: Core, e: int, s: int) -> None:
    engine = core.engines[e]
    sequence = core.sequences[s]
    sequence.next = NONE
    sequence.previous = engine.loaded_tail
    if engine.loaded_tail == NONE:
        engine.loaded_head = s
    else:
        core.sequences[engine.loaded_tail].next = s
    engine.loaded_tail = s


@jit
def remove_loaded(core: Core, e: int, s: int) -> None:
    engine = core.engines[e]
    sequence = core.sequences[s]
    if sequence.previous == NONE:
        engine.loaded_head = sequence.next
    else:
        core.sequences[sequence.previous].next = sequence.next
    if sequence.next == NONE:
        engine.loaded_tail = sequence.previous
    else:
        core.sequences[sequence.next].previous = sequence.previous


@jit
def growth_slot(core: Core, e: int, s: int) -> int:
    """Steps, modulo a block, in which a decoding sequence needs a new block."""
    sequence = core.sequences[s]
    return int((sequence.join_step - sequence.computed) % core.engines[e].block_tokens)


@jit
def _finishes_before(core: Core, e: int, i: int, j: int) -> bool:
    """Whether heap index i is due before j; in the same step the one admitted first, as it is freed first."""
    if core.heap_step[e, i] != core.heap_step[e, j]:
        return bool(core.heap_step[e, i] < core.heap_step[e, j])
    sequences = core.sequences
    return bool(sequences[core.heap_sequence[e, i]].order < sequences[core.heap_sequence[e, j]].order)


@jit
def _swap(core: Core, e: int, i: int, j: int) -> None:
    step = core.heap_step[e, i]
    s = core.heap_sequence[e, i]
    core.heap_step[e, i] = core.heap_step[e, j]
    core.heap_sequence[e, i] = core.heap_sequence[e, j]
    core.heap_step[e, j] = step
    core.heap_sequence[e, j] = s


@jit
def _sift_up(core: Core, e: int, i: int) -> None:
    while i > 0:
        parent = (i - 1) // 2
        if not _finishes_before(core, e, i, parent):
            return
        _swap(core, e, i, parent)
        i = parent


@jit
def _sift_down(core: Core, e: int, i: int, size: int) -> None:
    while True:
        child = 2 * i + 1
        if child >= size:
            return
        if child + 1 < size and _finishes_before(core, e, child + 1, child):
            child += 1
        if not _finishes_before(core, e, child, i):
            return
        _swap(core, e, i, child)
        i = child


@jit
def join_decode(core: Core, e: int, s: int) -> None:
    """Let a sequence decode from the engine's current step on."""
    engine = core.engines[e]
    sequence = core.sequences[s]
    sequence.state = DECODING
    sequence.join_step = engine.step
    size = engine.decoding
    core.heap_step[e, size] = engine.step + sequence.output_tokens - sequence.generated
    core.heap_sequence[e, size] = s
    engine.decoding = size + 1
    engine.context_tokens += sequence.computed
    core.growth[e, growth_slot(core, e, s)] += 1
    _sift_up(core, e, size)


@jit
def leave_decode(core: Core, e: int, index: int) -> int:
    """Take the sequence at a heap index out of the batch, its counts brought up to date; returns it."""
    engine = core.engines[e]
    s = core.heap_sequence[e, index]
    sequence = core.sequences[s]
    core.growth[e, growth_slot(core, e, s)] -= 1
    steps = engine.step - sequence.join_step
    sequence.computed += steps
    sequence.generated += steps
    sequence.blocks = blocks_for(sequence.computed, engine.block_tokens)
    engine.context_tokens -= sequence.computed
    last = engine.decoding - 1
    engine.decoding = last
    if index != last:
        _swap(core, e, index, last)
        _sift_down(core, e, index, last)
        _sift_up(core, e, index)
    return int(s)


@jit
def heap_index(core: Core, e: int, s: int) -> int:
    for k in range(core.engines[e].decoding):
        if core.heap_sequence[e, k] == s:
            return k
    return NONE


@jit
def last_admitted(core: Core, e: int) -> int:
    """Heap index of the decoding sequence that was admitted last."""
    best = 0
    for k in range(1, core.engines[e].decoding):
        order = core.sequences[core.heap_sequence[e, k]].order
        if order > core.sequences[core.heap_sequence[e, best]].order:
            best = k
    return best
