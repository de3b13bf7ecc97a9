"""A cluster of reference engines that replays given choices: what `learn.simulation.replay` must agree with."""

from dataclasses import dataclass, field

import numpy as np
from reference_engine import Leg, ReferenceEngine

from learn.simulation import Topology
from learn.trace import Trace
from serve_table.situation import REMOTE
from serve_table.step_time import handoff_time_s


@dataclass
class ReferenceCluster:
    """Prefill engines first. events: (time, order made, what, request)."""

    trace: Trace
    topology: Topology
    action: np.ndarray
    prefill: np.ndarray
    decode: np.ndarray
    engines: list[ReferenceEngine] = field(init=False)
    events: list[tuple[float, int, str, int]] = field(default_factory=list)
    n_made: int = 0

    def __post_init__(self) -> None:
        n_engines = self.topology.prefill_engines + self.topology.decode_engines
        entry_tokens = self.trace.hash_block_tokens
        self.engines = [ReferenceEngine(self.topology.profile, entry_tokens) for _ in range(n_engines)]
        self.first_legs: dict[int, Leg] = {}
        self.last_legs: dict[int, Leg] = {}

    def run(self) -> None:
        """Until nothing is left to happen. Of equal times engines come first, then events, then arrivals."""
        arrivals = list(range(len(self.trace)))
        while True:
            ends = [(engine.step_end_s, k) for k, engine in enumerate(self.engines) if engine.step_end_s is not None]
            engine_s = min(ends)[0] if ends else np.inf
            event_s = min(self.events)[0] if self.events else np.inf
            arrival_s = self.trace.arrival_s[arrivals[0]] if arrivals else np.inf
            if min(engine_s, event_s, arrival_s) == np.inf:
                return
            if engine_s <= min(event_s, arrival_s):
                self.end_step(min(ends)[1], engine_s)
            elif event_s <= arrival_s:
                self.happen(self.events.pop(self.events.index(min(self.events))))
            else:
                self.make_event(arrival_s + self.topology.overhead_s, "first leg", arrivals.pop(0))

    def make_event(self, time_s: float, what: str, request: int) -> None:
        self.events.append((time_s, self.n_made, what, request))
        self.n_made += 1

    def end_step(self, k: int, now_s: float) -> None:
        for leg in self.engines[k].end_step():
            if leg.kind == "prefill":
                self.make_event(now_s + self.topology.overhead_s, "second leg", leg.name)
        self.begin(k, now_s)

    def begin(self, k: int, now_s: float) -> None:
        engine = self.engines[k]
        engine.begin_step(now_s)
        for leg in engine.pulls:
            tokens = leg.prompt_tokens - leg.cached_tokens
            done_s = now_s + handoff_time_s(self.topology.profile.handoff.as_list(), tokens)
            self.make_event(done_s, "pulled", leg.name)

    def touch(self, k: int, now_s: float) -> None:
        if self.engines[k].step_end_s is None:
            self.begin(k, now_s)

    def leg(self, request: int, kind: str) -> Leg:
        trace = self.trace
        start, length = trace.chain_start[request], trace.chain_length[request]
        output = 1 if kind == "prefill" else int(trace.output_tokens[request])
        chain = [int(entry) for entry in trace.block_ids[start : start + length]]
        return Leg(request, int(trace.prompt_tokens[request]), output, kind, chain)

    def happen(self, event: tuple[float, int, str, int]) -> None:
        now_s, _, what, request = event
        remote = self.action[request] == REMOTE
        decode = self.topology.prefill_engines + int(self.decode[request])
        prefill = int(self.prefill[request])
        if what == "first leg" and remote:
            self.first_legs[request] = self.leg(request, "prefill")
            self.engines[prefill].submit(self.first_legs[request])
            self.touch(prefill, now_s)
            return
        if what == "pulled":
            self.engines[decode].loaded(self.last_legs[request])
            self.engines[prefill].release(self.first_legs[request])
            self.touch(prefill, now_s)
        else:
            self.last_legs[request] = self.leg(request, "pull" if remote else "local")
            self.engines[decode].submit(self.last_legs[request])
        self.touch(decode, now_s)
