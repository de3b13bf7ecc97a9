"""Compile the engine model before engines start, so that six processes do not compile the same thing at once."""

import threading
from collections.abc import Callable

import numpy as np

from learn.core import LOCAL, PREFILL_LEG, PULL, new_core
from learn.engine import abort, begin_step, loaded, release
from learn.kv_cache import reset_prefix_cache
from pipelines.emulated.stepping import complete_step, count_states, queue_sequence
from serve_table.step_time import A40_3B

SILENT_S = 1.5


def compile_engine_model(say: Callable[[str], None]) -> None:
    """Run every compiled function once; where that takes long, nothing was cached yet, and it says so."""
    notice = threading.Timer(SILENT_S, say, ["compiling the engine model, once on this machine: about 15 s"])
    notice.daemon = True
    notice.start()
    try:
        _run_once()
    finally:
        notice.cancel()


def _run_once() -> None:
    core = new_core(A40_3B, 1, 4, n_entries=4, entry_ids=np.zeros(4, np.int64), macro_steps=False)
    emitting = np.zeros(8, np.int64)
    for slot, kind in enumerate((PREFILL_LEG, PULL, LOCAL)):
        queue_sequence(core, slot, 20, 1 if kind == PREFILL_LEG else 2, kind, 0, 1)
    begin_step(core, 0, 0.0)
    complete_step(core, emitting)
    loaded(core, 0, 1, 0.0)
    release(core, 0, 0)
    abort(core, 0, 2)
    count_states(core, np.arange(3), np.zeros(2, np.int64))
    reset_prefix_cache(core, 0)
