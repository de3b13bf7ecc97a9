"""The fleet as the router knows it: which engines are up, and the work in flight on each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from serve_table.engine_client import EngineClient
from serve_table.engine_response import EngineTimeouts
from serve_table.placement import least
from serve_table.residents import BoundRequest
from serve_table.situation import NO_ENGINE, Fleet

Role = Literal["prefill", "decode", "whole"]


class Engine:
    """One engine. requests and the token counts are of work that this router sent and that is not over.

    Of a prefill engine that serves whole requests there are two: its own, and one of role "whole" that counts those.
    """

    def __init__(self, url: str, role: Role, index: int, timeouts: EngineTimeouts, key: bytes | None = None) -> None:
        self.url = url
        self.index = index
        """Its place among the engines of its role."""
        self.role = role
        self.client = EngineClient(url, timeouts, key)
        self.up = False
        self.down_reason = "not probed yet"
        self.failures = 0
        """Failures since the last success; they lengthen the time that it stays out."""
        self.requests = 0.0
        self.tokens = 0.0
        self.local_prefill_tokens = 0.0
        self.host = self
        """What knows whether it is up: another one where the role is "whole"."""


def whole_role(prefill: Engine, index: int) -> Engine:
    """A prefill engine as it serves whole requests. index: its place after the decode engines."""
    engine = Engine(prefill.url, "whole", index, prefill.client.timeouts)
    engine.client = prefill.client
    engine.host = prefill
    return engine


class EngineFleet:
    """All engines of a router, in the order given, which is how decisions index them. elastic: the prefill engines may
    serve whole requests. key: what the router shows to them.
    """

    def __init__(
        self,
        prefill_urls: Sequence[str],
        decode_urls: Sequence[str],
        timeouts: EngineTimeouts,
        elastic: bool = False,
        key: bytes | None = None,
    ) -> None:
        self.prefill = [Engine(url, "prefill", i, timeouts, key) for i, url in enumerate(prefill_urls)]
        self.decode = [Engine(url, "decode", i, timeouts, key) for i, url in enumerate(decode_urls)]
        self.whole = [whole_role(engine, len(self.decode) + i) for i, engine in enumerate(self.prefill) if elastic]

    @property
    def engines(self) -> list[Engine]:
        return self.prefill + self.decode

    @property
    def decode_candidates(self) -> list[Engine]:
        """As a decision's `decode` counts them."""
        return self.decode + self.whole

    def snapshot(self) -> Fleet:
        """The state that a decision reads.

        Where no decode engine is up all of them are offered: trying one that was down a moment ago is better
        than refusing everything.
        """
        last_resort = not any(engine.up for engine in self.decode)
        prefill_tokens = [engine.tokens for engine in self.prefill]
        for i, engine in enumerate(self.whole):
            prefill_tokens[i] += engine.local_prefill_tokens
        whole_tokens = prefill_tokens[: len(self.whole)]
        candidates = self.decode_candidates
        return Fleet(
            prefill_requests=[engine.requests for engine in self.prefill],
            prefill_tokens=prefill_tokens,
            prefill_up=[1.0 if engine.up else 0.0 for engine in self.prefill],
            decode_requests=[engine.requests for engine in candidates],
            decode_tokens=[engine.tokens for engine in candidates],
            decode_prefill_tokens=[engine.local_prefill_tokens for engine in self.decode] + whole_tokens,
            decode_up=[1.0 if engine.up or last_resort else 0.0 for engine in self.decode]
            + [1.0 if engine.host.up else 0.0 for engine in self.whole],
            whole_engines=len(self.whole),
        )

    def another_decode(self, tried: Sequence[Engine], rotation: int) -> Engine | None:
        """The least loaded decode engine not tried yet, those that are up first; None if all were tried."""
        load = [engine.requests for engine in self.decode]
        for only_up in (True, False):
            free = [float(engine not in tried and (engine.up or not only_up)) for engine in self.decode]
            index = least(load, free, rotation)
            if index != NO_ENGINE:
                return self.decode[index]
        return None


@dataclass
class Reservation:
    """The work of one request on its engines, from the decision until `release`. Every step may be called twice.

    Tokens are whole numbers, so that counters come back to exactly 0. committed_tokens: prompt and predicted
    output. prefill_tokens: uncached prompt tokens of a remote prefill. local_tokens: uncached prompt tokens on
    the decode engine; they count while it prefills. bound: the request among the residents, where they are kept.
    on_prefill_returned: called when the prefill engine has less to do.
    """

    prefill: Engine | None
    decode: Engine | None
    committed_tokens: float
    prefill_tokens: float
    local_tokens: float
    bound: BoundRequest | None = None
    on_prefill_returned: Callable[[], None] | None = None
    _local_counted: float = 0.0

    def __post_init__(self) -> None:
        if self.prefill is not None:
            self.prefill.requests += 1.0
            self.prefill.tokens += self.prefill_tokens
        if self.decode is not None:
            self.decode.requests += 1.0
            self.decode.tokens += self.committed_tokens
        if self.prefill is None:
            self.begin_local_prefill()

    def prefill_returned(self) -> None:
        """The prefill leg is over, well or not."""
        engine, self.prefill = self.prefill, None
        if engine is not None:
            engine.requests -= 1.0
            engine.tokens -= self.prefill_tokens
            if self.bound is not None:
                self.bound.prefill_returned()
            if self.on_prefill_returned is not None:
                self.on_prefill_returned()

    def begin_local_prefill(self) -> None:
        """The decode engine prefills this request itself."""
        if self.decode is not None and not self._local_counted:
            self._local_counted = self.local_tokens
            self.decode.local_prefill_tokens += self.local_tokens
            if self.bound is not None:
                self.bound.prefills_locally()

    def streamed(self, tokens: int) -> None:
        """So many tokens have come by now; with the first its prefill, if it was local, is over."""
        self._end_local_prefill()
        if self.bound is not None:
            self.bound.streamed(tokens)

    def _end_local_prefill(self) -> None:
        counted, self._local_counted = self._local_counted, 0.0
        self.local_tokens = 0.0
        if self.decode is not None and counted:
            self.decode.local_prefill_tokens -= counted
            if self.decode.role == "whole" and self.on_prefill_returned is not None:
                self.on_prefill_returned()

    def move_to(self, decode: Engine) -> None:
        """Another decode engine takes the request over."""
        local = self._local_counted
        if self.decode is not None:
            self.decode.requests -= 1.0
            self.decode.tokens -= self.committed_tokens
            self.decode.local_prefill_tokens -= local
        self.decode = decode
        decode.requests += 1.0
        decode.tokens += self.committed_tokens
        decode.local_prefill_tokens += local
        if self.bound is not None:
            self.bound.move_to(decode.index)

    def release(self) -> None:
        """The request is over."""
        self.prefill_returned()
        self._end_local_prefill()
        if self.bound is not None:
            self.bound.leave()
        engine, self.decode = self.decode, None
        if engine is not None:
            engine.requests -= 1.0
            engine.tokens -= self.committed_tokens
