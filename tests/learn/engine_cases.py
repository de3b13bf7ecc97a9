"""Random workloads on one engine, run on the engine model and on the reference in lockstep."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from reference_engine import Leg, ReferenceEngine

from learn.core import HELD, LOCAL, NONE, PREFILL_LEG, PULL, Core, new_core
from learn.engine import abort, begin_step, end_step, loaded, release, submit
from serve_table.step_time import A40_3B, HardwareProfile, StepTime

KINDS = {"prefill": PREFILL_LEG, "local": LOCAL, "pull": PULL}

# Odd constants, so that no two events of different origin fall on the same time.
SMALL = replace(
    A40_3B,
    name="small",
    step=StepTime(0.00917, 0.0000251, 11.3, 0.0000517, 0.00000191),
    kv_tokens=160,
    block_tokens=4,
    max_num_seqs=5,
    max_num_batched_tokens=24,
    max_model_len_tokens=160,
)


def core_with(legs: list[Leg], profile: HardwareProfile, entry_tokens: int = 0, macro_steps: bool = False) -> Core:
    """A core of one engine whose sequence numbers are the legs' names."""
    chains = [entry for leg in legs for entry in leg.chain]
    core = new_core(
        profile,
        1,
        max(leg.name for leg in legs) + 1,
        n_entries=max(chains, default=0) + 1,
        entry_tokens=entry_tokens,
        entry_ids=np.array(chains or [0], np.int64),
        macro_steps=macro_steps,
    )
    start = 0
    for leg in legs:
        sequence = core.sequences[leg.name]
        sequence.prompt_tokens = leg.prompt_tokens
        sequence.output_tokens = leg.output_tokens
        sequence.kind = KINDS[leg.kind]
        sequence.chain_start = start
        sequence.chain_length = len(leg.chain)
        start += len(leg.chain)
    return core


def free_queue(core: Core) -> list[int | None]:
    """The free blocks from the next one to be taken on: the cached entry of each, or None."""
    engine = core.engines[0]
    ring = core.ring_count.shape[1]
    slots = [(engine.ring_head + k) % ring for k in range(engine.ring_size)]
    runs = [(int(core.ring_stamp[0, i]), [None] * int(core.ring_count[0, i])) for i in slots]
    entry = int(engine.lru_head)
    while entry != NONE:
        runs.append((int(core.entry_stamp[0, entry]), [entry] * int(engine.entry_blocks)))
        entry = int(core.lru_next[0, entry])
    return [block for _, blocks in sorted(runs, key=lambda run: run[0]) for block in blocks]


def queued(core: Core, head: int) -> list[int]:
    names = []
    while head != NONE:
        names.append(int(head))
        head = core.sequences[head].next
    return names


def assert_same_state(core: Core, reference: ReferenceEngine) -> None:
    """Every count and every queue of the core agrees with the reference, and with each other."""
    engine = core.engines[0]
    pool = reference.pool
    assert free_queue(core) == [block.entry for block in pool.free]
    assert engine.free_blocks == len(pool.free)
    references = core.entry_references[0]
    assert references.min() >= NONE
    assert {int(entry): int(references[entry]) for entry in np.flatnonzero(references >= 0)} == pool.users
    assert queued(core, engine.waiting_head) == [leg.name for leg in reference.waiting]
    assert engine.waiting == len(reference.waiting)
    assert queued(core, engine.loaded_head) == [leg.name for leg in reference.ready + reference.transferred]
    decoding = [int(s) for s in core.heap_sequence[0, : engine.decoding]]
    assert sorted(decoding) == sorted(leg.name for leg in reference.running if leg.decodes)
    assert core.growth[0].sum() == engine.decoding
    if not reference.scheduled:
        assert engine.context_tokens == sum(leg.computed for leg in reference.running if leg.decodes)
    assert engine.preemptions == reference.preemptions


