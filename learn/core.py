"""Memory layout of the engine model: engines, sequences and their queues as arrays that numba can work on.

One `Core` holds any number of engines. A sequence is one leg of a request on one engine: a remote request has
two, its prefill leg and its decode leg.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from serve_table.errors import ConfigError
from serve_table.step_time import HardwareProfile

NONE = -1
"""No sequence, entry or engine, inside the compiled arrays."""

# Kinds of sequence.
PREFILL_LEG = 0
LOCAL = 1
PULL = 2

# States of a sequence.
NEW = 0
WAITING = 1
PULLING = 2
LOADED = 3
PREFILLING = 4
DECODING = 5
HELD = 6
DONE = 7

SEQUENCE = np.dtype(
    [
        ("prompt_tokens", np.int64),
        ("output_tokens", np.int64),
        ("computed", np.int64),  # tokens with KV; while decoding, as of join_step
        ("generated", np.int64),  # tokens emitted; while decoding, as of join_step
        ("kind", np.int64),
        ("state", np.int64),
        ("next", np.int64),
        ("previous", np.int64),
        ("blocks", np.int64),  # KV blocks held, shared ones included
        ("shared", np.int64),  # entries of its chain that it holds a reference to
        ("chain_start", np.int64),
        ("chain_length", np.int64),
        ("cached_tokens", np.int64),  # prefix-cache hit at first admission
        ("join_step", np.int64),  # while loaded: the first step that it may join
        ("order", np.int64),  # of admission: the last one is preempted first
        ("first_token_s", np.float64),
        ("finish_s", np.float64),
    ]
)

ENGINE = np.dtype(
    [
        ("busy", np.int64),
        ("step", np.int64),  # steps completed
        ("planned_steps", np.int64),
        ("grown_steps", np.int64),  # of the planned steps, those whose KV blocks are allocated
        ("step_start_s", np.float64),
        ("step_s", np.float64),  # length of the first planned step
        ("step_end_s", np.float64),
        ("decoding", np.int64),
        ("context_tokens", np.int64),  # KV tokens of the decoding sequences
        ("prefilling", np.int64),  # the sequence with a partial prefill, or NONE
        ("waiting_head", np.int64),
        ("waiting_tail", np.int64),
        ("loaded_head", np.int64),
        ("loaded_tail", np.int64),
        ("waiting", np.int64),
        ("next_order", np.int64),
        ("free_blocks", np.int64),
        ("ring_head", np.int64),
        ("ring_size", np.int64),
        ("lru_head", np.int64),
        ("lru_tail", np.int64),
        ("next_stamp", np.int64),
        ("chunks", np.int64),
        ("prefills", np.int64),  # chunks of the current step that compute prompt tokens
        ("finished", np.int64),
        ("first_tokens", np.int64),
        ("pulls", np.int64),
        ("preemptions", np.int64),
        ("step_tokens", np.int64),  # scheduled in the current step
        ("max_num_seqs", np.int64),
        ("max_num_batched_tokens", np.int64),
        ("block_tokens", np.int64),
        ("kv_blocks", np.int64),
        ("entry_tokens", np.int64),  # tokens of one prefix-cache entry
        ("entry_blocks", np.int64),
        ("macro_steps", np.int64),  # 1: runs of equal decode steps are taken at once
        ("step_time", np.float64, (5,)),
    ]
)


class Core(NamedTuple):
    """All state of the engines. First axis of every 2-D array: engine.

    heap_step and heap_sequence (n_engines, max_num_seqs): decoding sequences as a heap by the step in which
    they finish. growth (n_engines, block_tokens): decoding sequences by the step, modulo a block, in which they
    need a new block. ring_count and ring_stamp (n_engines, ring): free blocks without a cached prefix, as runs in
    the order they were freed. entry_references, entry_stamp, lru_next, lru_previous (n_engines, n_entries): prefix
    cache; references NONE: not cached, 0: cached and evictable. chunk_sequence and chunk_tokens: prefill chunks of the
    current step; 0 tokens: a pulled sequence that has just joined. finished, first_tokens, pulls: what the last
    step end, or start, brought; their counts are in the engine's record. entry_ids: the chains of all sequences.
    """

    engines: Any
    sequences: Any
    heap_step: npt.NDArray[np.int64]
    heap_sequence: npt.NDArray[np.int64]
    growth: npt.NDArray[np.int64]
    ring_count: npt.NDArray[np.int64]
    ring_stamp: npt.NDArray[np.int64]
    entry_references: npt.NDArray[np.int64]
    entry_stamp: npt.NDArray[np.int64]
    lru_next: npt.NDArray[np.int64]
    lru_previous: npt.NDArray[np.int64]
    chunk_sequence: npt.NDArray[np.int64]
    chunk_tokens: npt.NDArray[np.int64]
    finished: npt.NDArray[np.int64]
    first_tokens: npt.NDArray[np.int64]
    pulls: npt.NDArray[np.int64]
    entry_ids: npt.NDArray[np.int64]


def new_core(
    profile: HardwareProfile,
    n_engines: int,
    n_sequences: int,
    n_entries: int = 0,
    entry_tokens: int = 0,
    entry_ids: npt.NDArray[np.int64] | None = None,
    macro_steps: bool = True,
) -> Core:
    """Idle engines with empty caches.

    entry_tokens: tokens of one prefix-cache entry, a multiple of the profile's block (0: one block). entry_ids:
    the chains that `chain_start` and `chain_length` of sequences point into. Raises ConfigError where the
    limits contradict each other.
    """
    entry_tokens = entry_tokens or profile.block_tokens
    if entry_tokens % profile.block_tokens:
        raise ConfigError(
            f"prefix entries of {entry_tokens} tokens are no multiple of KV blocks of {profile.block_tokens}"
        )
    if profile.max_num_batched_tokens < profile.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens {profile.max_num_batched_tokens} is below max_num_seqs {profile.max_num_seqs}"
        )
    engines = _idle_engines(profile, n_engines, entry_tokens, macro_steps)
    sequences = np.recarray(n_sequences, dtype=SEQUENCE)
    sequences.view(np.uint8)[:] = 0
    sequences["next"] = sequences["previous"] = NONE
    per_sequence = (n_engines, profile.max_num_seqs + 1)
    pull_room = (n_engines, n_sequences + 1)
    entries = (n_engines, max(n_entries, 1))
    # One run a block at most, and one more for what an evicted entry leaves over.
    kv_blocks = profile.kv_tokens // profile.block_tokens
    ring = (n_engines, kv_blocks + 2)
    core = Core(
        engines=engines,
        sequences=sequences,
        heap_step=np.zeros(per_sequence, np.int64),
        heap_sequence=np.zeros(per_sequence, np.int64),
        growth=np.zeros((n_engines, profile.block_tokens), np.int64),
        ring_count=np.zeros(ring, np.int64),
        ring_stamp=np.zeros(ring, np.int64),
        entry_references=np.full(entries, NONE, np.int64),
        entry_stamp=np.zeros(entries, np.int64),
        lru_next=np.full(entries, NONE, np.int64),
        lru_previous=np.full(entries, NONE, np.int64),
        chunk_sequence=np.zeros(per_sequence, np.int64),
        chunk_tokens=np.zeros(per_sequence, np.int64),
        finished=np.zeros(per_sequence, np.int64),
        first_tokens=np.zeros(per_sequence, np.int64),
        pulls=np.zeros(pull_room, np.int64),
        entry_ids=entry_ids if entry_ids is not None else np.zeros(1, np.int64),
    )
    core.ring_count[:, 0] = kv_blocks
    engines["ring_size"] = 1
    return core


def _idle_engines(profile: HardwareProfile, n_engines: int, entry_tokens: int, macro_steps: bool) -> Any:
    """Records (n_engines,) of engines with nothing to do."""
    kv_blocks = profile.kv_tokens // profile.block_tokens
    engines = np.recarray(n_engines, dtype=ENGINE)
    engines.view(np.uint8)[:] = 0
    for name in ("prefilling", "waiting_head", "waiting_tail", "loaded_head", "loaded_tail", "lru_head", "lru_tail"):
        engines[name] = NONE
    engines["free_blocks"] = engines["kv_blocks"] = kv_blocks
    engines["max_num_seqs"] = profile.max_num_seqs
    engines["max_num_batched_tokens"] = profile.max_num_batched_tokens
    engines["block_tokens"] = profile.block_tokens
    engines["entry_tokens"] = entry_tokens
    engines["entry_blocks"] = entry_tokens // profile.block_tokens
    engines["macro_steps"] = int(macro_steps)
    engines["step_time"] = profile.step.as_list()
    return engines
