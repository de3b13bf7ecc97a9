"""Simulated runs of the price, also with elastic roles, whose every decision a router's book of residents makes too.

Run as a script with NUMBA_DISABLE_JIT=1 it prints, as JSON, the share of decisions that agree and what was chosen.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    here = Path(__file__).resolve()
    sys.path[:0] = [str(here.parent), str(here.parents[2])]

from trace_cases import SMALL_SLO, SMALL_TOPOLOGY, random_trace

from learn import routing, simulator
from learn.price_space import price_policy
from learn.simulation import Topology, simulate
from serve_table.harm import RENEWED_AFTER_TOKENS
from serve_table.price_params import HANDOFF_S, N_CONSTANTS
from serve_table.residents import BoundRequest, ResidentBook
from serve_table.situation import NO_ENGINE, Decision, Fleet

PREDICTED_TOKENS = 12.0
N_PREFILL = SMALL_TOPOLOGY.prefill_engines
POLICY = price_policy({"short_stay": 0.3}, SMALL_TOPOLOGY, SMALL_SLO)


class RouterBeside:
    """Hears what a router would hear: decisions, prefill answers, tokens now and again, ends."""

    def __init__(self, topology: Topology) -> None:
        self.now_s = 0.0
        self.book = ResidentBook(
            POLICY.params, N_PREFILL, topology.decode_engines, lambda: self.now_s, topology.elastic
        )
        self.bound: dict[int, BoundRequest] = {}
        self.next_told: dict[int, int] = {}
        self.constants: list[float] = []
        self.lengths_agreed: list[bool] = []
        self.simulated: list[Decision] = []
        self.routed: list[Decision] = []
        self._decide = routing.decide

    def decide(self, number: int, params: Any, table: Any, request: Any, fleet: Any, i: int, *rest: Any) -> Decision:
        explore, draws, residents = rest
        self.now_s = residents.now_s
        self.constants = params[:N_CONSTANTS].tolist()
        chosen: Decision = self._decide(number, params, table, request, fleet, i, explore, draws, residents)
        listed_fleet = Fleet(*(column.tolist() for column in fleet[:-1]))._replace(whole_engines=fleet.whole_engines)
        listed = request._replace(
            prefill_cached_tokens=request.prefill_cached_tokens.tolist(),
            decode_cached_tokens=request.decode_cached_tokens.tolist(),
        )
        tokens = self.book.corrected_tokens(request.prompt_tokens, PREDICTED_TOKENS)
        self.lengths_agreed.append(tokens == request.predicted_output_tokens)
        self.routed.append(POLICY.decide(listed, listed_fleet, i, explore, draws, self.book.seen()))
        self.simulated.append(chosen)
        prefill = None if chosen.prefill == NO_ENGINE else int(chosen.prefill)
        self.bound[i] = self.book.bind(
            int(chosen.decode),
            prefill,
            request.slo_class,
            request.prompt_tokens,
            request.predicted_output_tokens,
            request.prompt_tokens - listed.decode_cached_tokens[chosen.decode],
            request.prompt_tokens - (0.0 if prefill is None else listed.prefill_cached_tokens[prefill]),
        )
        return chosen

    def complete(self, own: Any, core: Any, load: Any, outcome: Any, fleet: Any, state: Any, e: int, *rest: Any) -> int:
        answered: int = own(core, load, outcome, fleet, state, e, *rest)
        engine = core.engines[e]
        self.now_s = float(engine.step_end_s)
        finished = [int(s) for s in core.finished[e, : engine.finished]]
        for s in core.heap_sequence[e, : engine.decoding]:
            sequence = core.sequences[s]
            self.tell(int(s) // 2, int(sequence.generated + engine.step - sequence.join_step))
        for s in finished:
            if s % 2 == 0:
                self.bound[s // 2].prefill_returned()
            else:
                self.bound[s // 2].leave()
                tokens = float(load.output_tokens[s // 2])
                self.book.answered(float(load.prompt_tokens[s // 2]), PREDICTED_TOKENS, tokens)
        return answered

    def tell(self, i: int, tokens: int) -> None:
        if tokens >= self.next_told.get(i, 1):
            self.next_told[i] = tokens + RENEWED_AFTER_TOKENS
            self.bound[i].streamed(tokens)


def results() -> dict[str, Any]:
    """Agreement over runs, in some of them with work piling up."""
    agreed: list[bool] = []
    seen = set()
    apart = 0.0
    completing = {name: getattr(simulator, name) for name in ("_complete", "_complete_both")}
    elastic = replace(SMALL_TOPOLOGY, elastic=True)
    runs = ((2, 30.0, SMALL_TOPOLOGY), (3, 60.0, SMALL_TOPOLOGY), (2, 30.0, elastic), (3, 60.0, elastic))
    for seed, rate, topology in runs:
        router = RouterBeside(topology)
        vars(routing).update(decide=router.decide)
        vars(simulator).update({name: partial(router.complete, own) for name, own in completing.items()})
        simulate(random_trace(seed, 60, rate), topology, POLICY, SMALL_SLO, PREDICTED_TOKENS, macro_steps=False)
        vars(routing).update(decide=router._decide)
        vars(simulator).update(completing)
        agreed += [tuple(a) == tuple(b) for a, b in zip(router.simulated, router.routed, strict=True)]
        seen |= {(int(chosen.action), int(chosen.decode)) for chosen in router.simulated}
        agreed += router.lengths_agreed
        left = max(abs(value) for value in router.book.seen().shares)
        agreed.append(left == 0.0)
        # Where elastic, there are so few hand-offs that one more or less tells another time.
        told = HANDOFF_S if topology.elastic else N_CONSTANTS
        constants = zip(router.book.params[:told], router.constants[:told], strict=True)
        apart = max(apart, *(abs(ours / theirs - 1.0) for ours, theirs in constants if theirs > 0.0))
    return {
        "share": sum(agreed) / len(agreed),
        "choices": len(seen),
        "actions": len({action for action, _ in seen}),
        "apart": apart,
    }


if __name__ == "__main__":
    print(json.dumps(results()))  # noqa: T201
