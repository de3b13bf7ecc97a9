"""Compiled glue between the engine model and the real-time driver: one call an event."""

import numpy as np
import numpy.typing as npt

from learn.compiled import jit
from learn.core import HELD, LOADED, PULLING, WAITING, Core
from learn.engine import end_step, submit

Ints = npt.NDArray[np.int64]


@jit
def queue_sequence(
    core: Core, s: int, prompt_tokens: int, output_tokens: int, kind: int, chain_start: int, chain_length: int
) -> None:
    """Fill a record that may have been used before, and queue it."""
    sequence = core.sequences[s]
    sequence.prompt_tokens = prompt_tokens
    sequence.output_tokens = output_tokens
    sequence.computed = 0
    sequence.generated = 0
    sequence.kind = kind
    sequence.blocks = 0
    sequence.shared = 0
    sequence.chain_start = chain_start
    sequence.chain_length = chain_length
    sequence.cached_tokens = 0
    sequence.join_step = 0
    sequence.order = 0
    submit(core, 0, s)


@jit
def complete_step(core: Core, emitting: Ints) -> int:
    """End the step; the sequences that it gave a token, finished ones first, go into `emitting`; returns how many.

    After a step every decoding sequence has just got a token: it was in the batch, or has just joined it.
    """
    end_step(core, 0)
    engine = core.engines[0]
    n = 0
    for k in range(engine.finished):
        emitting[n] = core.finished[0, k]
        n += 1
    for k in range(engine.decoding):
        emitting[n] = core.heap_sequence[0, k]
        n += 1
    return n


@jit
def count_states(core: Core, slots: Ints, counts: Ints) -> None:
    """counts: (2,) running and waiting among the sequences of `slots`, as vLLM counts them.

    A sequence that waits for its KV is waiting; one whose blocks are held for another engine is neither.
    """
    counts[:] = 0
    for k in range(len(slots)):
        state = core.sequences[slots[k]].state
        if state == WAITING or state == PULLING or state == LOADED:
            counts[1] += 1
        elif state != HELD:
            counts[0] += 1