@dataclass
class Lockstep:
    """The same operations on both engines, compared after each."""

    core: Core
    reference: ReferenceEngine
    legs: list[Leg]
    now_s: float = 0.0

    def submit(self, leg: Leg) -> None:
        submit(self.core, 0, leg.name)
        self.reference.submit(leg)
        self._after_change()

    def loaded(self, leg: Leg) -> None:
        loaded(self.core, 0, leg.name, self.now_s)
        self.reference.loaded(leg)
        self._after_change()

    def release(self, leg: Leg) -> None:
        release(self.core, 0, leg.name)
        self.reference.release(leg)
        self._after_change()

    def abort(self, leg: Leg) -> None:
        abort(self.core, 0, leg.name)
        self.reference.abort(leg)
        self._after_change()

    def step(self) -> None:
        """Complete the step under way, if there is one, and begin the next."""
        core, reference = self.core, self.reference
        engine = core.engines[0]
        if engine.busy == 0:
            return
        self.now_s = float(engine.step_end_s)
        end_step(core, 0)
        answered = reference.end_step()
        finished = core.finished[0, : engine.finished]
        assert sorted(int(s) for s in finished) == sorted(leg.name for leg in answered)
        for leg in answered:
            sequence = core.sequences[leg.name]
            assert abs(sequence.first_token_s - leg.first_token_s) < 1e-9
            assert abs(sequence.finish_s - leg.finish_s) < 1e-9
            assert sequence.cached_tokens == leg.cached_tokens
            assert (sequence.state == HELD) == (leg.state == "held")
        assert_same_state(core, reference)
        self._begin()

    def _after_change(self) -> None:
        if self.core.engines[0].busy == 0:
            self._begin()
        assert_same_state(self.core, self.reference)

    def _begin(self) -> None:
        begun = begin_step(self.core, 0, self.now_s)
        assert begun == self.reference.begin_step(self.now_s)
        engine = self.core.engines[0]
        assert [int(s) for s in self.core.pulls[0, : engine.pulls]] == [leg.name for leg in self.reference.pulls]
        if begun:
            assert abs(engine.step_end_s - self.reference.step_end_s) < 1e-9
            assert engine.step_tokens == sum(self.reference.scheduled.values())
        assert_same_state(self.core, self.reference)


def random_legs(rng: np.random.Generator, n: int, profile: HardwareProfile, entry_tokens: int) -> list[Leg]:
    """Legs of all kinds that share prefixes in a tree of chains; some need the whole KV budget."""
    capacity = profile.kv_tokens // profile.block_tokens * profile.block_tokens
    legs = []
    for name in range(n):
        kind = str(rng.choice(["prefill", "local", "local", "pull"]))
        prompt = int(min(1 + rng.exponential(capacity / 5), capacity - 1))
        output = 1 if kind == "prefill" else int(min(1 + rng.exponential(12), capacity - prompt))
        if rng.random() < 0.1 and kind != "prefill":
            output = capacity - prompt
        family = int(rng.integers(3))
        length = int(rng.integers(0, prompt // entry_tokens + 1))
        # Families part after their second entry.
        branch = int(rng.integers(2))
        chain = [family * 400 + k + (200 * branch if k >= 2 else 0) for k in range(length)]
        legs.append(Leg(name, prompt, output, kind, chain))
    return legs


def run_random_operations(seed: int, profile: HardwareProfile, entry_tokens: int, aborts: bool, n_legs: int) -> int:
    """Everything in random order until all legs have ended; returns the preemptions seen."""
    rng = np.random.default_rng(seed)
    legs = random_legs(rng, n_legs, profile, entry_tokens)
    lockstep = Lockstep(core_with(legs, profile, entry_tokens), ReferenceEngine(profile, entry_tokens), legs)
    arrivals = list(legs)
    steps_left = 200 * n_legs
    while any(leg.state != "done" for leg in legs):
        steps_left -= 1
        assert steps_left > 0, "livelock"
        actions: list[Callable[[], None]] = [lockstep.step] * 3
        if arrivals:
            actions.append(lambda: lockstep.submit(arrivals.pop(0)))
        for leg in legs:
            if leg.state == "pulling":
                actions.append(lambda leg=leg: lockstep.loaded(leg))
            elif leg.state == "held":
                actions.append(lambda leg=leg: lockstep.release(leg))
        gone = [leg for leg in legs if leg.state not in ("new", "done")]
        if aborts and gone and rng.random() < 0.05:
            lockstep.abort(gone[int(rng.integers(len(gone)))])
        else:
            actions[int(rng.integers(len(actions)))]()
    engine = lockstep.core.engines[0]
    lockstep.step()  # one whose sequences were all aborted may be under way
    assert engine.free_blocks == engine.kv_blocks
    assert engine.decoding == engine.waiting == engine.busy == 0
    return int(engine.preemptions)
