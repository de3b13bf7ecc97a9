"""An independent model of a vLLM v1 engine for tests: objects and lists, token by token, nothing kept up to date twice.

Written from the rules of vLLM's scheduler and block pool, not from `learn`: every sequence has its list of blocks, the
free queue is a list of blocks, and each step looks at everything anew.
"""

from dataclasses import dataclass, field

from serve_table.step_time import HardwareProfile, step_time_s


@dataclass(eq=False)
class Block:
    entry: int | None = None


@dataclass(eq=False)
class Leg:
    """One sequence. kind: 'prefill', 'local' or 'pull'."""

    name: int
    prompt_tokens: int
    output_tokens: int
    kind: str
    chain: list[int]
    state: str = "new"
    computed: int = 0
    generated: int = 0
    cached_tokens: int = 0
    decodes: bool = False
    blocks: list[Block] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    first_token_s: float | None = None
    finish_s: float | None = None

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.generated


class BlockPool:
    """Free queue and prefix cache; an entry is a group of `entry_blocks` blocks, cached and evicted together."""

    def __init__(self, profile: HardwareProfile, entry_tokens: int) -> None:
        self.block_tokens = profile.block_tokens
        self.entry_tokens = entry_tokens
        self.entry_blocks = entry_tokens // profile.block_tokens
        self.free = [Block() for _ in range(profile.kv_tokens // profile.block_tokens)]
        self.cache: dict[int, list[Block]] = {}
        self.users: dict[int, int] = {}

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def take(self, n: int) -> list[Block]:
        taken = []
        for _ in range(n):
            block = self.free.pop(0)
            if block.entry is not None:
                self.evict(block.entry)
            taken.append(block)
        return taken

    def evict(self, entry: int) -> None:
        for block in self.cache.pop(entry):
            block.entry = None
        del self.users[entry]

    def hits(self, chain: list[int], tokens: int) -> list[int]:
        """Cached entries from the start of a chain; the last token is always computed."""
        found: list[int] = []
        for entry in chain:
            if entry not in self.cache or (len(found) + 1) * self.entry_tokens > tokens - 1:
                break
            found.append(entry)
        return found

    def claim(self, entry: int) -> list[Block]:
        if self.users[entry] == 0:
            self.free = [block for block in self.free if block.entry != entry]
        self.users[entry] += 1
        return self.cache[entry]

    def share(self, leg: Leg, tokens: int) -> None:
        """Cache what lies within the leg's first tokens; a copy of what is cached already gives way to it."""
        for k in range(len(leg.entries), min(len(leg.chain), tokens // self.entry_tokens)):
            entry = leg.chain[k]
            place = slice(k * self.entry_blocks, (k + 1) * self.entry_blocks)
            if entry in self.cache:
                copy = leg.blocks[place]
                leg.blocks[place] = self.claim(entry)
                self.free.extend(copy)
            else:
                self.cache[entry] = leg.blocks[place]
                self.users[entry] = 1
                for block in self.cache[entry]:
                    block.entry = entry
            leg.entries.append(entry)

    def give_back(self, leg: Leg) -> None:
        """The tail first, so that it is evicted first."""
        self.free.extend(leg.blocks[len(leg.entries) * self.entry_blocks :])
        for entry in reversed(leg.entries):
            self.users[entry] -= 1
            if self.users[entry] == 0:
                self.free.extend(self.cache[entry])
        leg.blocks = []
        leg.entries = []

    def reset(self) -> None:
        for entry in [entry for entry, users in self.users.items() if users == 0]:
            self.evict(entry)


class ReferenceEngine:
    """One engine; `scheduled` holds the tokens of the step under way."""

    def __init__(self, profile: HardwareProfile, entry_tokens: int | None = None) -> None:
        self.profile = profile
        self.pool = BlockPool(profile, entry_tokens or profile.block_tokens)
        self.running: list[Leg] = []
        self.waiting: list[Leg] = []
        self.transferred: list[Leg] = []  # complete, but the scheduler has not heard of it
        self.ready: list[Leg] = []
        self.pulls: list[Leg] = []
        self.scheduled: dict[Leg, int] = {}
        self.step_end_s: float | None = None
        self.preemptions = 0

    def submit(self, leg: Leg) -> None:
        leg.state = "waiting"
        self.waiting.append(leg)

    def loaded(self, leg: Leg) -> None:
        leg.state = "transferred"
        leg.computed = leg.prompt_tokens - 1
        self.pool.share(leg, leg.prompt_tokens)
        self.transferred.append(leg)

    def release(self, leg: Leg) -> None:
        self.pool.give_back(leg)
        leg.state = "done"

    def abort(self, leg: Leg) -> None:
        for queue in (self.running, self.waiting, self.transferred, self.ready):
            if leg in queue:
                queue.remove(leg)
        self.pool.give_back(leg)
        leg.state = "done"

    def begin_step(self, now_s: float) -> bool:
        self.pulls = []
        self.scheduled = {}
        preempted = self.schedule_running()
        if not preempted or not self.scheduled:
            self.schedule_waiting()
        self.hear_of_transfers()
        if not self.scheduled and self.ready:
            self.schedule_waiting()
        if not self.scheduled:
            self.step_end_s = None
            return False
        tokens = sum(self.scheduled.values())
        context = sum(leg.computed for leg in self.scheduled)
        self.step_end_s = now_s + step_time_s(self.profile.step.as_list(), tokens, context)
        return True

    def hear_of_transfers(self) -> None:
        """What is complete when a step begins may join the next one."""
        self.ready += self.transferred
        self.transferred = []

    def budget(self) -> int:
        return self.profile.max_num_batched_tokens - sum(self.scheduled.values())

    def schedule_running(self) -> bool:
        """Tokens for the running legs in order of admission; True if one was preempted."""
        preempted = False
        for leg in list(self.running):
            if leg not in self.running or self.budget() == 0:
                break
            n_tokens = min(leg.total - leg.computed, self.budget())
            needed = self.pool.blocks_for(leg.computed + n_tokens) - len(leg.blocks)
            while needed > len(self.pool.free) and leg in self.running:
                self.preempt(self.running.pop())
                preempted = True
            if leg not in self.running:
                break
            leg.blocks += self.pool.take(needed)
            self.pool.share(leg, leg.computed + n_tokens)
            self.scheduled[leg] = n_tokens
        return preempted

    def preempt(self, leg: Leg) -> None:
        self.pool.give_back(leg)
        leg.computed = 0
        leg.decodes = False
        leg.state = "waiting"
        if leg.kind == "pull":
            leg.kind = "local"
        self.waiting.insert(0, leg)
        self.preemptions += 1

    def schedule_waiting(self) -> None:
        while self.budget() > 0 and len(self.running) < self.profile.max_num_seqs:
            if self.ready:
                leg = self.ready.pop(0)
                leg.state = "running"
                leg.decodes = True
                self.running.append(leg)
                self.scheduled[leg] = 1
            elif not self.waiting or not self.admit(self.waiting[0]):
                return

    def admit(self, leg: Leg) -> bool:
        """Admit the head of the queue where all of its tokens fit."""
        pool = self.pool
        hits = pool.hits(leg.chain, leg.total)
        own = pool.blocks_for(leg.total) - len(hits) * pool.entry_blocks
        revived = sum(pool.entry_blocks for entry in hits if pool.users[entry] == 0)
        if own + revived > len(pool.free):
            return False
        self.waiting.pop(0)
        leg.blocks = [block for entry in hits for block in pool.claim(entry)]
        leg.entries = hits
        leg.computed = len(hits) * pool.entry_tokens
        if leg.generated == 0:
            leg.cached_tokens = leg.computed
        if leg.kind == "pull":
            leg.blocks += pool.take(own)
            leg.state = "pulling"
            self.pulls.append(leg)
            return True
        n_tokens = min(leg.total - leg.computed, self.budget())
        leg.blocks += pool.take(pool.blocks_for(leg.computed + n_tokens) - len(leg.blocks))
        pool.share(leg, leg.computed + n_tokens)
        leg.state = "running"
        self.running.append(leg)
        self.scheduled[leg] = n_tokens
        return True

    def end_step(self) -> list[Leg]:
        """Emit tokens; returns answered legs. Decoding ones give back their blocks before those that prefilled."""
        now_s = self.step_end_s
        answered = []
        for leg in sorted(self.scheduled, key=lambda leg: not leg.decodes):
            if leg not in self.running:
                continue
            leg.computed += self.scheduled[leg]
            if leg.computed < leg.total:
                continue
            leg.generated += 1
            leg.decodes = True
            if leg.generated == 1:
                leg.first_token_s = now_s
            if leg.generated == leg.output_tokens:
                leg.finish_s = now_s
                answered.append(leg)
                self.running.remove(leg)
                if leg.kind == "prefill":
                    leg.state = "held"
                else:
                    self.pool.give_back(leg)
                    leg.state = "done"
        self.scheduled = {}
        self.step_end_s = None
        return answered
