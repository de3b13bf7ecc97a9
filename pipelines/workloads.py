"""The five synthetic workload families, each a trace made from a seed."""

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from learn.trace import Ints, Trace
from pipelines.arrivals import Arrivals, Bursts
from pipelines.conversations import Conversations, make_turns
from pipelines.lengths import LengthLaw
from serve_table.errors import ConfigError
from serve_table.slo import LOOSE, TIGHT

TIGHT_SHARE = 0.3
HASH_BLOCK_TOKENS = 64
CONTEXT_TOKENS = 16_384
"""Every workload's prompt and answer fit a model context of this length."""


@dataclass(frozen=True)
class Part:
    """One kind of request and its share of the workload."""

    share: float
    prompt_tokens: LengthLaw
    output_tokens: LengthLaw


@dataclass(frozen=True)
class Workload:
    """A family: independent requests of some parts, or conversations."""

    name: str
    arrivals: Arrivals
    parts: tuple[Part, ...] = ()
    conversations: Conversations | None = None

    @property
    def longest_tokens(self) -> int:
        if self.conversations is not None:
            return self.conversations.longest_tokens
        return max(part.prompt_tokens.high + part.output_tokens.high for part in self.parts)


_CHAT = Part(1.0, LengthLaw(250, 0.8, 16, 4_000), LengthLaw(180, 0.7, 8, 1_000))
_DOCUMENTS = Part(1.0, LengthLaw(3_500, 0.45, 1_000, 8_000), LengthLaw(120, 0.6, 8, 500))
_REASONING = Part(1.0, LengthLaw(400, 0.7, 32, 3_000), LengthLaw(900, 0.5, 128, 2_000))


def _of(share: float, part: Part) -> Part:
    return Part(share, part.prompt_tokens, part.output_tokens)


WORKLOADS = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload(
                "mixed",
                Arrivals(bursts=Bursts(quiet_s=8.0, burst_s=2.0, rate_ratio=5.0)),
                (_of(0.6, _CHAT), _of(0.2, _DOCUMENTS), _of(0.2, _REASONING)),
            ),
            Workload("chat", Arrivals(), (_CHAT,)),
            Workload("reasoning", Arrivals(), (_REASONING,)),
            Workload("documents", Arrivals(gap_cv=1.5), (_DOCUMENTS,)),
            Workload(
                "multi-turn",
                Arrivals(),
                conversations=Conversations(
                    n_system_prompts=4,
                    system_tokens=1_000,
                    message_tokens=LengthLaw(300, 0.8, 8, 1_200),
                    answer_tokens=LengthLaw(250, 0.7, 8, 700),
                    turns_low=3,
                    turns_high=8,
                    think_median_s=4.0,
                    think_sigma=0.6,
                    answer_s_per_token=0.02,
                ),
            ),
        )
    }
)


def make_workload(
    name: str, n_requests: int, seed: int, requests_per_s: float, *, tight_share: float = TIGHT_SHARE
) -> Trace:
    """A trace of `n_requests` of the family `name`, arriving at `requests_per_s` on average.

    The mean rate is exact; arrivals, lengths and SLO classes come from independent streams of `seed`.
    Raises ConfigError for an unknown name, a count below 1, or a rate or share out of range.
    """
    workload = workload_named(name)
    if n_requests < 1:
        raise ConfigError(f"workload {name}: {n_requests} requests asked for, give at least 1")
    if not (np.isfinite(requests_per_s) and requests_per_s > 0):
        raise ConfigError(f"workload {name}: {requests_per_s} requests a second asked for, give a rate above 0")
    arrivals_rng, lengths_rng, classes_rng = np.random.default_rng(seed).spawn(3)
    arrival_s = workload.arrivals.times_s(n_requests, requests_per_s, arrivals_rng)
    slo_class = draw_slo_classes(n_requests, tight_share, classes_rng)
    notes = (f"synthetic workload {name}, seed {seed}, {tight_share:.0%} tight",)
    if workload.conversations is not None:
        turns = make_turns(workload.conversations, arrival_s, HASH_BLOCK_TOKENS, lengths_rng)
        return Trace(
            name,
            arrival_s,
            turns.prompt_tokens,
            turns.output_tokens,
            slo_class,
            turns.chain_start,
            turns.chain_length,
            turns.block_ids,
            HASH_BLOCK_TOKENS,
            notes,
        )
    prompt_tokens, output_tokens = _draw_lengths(workload.parts, n_requests, lengths_rng)
    none = np.zeros(n_requests, np.int64)
    no_ids = np.zeros(0, np.int64)
    return Trace(name, arrival_s, prompt_tokens, output_tokens, slo_class, none, none, no_ids, HASH_BLOCK_TOKENS, notes)


def workload_named(name: str) -> Workload:
    """The family of that name; ConfigError lists the known ones."""
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def draw_slo_classes(n_requests: int, tight_share: float, rng: np.random.Generator) -> Ints:
    """SLO classes (n_requests,), each tight with probability `tight_share`."""
    if not 0.0 <= tight_share <= 1.0:
        raise ConfigError(f"a tight share of {tight_share} was asked for: it must be between 0 and 1")
    return np.where(rng.random(n_requests) < tight_share, TIGHT, LOOSE).astype(np.int64)


def _draw_lengths(parts: tuple[Part, ...], n_requests: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    shares = np.array([part.share for part in parts])
    kind = rng.choice(len(parts), n_requests, p=shares / shares.sum())
    prompts = np.stack([part.prompt_tokens.draw(n_requests, rng) for part in parts])
    outputs = np.stack([part.output_tokens.draw(n_requests, rng) for part in parts])
    row = np.arange(n_requests)
    return prompts[kind, row], outputs[kind, row]
