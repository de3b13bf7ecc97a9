"""The engine model in real time: its clock is the wall's, stretched by the dilation.

The timeline is kept as planned: a step begins at the planned end of the last one, however late the wake-up was,
so lateness does not add up. Where an engine falls too far behind its plan, the plan begins anew from the present.
"""

import time
from abc import ABC, abstractmethod

import numpy as np

from learn.core import PREFILL_LEG, new_core
from learn.engine import abort, begin_step, loaded, release
from learn.kv_cache import reset_prefix_cache
from pipelines.emulated.prefix_ids import PrefixIds
from pipelines.emulated.stepping import complete_step, count_states, queue_sequence
from pipelines.emulated.tokens import Tokens
from pipelines.emulated.wake_timer import WakeTimer
from pipelines.pacing import BEHIND_LIMIT_S, Pacing
from serve_table.errors import RequestError
from serve_table.step_time import HardwareProfile, handoff_time_s

MAX_SEQUENCES = 8192
# Room for the prefix chains of what waits, beyond what the cache itself can hold.
SPARE_ENTRIES = 1 << 17
# A step whose end is this near is completed at once: timers are no finer.
EARLY_S = 0.0003
# Steps completed in one go while catching up, before the sockets have their turn.
STEPS_AT_ONCE = 8


class Sequence(ABC):
    """One sequence on the engine; its owner hears of it through the `on_` methods. kind: of learn.core."""

    def __init__(self, prompt: Tokens, salt: str, output_tokens: int, kind: int) -> None:
        self.prompt = prompt
        self.salt = salt
        self.output_tokens = output_tokens
        self.kind = kind
        self.slot: int | None = None
        self.chain_length = 0
        self.emitted = 0
        self.cached_tokens = 0

    @abstractmethod
    def on_token(self, last: bool) -> None:
        """Token number `emitted` is there. A finished prefill leg still holds its blocks."""

    @abstractmethod
    def on_pull(self, complete_s: float) -> None:
        """The KV transfer begins and takes until `complete_s` on the loop's wall clock; then call `loaded`."""


