"""The same runs compiled and interpreted: run as a script with NUMBA_DISABLE_JIT=1 it prints what `results` returns."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    here = Path(__file__).resolve()
    sys.path[:0] = [str(here.parent), str(here.parents[2])]

from engine_cases import SMALL, core_with, run_random_operations
from reference_engine import Leg
from trace_cases import SMALL_SLO, SMALL_TOPOLOGY, every_policy, random_trace

from learn.engine import begin_step, end_step, submit
from learn.kv_cache import reset_prefix_cache
from learn.simulation import replay, simulate

COLUMNS = ("ttft_s", "tpot_s", "action", "prefill", "decode", "cached_tokens", "propensity")


def results() -> dict[str, Any]:
    """Every policy's run with exploration, a replay, random operations on one engine, a cache reset."""
    found: dict[str, Any] = {}
    trace = random_trace(21, 40)
    topology = replace(SMALL_TOPOLOGY, profile=replace(SMALL, kv_tokens=176))
    for chosen in every_policy():
        run = simulate(trace, topology, chosen, SMALL_SLO, 10.0, seed=1, explore=0.2)
        found[chosen.name] = {name: getattr(run, name).tolist() for name in COLUMNS}
    given = replay(trace, topology, SMALL_SLO, 10.0, run.action, run.prefill, run.decode)
    found["replay"] = {name: getattr(given, name).tolist() for name in COLUMNS[:2]}
    tight = replace(SMALL, kv_tokens=80)
    found["preemptions"] = [run_random_operations(seed, tight, 8, True, n_legs=20) for seed in range(4)]
    core = core_with([Leg(0, 9, 3, "local", [0, 1])], SMALL)
    submit(core, 0, 0)
    while begin_step(core, 0, 0.0):
        end_step(core, 0)
    found["cached"] = core.entry_references[0].tolist()
    reset_prefix_cache(core, 0)
    found["reset"] = core.entry_references[0].tolist()
    return found


if __name__ == "__main__":
    print(json.dumps(results()))  # noqa: T201
