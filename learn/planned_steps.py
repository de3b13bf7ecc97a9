"""Runs of equal decode steps: where nothing can be scheduled for a while, many steps are taken at once.

A run ends where a sequence finishes. It can be cut at any step boundary when something arrives, and the KV blocks
that it uses can be brought up to date in its middle, so a run gives the same results as its steps one by one.
"""

import math

from learn.compiled import jit
from learn.core import NONE, Core
from learn.kv_cache import allocate


@jit
def plan_steps(core: Core, e: int) -> int:
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
def end_of_steps_s(core: Core, e: int, n_steps: int) -> float:
    """Time at which the first n planned steps are done; each adds one context token a sequence."""
    engine = core.engines[e]
    growth_s = engine.step_time[4] * engine.decoding
    return float(engine.step_start_s + n_steps * engine.step_s + growth_s * (n_steps * (n_steps - 1)) * 0.5)


@jit
def steps_begun(core: Core, e: int, now_s: float) -> int:
    """How many of the planned steps have begun by `now_s`, one that begins at that very time included."""
    engine = core.engines[e]
    step_s = engine.step_s
    half_growth_s = 0.5 * engine.step_time[4] * engine.decoding
    elapsed_s = now_s - engine.step_start_s
    # Smallest n with n * step + half * n * (n - 1) > elapsed.
    linear = step_s - half_growth_s
    root = linear * linear + 4.0 * half_growth_s * elapsed_s
    n = 1
    if elapsed_s > 0.0:
        guess = 2.0 * elapsed_s / (linear + math.sqrt(root)) if root > 0.0 else elapsed_s / step_s
        n = max(int(min(guess, float(engine.planned_steps))), 1)
    while n > 1 and end_of_steps_s(core, e, n - 1) > now_s:
        n -= 1
    while n < engine.planned_steps and end_of_steps_s(core, e, n) <= now_s:
        n += 1
    return n


@jit
def interrupt(core: Core, e: int, now_s: float) -> None:
    """Cut a run of planned steps at the end of the step under way at `now_s`: something has arrived."""
    engine = core.engines[e]
    if engine.busy == 1 and engine.planned_steps > 1:
        cut_planned(core, e, steps_begun(core, e, now_s))


@jit
def cut_planned(core: Core, e: int, n_steps: int) -> None:
    """Let a run of planned steps end after its first n, if it is longer."""
    engine = core.engines[e]
    if n_steps < engine.planned_steps:
        engine.planned_steps = n_steps
        engine.step_end_s = end_of_steps_s(core, e, n_steps)


@jit
def grow_planned(core: Core, e: int, n_steps: int) -> None:
    """Allocate the blocks that the first n planned steps use, as far as that has not been done."""
    engine = core.engines[e]
    later = n_steps - engine.grown_steps
    if later <= 0:
        return
    blocks = engine.decoding * (later // engine.block_tokens)
    for k in range(later % engine.block_tokens):
        blocks += core.growth[e, (engine.step + engine.grown_steps + k) % engine.block_tokens]
    allocate(core, e, blocks)
    engine.grown_steps = n_steps


@jit
def settle_blocks(core: Core, e: int, now_s: float) -> None:
    """Bring the KV blocks up to `now_s` in the middle of a run of planned steps; then the cache can be read."""
    engine = core.engines[e]
    if engine.busy == 1 and engine.planned_steps > 1:
        grow_planned(core, e, steps_begun(core, e, now_s))