class EngineLoop:
    """One emulated engine without its HTTP. Must be made and used inside a running asyncio loop."""

    def __init__(
        self, profile: HardwareProfile, dilation: float, pacing: Pacing, max_sequences: int = MAX_SEQUENCES
    ) -> None:
        self.profile = profile
        self.dilation = dilation
        self.pacing = pacing
        self.generated_tokens = 0
        self._chain_room = profile.max_model_len_tokens // profile.block_tokens + 1
        self._core = new_core(
            profile,
            1,
            max_sequences,
            n_entries=profile.kv_tokens // profile.block_tokens + SPARE_ENTRIES,
            entry_tokens=profile.block_tokens,
            entry_ids=np.zeros(max_sequences * self._chain_room, np.int64),
            macro_steps=False,
        )
        self._prefix_ids = PrefixIds(self._core.entry_references[0], profile.block_tokens)
        self._handoff = profile.handoff.as_list()
        # Views of single fields: reading a record's attribute costs microseconds.
        self._busy = self._core.engines["busy"]
        self._step_start_s = self._core.engines["step_start_s"]
        self._step_end_s = self._core.engines["step_end_s"]
        self._pulls = self._core.engines["pulls"]
        self._finished = self._core.engines["finished"]
        self._cached_tokens = self._core.sequences["cached_tokens"]
        self._emitting = np.zeros(2 * profile.max_num_seqs + 2, np.int64)
        self._sequences: list[Sequence | None] = [None] * max_sequences
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._slots_after_step: list[int] = []
        self._epoch_s = time.monotonic()
        self._timer = WakeTimer(self._complete_due_steps)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; RequestError 503 where there are too many."""
        if not self._free_slots:
            raise RequestError(503, f"the emulated engine holds {MAX_SEQUENCES} requests and takes no more")
        slot = self._free_slots.pop()
        start = slot * self._chain_room
        chain = self._core.entry_ids[start : start + self._chain_room]
        sequence.slot = slot
        sequence.chain_length = self._prefix_ids.take(sequence.prompt, sequence.salt, chain)
        self._sequences[slot] = sequence
        prompt_tokens = len(sequence.prompt)
        queue_sequence(
            self._core, slot, prompt_tokens, sequence.output_tokens, sequence.kind, start, sequence.chain_length
        )
        self._touch()

    def abort(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it is and free what it holds; nothing where it is gone already."""
        if sequence.slot is None:
            return
        abort(self._core, 0, sequence.slot)
        self._forget(sequence)
        self._touch()

    def loaded(self, sequence: Sequence, at_s: float) -> None:
        """The KV transfer of a sequence is complete since `at_s`, wall; nothing where it was aborted meanwhile."""
        if sequence.slot is not None:
            loaded(self._core, 0, sequence.slot, at_s)
            self._touch(at_s)

    def release(self, sequence: Sequence) -> None:
        """Free the blocks that a finished prefill leg holds."""
        if sequence.slot is not None:
            release(self._core, 0, sequence.slot)
            self._forget(sequence)
            self._touch()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no sequence uses."""
        reset_prefix_cache(self._core, 0)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use; cached prefixes that may be evicted are free, as in vLLM."""
        engine = self._core.engines[0]
        return 1.0 - float(engine.free_blocks) / float(engine.kv_blocks)

    @property
    def preemptions(self) -> int:
        return int(self._core.engines["preemptions"][0])

    def running_and_waiting(self) -> tuple[int, int]:
        """Sequences in the batch, and those that wait for their turn or for their KV."""
        slots = np.array([sequence.slot for sequence in self._sequences if sequence is not None], np.int64)
        counts = np.zeros(2, np.int64)
        count_states(self._core, slots, counts)
        return int(counts[0]), int(counts[1])

    def block_labels(self, sequence: Sequence) -> list[int]:
        """Numbers that stand for the KV blocks of a sequence's prompt: its prefix ids, then labels of its own."""
        if sequence.slot is None:
            return []
        start = sequence.slot * self._chain_room
        labels: list[int] = self._core.entry_ids[start : start + sequence.chain_length].tolist()
        n_blocks = -(-len(sequence.prompt) // self.profile.block_tokens)
        first_own = len(self._core.entry_references[0]) + sequence.slot * self._chain_room
        return labels + list(range(first_own, first_own + n_blocks - len(labels)))

    def close(self) -> None:
        """Take no further step."""
        self._timer.close()

    def _forget(self, sequence: Sequence) -> None:
        slot = sequence.slot
        if slot is None:
            return
        start = slot * self._chain_room
        self._prefix_ids.give_back(self._core.entry_ids[start : start + sequence.chain_length])
        self._sequences[slot] = None
        sequence.slot = None
        if self._busy[0]:
            self._slots_after_step.append(slot)  # the step under way may still name it
        else:
            self._free_slots.append(slot)

    def _touch(self, at_s: float | None = None) -> None:
        """Something changed, at `at_s` wall or now: an idle engine begins a step; a busy one sees it at the next."""
        if self._busy[0]:
            return
        start_s = ((time.monotonic() if at_s is None else at_s) - self._epoch_s) / self.dilation
        self._begin(max(start_s, float(self._step_end_s[0])))
        self._wake_at_step_end()

    def _wake_at_step_end(self) -> None:
        if self._busy[0]:
            self._timer.wake_at(self._wall_s(float(self._step_end_s[0])))

    def _begin(self, start_s: float) -> None:
        """Begin a step at a time of the engine's clock."""
        begin_step(self._core, 0, start_s)
        for slot in self._core.pulls[0, : self._pulls[0]].tolist():
            self._start_pull(slot, start_s)

    def _start_pull(self, slot: int, start_s: float) -> None:
        sequence = self._sequences[slot]
        if sequence is None:
            return
        sequence.cached_tokens = int(self._cached_tokens[slot])
        tokens = len(sequence.prompt) - sequence.cached_tokens
        sequence.on_pull(self._wall_s(start_s + handoff_time_s(self._handoff, tokens)))

    def _wall_s(self, engine_s: float) -> float:
        return self._epoch_s + engine_s * self.dilation

    def _complete_due_steps(self) -> None:
        for _ in range(STEPS_AT_ONCE):
            due_s = self._wall_s(float(self._step_end_s[0]))
            if not self._busy[0] or due_s - time.monotonic() > EARLY_S:
                break
            self._complete_step(due_s)
        self._wake_at_step_end()

    def _complete_step(self, due_s: float) -> None:
        """Complete one step, begin the next, and only then write the tokens out. due_s: its planned end, wall."""
        end_s = float(self._step_end_s[0])
        step_s = (end_s - float(self._step_start_s[0])) * self.dilation
        n = complete_step(self._core, self._emitting)
        slots = self._emitting[:n].tolist()
        n_finished = int(self._finished[0])
        self._free_slots += self._slots_after_step
        self._slots_after_step.clear()
        behind_s = time.monotonic() - due_s
        if behind_s > BEHIND_LIMIT_S:
            self.pacing.re_anchor(behind_s)
            end_s += behind_s / self.dilation
        self._begin(end_s)
        for k, slot in enumerate(slots):
            self._emit(slot, k < n_finished)
        self.generated_tokens += n
        self.pacing.step(time.monotonic() - due_s, step_s)

    def _emit(self, slot: int, last: bool) -> None:
        sequence = self._sequences[slot]
        if sequence is None:
            return
        sequence.emitted += 1
        if sequence.emitted == 1:
            sequence.cached_tokens = int(self._cached_tokens[slot])
        if last and sequence.kind != PREFILL_LEG:
            self._forget(sequence)
        sequence.on_token(last)
