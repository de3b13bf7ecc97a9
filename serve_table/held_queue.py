"""The held queue: requests that wait in the router, in the order in which they go.

The order is the guard's: earliest deadline first, what is late anyway after that, what has been late for too long
before all. Within a tier tenants take turns; with one tenant it is the guard's order exactly.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Generic, TypeVar

from serve_table.guard import held_key
from serve_table.situation import Request
from serve_table.tenants import COMMON, Tenant, TenantTurns


@dataclass(eq=False, kw_only=True)
class HeldRequest:
    """One request while it is held.

    request: for its class and prompt. since_s: engine seconds. tokens: of its prompt, uncached on the best prefill
    engine, as of its last decision.
    """

    request: Request
    since_s: float
    tokens: float = 0.0
    tenant: Tenant = COMMON
    number: int = field(default=0, init=False)


H = TypeVar("H", bound=HeldRequest)


class HeldQueue(Generic[H]):
    """All held requests of a router. params: the price's."""

    def __init__(self, params: Sequence[float]) -> None:
        self._params = params
        self._turns = TenantTurns()
        self._requests: dict[H, None] = {}
        self._joined = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, held: H) -> None:
        held.number = self._joined
        self._joined += 1
        self._turns.join(held.tenant)
        self._requests[held] = None

    def remove(self, held: H, released: bool) -> None:
        """released: to its engines, which counts as a turn of its tenant."""
        del self._requests[held]
        self._turns.leave(held.tenant, held.tokens if released else 0.0)

    def __contains__(self, held: H) -> bool:
        return held in self._requests

    def first(self) -> H:
        """The one that has been held for the longest time; there must be one."""
        return next(iter(self._requests))

    def in_order(self, now_s: float) -> list[H]:
        """All of them, in the order in which they go."""
        keyed = sorted(self._all_keyed(now_s), key=_key)
        if len(self._turns) <= 1:
            return [held for _, _, held in keyed]
        return _in_turns(keyed, self._turns.held_levels())

    def ahead_tokens(self, coming: H, now_s: float) -> float:
        """Tokens of those that would go before a request that is not held yet."""
        coming.number = self._joined
        own = self._keyed(coming, now_s, sum(held.tokens for held in self._requests))
        keyed = self._all_keyed(now_s)
        if all(held.tenant == coming.tenant for held in self._requests):
            return sum((held.tokens for *key, held in keyed if tuple(key) < own[:2]), 0.0)
        order = _in_turns(sorted([*keyed, own], key=_key), self._turns.levels(coming.tenant))
        return sum((held.tokens for held in order[: order.index(coming)]), 0.0)

    def _all_keyed(self, now_s: float) -> "list[Keyed[H]]":
        keyed = []
        tokens_before = 0.0
        for held in self._requests:
            keyed.append(self._keyed(held, now_s, tokens_before))
            tokens_before += held.tokens
        return keyed

    def _keyed(self, held: H, now_s: float, tokens_before: float) -> "Keyed[H]":
        waiting = held.request._replace(waited_s=now_s - held.since_s)
        return held_key(self._params, waiting, tokens_before), held.number, held


Keyed = tuple[tuple[int, float], int, H]


def _key(keyed: Keyed[H]) -> tuple[tuple[int, float], int]:
    """The guard's key, then who came first."""
    return keyed[0], keyed[1]


def _in_turns(keyed: Sequence[Keyed[H]], levels: dict[Tenant, float]) -> list[H]:
    """In tiers; within one the tenant of the lowest level goes, and its level rises by what goes.

    keyed: sorted. levels: of every tenant among them; changed.
    """
    order: list[H] = []
    tiers: dict[int, dict[Tenant, deque[Keyed[H]]]] = {}
    for entry in keyed:
        tiers.setdefault(entry[0][0], {}).setdefault(entry[2].tenant, deque()).append(entry)
    for queues in tiers.values():
        heads = [(levels[tenant], *queue[0][:2], tenant) for tenant, queue in queues.items()]
        heapify(heads)
        while heads:
            tenant = heads[0][3]
            queue = queues[tenant]
            held = queue.popleft()[2]
            order.append(held)
            levels[tenant] += held.tokens
            if queue:
                heapreplace(heads, (levels[tenant], *queue[0][:2], tenant))
            else:
                heappop(heads)
    return order
