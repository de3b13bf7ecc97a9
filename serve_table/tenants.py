"""Tenants: whose a request is, and how tenants take turns where requests are held.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), counted in prompt tokens: a tenant's level rises by what
was released of its requests, and the lowest level goes first. Who had nothing held begins no lower than those who wait,
so that nobody saves up turns.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable

from serve_table.api_keys import bearer_key
from serve_table.engine_response import Headers

TENANT_HEADER = b"x-rutter-tenant"

Tenant = bytes
COMMON: Tenant = b""
"""Of requests that say nothing of theirs."""


def tenant_of(headers: Headers, salt: bytes, by_own_header: bool) -> Tenant:
    """The tenant of a request, of which only a salted hash is kept; the common one where it says nothing of it."""
    identity = tenant_identity(headers, by_own_header)
    return hashlib.blake2b(identity, digest_size=8, key=salt).digest() if identity else COMMON


def tenant_identity(headers: Headers, by_own_header: bool) -> bytes:
    """What tells tenants apart: the operator's header where that is believed, else the key; empty where there is none.

    by_own_header: only an operator whose proxy sets it can believe it, since whoever makes up tenants gets more turns.
    The key alone counts, so that nobody is several tenants by other spellings of `Bearer`.
    """
    if by_own_header:
        for name, value in headers:
            if name == TENANT_HEADER:
                return TENANT_HEADER + value
    given = bearer_key(headers) or next((value for name, value in headers if name == b"authorization"), b"")
    return b"authorization" + given if given else b""


class TenantTurns:
    """The levels of all tenants that have requests held, and of those that were ahead of them lately."""

    def __init__(self) -> None:
        self._levels: dict[Tenant, float] = {}
        self._held: Counter[Tenant] = Counter()

    def __len__(self) -> int:
        """Tenants that have requests held."""
        return len(self._held)

    def join(self, tenant: Tenant) -> None:
        """A request of this tenant is held from now on."""
        self._levels = self.levels(tenant)
        self._held[tenant] += 1

    def leave(self, tenant: Tenant, released_tokens: float) -> None:
        """One of its requests is held no longer; released_tokens: 0 where it left by itself."""
        self._levels[tenant] += released_tokens
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]

    def levels(self, joining: Tenant) -> dict[Tenant, float]:
        """Released tokens of every tenant, a copy, were one more request of this tenant held."""
        return _levels_with(self._levels, self._held, joining)

    def held_levels(self) -> dict[Tenant, float]:
        """Released tokens of the tenants that have requests held, a copy."""
        return {tenant: self._levels[tenant] for tenant in self._held}


def _levels_with(levels: dict[Tenant, float], held: Iterable[Tenant], joining: Tenant) -> dict[Tenant, float]:
    """Nobody's level is below the lowest of those who wait, and where nobody waits all begin anew."""
    lowest = min((levels[tenant] for tenant in held), default=None)
    if lowest is None:
        return {joining: 0.0}
    kept = {tenant: level for tenant, level in levels.items() if level > lowest or tenant in held}
    kept.setdefault(joining, lowest)
    return kept
