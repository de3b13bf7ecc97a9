"""Which processes of a measurement share which cores."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class CoreShares:
    """router: cores of each router under measurement; rest: of engines and clients. Both empty: nothing is pinned."""

    router: frozenset[int]
    rest: frozenset[int]

    def __str__(self) -> str:
        if not self.router:
            return "nothing pinned: routers, engines and client share all cores"
        return f"each router on core {_names(self.router)} alone, engines and client on {_names(self.rest)}"


def core_shares() -> CoreShares:
    """One core for the routers and the others for the rest, of those that this process may use."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return CoreShares(frozenset(), frozenset())
    return CoreShares(frozenset(cores[:1]), frozenset(cores[1:]))


@contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """This thread, and what it starts, on these cores; on those of before afterwards. Empty: changes nothing."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _names(cores: frozenset[int]) -> str:
    return ", ".join(str(core) for core in sorted(cores))
