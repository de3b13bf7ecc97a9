"""KV blocks of one engine: allocation, the prefix cache, LRU eviction. After vLLM v1's block pool.

Free blocks form one queue in the order they were freed; allocation takes its head and evicts what was cached
there. The queue is kept in two parts that are merged by stamp: a list of cached entries, which a prefix hit
can take out of the middle, and runs of blocks that hold nothing reusable.
"""

from learn.compiled import jit
from learn.core import NONE, Core


@jit
def lru_append(core: Core, e: int, entry: int) -> None:
    engine = core.engines[e]
    core.entry_stamp[e, entry] = engine.next_stamp
    engine.next_stamp += 1
    tail = engine.lru_tail
    core.lru_previous[e, entry] = tail
    core.lru_next[e, entry] = NONE
    if tail == NONE:
        engine.lru_head = entry
    else:
        core.lru_next[e, tail] = entry
    engine.lru_tail = entry


@jit
def lru_remove(core: Core, e: int, entry: int) -> None:
    engine = core.engines[e]
    before = core.lru_previous[e, entry]
    after = core.lru_next[e, entry]
    if before == NONE:
        engine.lru_head = after
    else:
        core.lru_next[e, before] = after
    if after == NONE:
        engine.lru_tail = before
    else:
        core.lru_previous[e, after] = before


@jit
def free_plain(core: Core, e: int, n_blocks: int) -> None:
    """Append blocks that hold nothing reusable to the free queue."""
    if n_blocks <= 0:
        return
    engine = core.engines[e]
    engine.free_blocks += n_blocks
    ring = core.ring_count.shape[1]
    if engine.ring_size > 0:
        last = (engine.ring_head + engine.ring_size - 1) % ring
        # Nothing cached was freed since the last run: the two are neighbours.
        if engine.lru_tail == NONE or core.entry_stamp[e, engine.lru_tail] < core.ring_stamp[e, last]:
            core.ring_count[e, last] += n_blocks
            return
    last = (engine.ring_head + engine.ring_size) % ring
    core.ring_count[e, last] = n_blocks
    core.ring_stamp[e, last] = engine.next_stamp
    engine.next_stamp += 1
    engine.ring_size += 1


@jit
def allocate(core: Core, e: int, n_blocks: int) -> None:
    """Take blocks from the head of the free queue; the caller has checked that there are enough."""
    engine = core.engines[e]
    engine.free_blocks -= n_blocks
    ring = core.ring_count.shape[1]
    left = n_blocks
    while left > 0:
        head = engine.ring_head
        entry = engine.lru_head
        if engine.ring_size > 0 and (entry == NONE or core.ring_stamp[e, head] <= core.entry_stamp[e, entry]):
            taken = min(left, core.ring_count[e, head])
            core.ring_count[e, head] -= taken
            left -= taken
            if core.ring_count[e, head] == 0:
                engine.ring_head = (head + 1) % ring
                engine.ring_size -= 1
        else:
            lru_remove(core, e, entry)
            core.entry_references[e, entry] = NONE
            over = engine.entry_blocks - left
            left -= engine.entry_blocks
            if over > 0:
                engine.ring_head = (head - 1) % ring
                core.ring_count[e, engine.ring_head] = over
                core.ring_stamp[e, engine.ring_head] = core.entry_stamp[e, entry]
                engine.ring_size += 1


@jit
def cached_entries(core: Core, e: int, chain_start: int, chain_length: int, prompt_tokens: int) -> int:
    """Entries of a chain that the engine holds, from the first on.

    Never the whole prompt: an engine always computes the last token itself.
    """
    limit = min(chain_length, (prompt_tokens - 1) // core.engines[e].entry_tokens)
    for k in range(limit):
        if core.entry_references[e, core.entry_ids[chain_start + k]] < 0:
            return k
    return int(limit)


@jit
def claimable_blocks(core: Core, e: int, s: int, n_entries: int) -> int:
    """Free blocks that claiming the first entries of a sequence's chain takes out of the free queue."""
    n_free = 0
    start = core.sequences[s].chain_start
    for k in range(n_entries):
        if core.entry_references[e, core.entry_ids[start + k]] == 0:
            n_free += 1
    return int(n_free * core.engines[e].entry_blocks)


@jit
def claim(core: Core, e: int, s: int, n_entries: int) -> None:
    """Give a sequence references to the first entries of its chain, which are cached."""
    engine = core.engines[e]
    sequence = core.sequences[s]
    for k in range(n_entries):
        entry = core.entry_ids[sequence.chain_start + k]
        if core.entry_references[e, entry] == 0:
            lru_remove(core, e, entry)
            engine.free_blocks -= engine.entry_blocks
        core.entry_references[e, entry] += 1
    sequence.shared = n_entries
    sequence.blocks = n_entries * engine.entry_blocks
    sequence.computed = n_entries * engine.entry_tokens


@jit
def register(core: Core, e: int, s: int, tokens: int) -> None:
    """Put the entries that lie within a sequence's first `tokens` into the prefix cache.

    Where another sequence computed the same entry meanwhile, that one is shared and the copy's blocks freed.
    """
    engine = core.engines[e]
    sequence = core.sequences[s]
    full = min(sequence.chain_length, tokens // engine.entry_tokens)
    for k in range(sequence.shared, full):
        entry = core.entry_ids[sequence.chain_start + k]
        references = core.entry_references[e, entry]
        if references < 0:
            core.entry_references[e, entry] = 1
        else:
            if references == 0:
                lru_remove(core, e, entry)
                engine.free_blocks -= engine.entry_blocks
            core.entry_references[e, entry] = references + 1
            free_plain(core, e, engine.entry_blocks)
    if full > sequence.shared:
        sequence.shared = full


@jit
def free_sequence(core: Core, e: int, s: int) -> None:
    """Free all blocks of a sequence, the end of its prefix first, so that it is evicted first."""
    engine = core.engines[e]
    sequence = core.sequences[s]
    free_plain(core, e, sequence.blocks - sequence.shared * engine.entry_blocks)
    for k in range(sequence.shared - 1, -1, -1):
        entry = core.entry_ids[sequence.chain_start + k]
        core.entry_references[e, entry] -= 1
        if core.entry_references[e, entry] == 0:
            lru_append(core, e, entry)
            engine.free_blocks += engine.entry_blocks
    sequence.blocks = 0
    sequence.shared = 0


@jit
def reset_prefix_cache(core: Core, e: int) -> None:
    """Forget every cached prefix that no running sequence uses."""
    engine = core.engines[e]
    while engine.lru_head != NONE:
        entry = engine.lru_head
        lru_remove(core, e, entry)
        core.entry_references[e, entry] = NONE
        engine.free_blocks -= engine.entry_blocks
        free_plain(core, e, engine.entry_blocks)
