"""The KV that a prefill engine holds for decode engines: single-use handles with a lease."""

import asyncio
from collections.abc import Callable

import msgspec

from pipelines.emulated.engine_loop import Sequence


class Claim(msgspec.Struct, frozen=True):
    """What a decode engine asks with. prompt_digest: hexadecimal, so that a handle never serves another prompt."""

    engine_id: str
    request_id: str
    prompt_digest: str


class Release(msgspec.Struct, frozen=True):
    """What a decode engine says when it has read the KV; or, claimed false, when it will never claim it."""

    engine_id: str
    request_id: str
    claimed: bool


class _Held:
    def __init__(self, sequence: Sequence, prompt_digest: str, timer: asyncio.TimerHandle) -> None:
        self.sequence = sequence
        self.prompt_digest = prompt_digest
        self.timer = timer
        self.claimed = False


class KvHandles:
    """Handles of one prefill engine, by request id.

    free: called with a sequence whose blocks nobody needs any more. lease_s: wall time for which a handle is
    good, and again from its claim, so that a decode engine that dies while it reads frees them too.
    """

    def __init__(self, engine_id: str, lease_s: float, free: Callable[[Sequence], None]) -> None:
        self.engine_id = engine_id
        self.lease_s = lease_s
        self.expired = 0
        self._free = free
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, sequence: Sequence, prompt_digest: str) -> None:
        """Keep a finished prefill leg's blocks under a handle."""
        self._held[request_id] = _Held(sequence, prompt_digest, self._lease(request_id))

    def claim(self, claim: Claim) -> str | None:
        """Use a handle; the reason where it is refused."""
        held = self._held.get(claim.request_id)
        if claim.engine_id != self.engine_id:
            return f"this is engine {self.engine_id}, not {claim.engine_id}"
        if held is None:
            return "no such handle: it was used, has expired or never was"
        if held.claimed:
            return "the handle was used before"
        if claim.prompt_digest != held.prompt_digest:
            return "the handle is for another prompt"
        held.claimed = True
        held.timer.cancel()
        held.timer = self._lease(claim.request_id)
        return None

    def release(self, release: Release) -> None:
        """Free what a handle holds; nothing where it is gone, or where another request is reading it."""
        held = self._held.get(release.request_id)
        if held is not None and release.engine_id == self.engine_id and release.claimed == held.claimed:
            self._drop(release.request_id)

    def close(self) -> None:
        """Stop the leases."""
        for held in self._held.values():
            held.timer.cancel()
        self._held.clear()

    def _lease(self, request_id: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self.lease_s, self._expire, request_id)

    def _expire(self, request_id: str) -> None:
        self.expired += 1
        self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            held.timer.cancel()
            self._free(held.sequence)
