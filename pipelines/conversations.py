"""Multi-turn conversations: who speaks next, and which prompt blocks are shared."""

import heapq
from dataclasses import dataclass

import numpy as np

from learn.trace import Floats, Ints
from pipelines.lengths import LengthLaw


@dataclass(frozen=True)
class Conversations:
    """A later turn's prompt is the earlier prompt, its answer and a new message.

    Each conversation opens with one of `n_system_prompts` system prompts of `system_tokens`. The next turn comes
    at the earliest when the answer was read (`answer_s_per_token`) and thought about.
    """

    n_system_prompts: int
    system_tokens: int
    message_tokens: LengthLaw
    answer_tokens: LengthLaw
    turns_low: int
    turns_high: int
    think_median_s: float
    think_sigma: float
    answer_s_per_token: float

    @property
    def longest_tokens(self) -> int:
        """The longest possible context: the last turn's prompt and answer at their limits."""
        return self.system_tokens + self.turns_high * (self.message_tokens.high + self.answer_tokens.high)


@dataclass(frozen=True)
class Turns:
    """Requests of conversations in order of arrival; every array (n_requests,) but `block_ids`."""

    conversation: Ints
    turn: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    chain_start: Ints
    chain_length: Ints
    block_ids: Ints


def make_turns(spec: Conversations, arrival_s: Floats, hash_block_tokens: int, rng: np.random.Generator) -> Turns:
    """Give each arrival to a waiting conversation, or to a new one."""
    n_requests = len(arrival_s)
    shape = (n_requests, spec.turns_high)
    messages, answers = spec.message_tokens.draw(shape, rng), spec.answer_tokens.draw(shape, rng)
    turns_asked = rng.integers(spec.turns_low, spec.turns_high, n_requests, endpoint=True)
    think_s = spec.think_median_s * np.exp(spec.think_sigma * rng.standard_normal(shape))
    ready_after_s = think_s + spec.answer_s_per_token * answers
    conversation, turn = _assign(spec, arrival_s, turns_asked, ready_after_s, rng.random(n_requests))
    prompts = spec.system_tokens + np.cumsum(messages, axis=1)
    prompts[:, 1:] += np.cumsum(answers, axis=1)[:, :-1]
    systems = rng.integers(spec.n_system_prompts, size=n_requests)
    turns_had = np.bincount(conversation, minlength=n_requests)
    prompt_tokens = prompts[conversation, turn]
    chain_start, chain_blocks, block_ids = _chains(spec, systems, turns_had, prompts, hash_block_tokens)
    return Turns(
        conversation=conversation,
        turn=turn,
        prompt_tokens=prompt_tokens,
        output_tokens=answers[conversation, turn],
        chain_start=chain_start[conversation],
        chain_length=np.minimum(prompt_tokens // hash_block_tokens, chain_blocks[conversation]),
        block_ids=block_ids,
    )


def _assign(
    spec: Conversations, arrival_s: Floats, turns_asked: Ints, ready_after_s: Floats, draws: Floats
) -> tuple[Ints, Ints]:
    """Conversation and turn of each arrival (n_requests,).

    The arrival process stays what it was asked to be: an arrival opens a conversation with the probability that
    keeps as many waiting as there were, or when none is ready; else the longest waiting one goes on.
    """
    open_share = 2.0 / (spec.turns_low + spec.turns_high)
    conversation = np.zeros(len(arrival_s), np.int64)
    turn = np.zeros(len(arrival_s), np.int64)
    waiting: list[tuple[float, int, int]] = []
    n_opened = 0
    for index, now_s in enumerate(arrival_s.tolist()):
        if draws[index] >= open_share and waiting and waiting[0][0] <= now_s:
            _, who, at_turn = heapq.heappop(waiting)
        else:
            who, at_turn = n_opened, 0
            n_opened += 1
        conversation[index], turn[index] = who, at_turn
        if at_turn + 1 < turns_asked[who]:
            heapq.heappush(waiting, (now_s + float(ready_after_s[who, at_turn]), who, at_turn + 1))
    return conversation, turn


def _chains(
    spec: Conversations, systems: Ints, turns_had: Ints, prompts: Ints, hash_block_tokens: int
) -> tuple[Ints, Ints, Ints]:
    """Chain start and blocks of each conversation, and all block ids; a conversation's turns share one chain.

    Shared blocks are the system prompt's, and those of every turn's prompt that has a later turn.
    """
    system_blocks = spec.system_tokens // hash_block_tokens
    used = np.unique(systems[turns_had > 0])
    used_systems = {int(system): number for number, system in enumerate(used)}
    next_id = len(used_systems) * system_blocks
    chain_start, chain_blocks = np.zeros_like(systems), np.zeros_like(systems)
    parts: list[Ints] = []
    n_ids = 0
    for who in np.flatnonzero(turns_had).tolist():
        first_id = used_systems[int(systems[who])] * system_blocks
        n_turns = int(turns_had[who])
        own = int(prompts[who, n_turns - 2]) // hash_block_tokens - system_blocks if n_turns > 1 else 0
        parts += [np.arange(first_id, first_id + system_blocks), np.arange(next_id, next_id + own)]
        chain_start[who], chain_blocks[who] = n_ids, system_blocks + own
        next_id += own
        n_ids += system_blocks + own
    return chain_start, chain_blocks, np.concatenate(parts).astype(np.int64)
