"""The residents as the router keeps them: each request bound to a decode engine, by the tokens it really streamed."""

from collections.abc import Callable, Sequence

from serve_table.harm import N_SHARE, Resident, Residents, remove_share, renew_share
from serve_table.price_params import ttft_target_s


class ResidentBook:
    """All requests in flight, per decode engine. Only the price needs one.

    params: the price's. clock: in the engines' own seconds, so divided by the dilation.
    """

    def __init__(
        self, params: Sequence[float], prefill_engines: int, decode_engines: int, clock: Callable[[], float]
    ) -> None:
        self.params = params
        self.clock = clock
        self.requests = [0.0] * decode_engines
        self._prefill_requests = [0] * prefill_engines
        self._residents = Residents(0.0, [0.0] * prefill_engines, [0.0] * (decode_engines * N_SHARE))
        self._waiting: dict[BoundRequest, None] = {}

    def seen(self) -> Residents:
        """What a decision sees now, a copy. Those that waited for their first token too long are lost from here on."""
        now_s = self.clock()
        late = [bound for bound in self._waiting if now_s > bound.deadline_s]
        for bound in late:
            del self._waiting[bound]
            bound.renew(0, now_s)
        return Residents(now_s, self._residents.prefill_since_s[:], self._residents.shares[:])

    def bind(
        self,
        decode: int,
        prefill: int | None,
        slo_class: int,
        prompt_tokens: float,
        predicted_tokens: float,
        waited_s: float = 0.0,
    ) -> "BoundRequest":
        """Take in a request that was just decided. prefill: the engine of a remote prefill. waited_s: since it came."""
        now_s = self.clock()
        bound = BoundRequest(self, decode, prefill, slo_class, prompt_tokens, predicted_tokens, now_s - waited_s)
        self.requests[decode] += 1.0
        if prefill is not None:
            if self._prefill_requests[prefill] == 0:
                self._residents.prefill_since_s[prefill] = now_s
            self._prefill_requests[prefill] += 1
        self._waiting[bound] = None
        bound.renew(0, now_s)
        return bound

    def renew(self, decode: int, resident: Resident, share: list[float]) -> None:
        renew_share(self.params, self._residents, decode, self.requests[decode], resident, share, 0)

    def leave(self, decode: int, share: list[float]) -> None:
        self.requests[decode] -= 1.0
        remove_share(self._residents, decode, self.requests[decode], share, 0)

    def stop_waiting(self, bound: "BoundRequest") -> None:
        self._waiting.pop(bound, None)

    def prefill_returned(self, prefill: int) -> None:
        self._prefill_requests[prefill] -= 1
        self._residents.prefill_since_s[prefill] = self.clock()


class BoundRequest:
    """One request, from its decision until it `leave`s. Every step may be called twice."""

    def __init__(
        self,
        book: ResidentBook,
        decode: int,
        prefill: int | None,
        slo_class: int,
        prompt_tokens: float,
        predicted_tokens: float,
        came_s: float,
    ) -> None:
        self.deadline_s = came_s + ttft_target_s(book.params, slo_class, prompt_tokens)
        self._book = book
        self._decode: int | None = decode
        self._prefill = prefill
        self._resident = Resident(slo_class, prompt_tokens, predicted_tokens, 0.0, 0.0, False)
        self._first_token_s: float | None = None
        self._share = [0.0] * N_SHARE

    def renew(self, streamed_tokens: int, now_s: float) -> None:
        """Renew its share."""
        if self._decode is None:
            return
        first_s = now_s if self._first_token_s is None else self._first_token_s
        resident = self._resident._replace(
            streamed_tokens=float(streamed_tokens), elapsed_s=now_s - first_s, lost=first_s > self.deadline_s
        )
        self._book.renew(self._decode, resident, self._share)

    def streamed(self, tokens: int) -> None:
        """So many tokens have come by now, the first of them at the first call."""
        now_s = self._book.clock()
        if self._first_token_s is None:
            self._first_token_s = now_s
            self._book.stop_waiting(self)
        self.renew(tokens, now_s)

    def prefill_returned(self) -> None:
        """Its prefill leg is over, well or not."""
        prefill, self._prefill = self._prefill, None
        if prefill is not None:
            self._book.prefill_returned(prefill)

    def move_to(self, decode: int) -> None:
        """Another decode engine takes it over, before its first token."""
        if self._decode is not None:
            self._book.leave(self._decode, self._share)
            self._book.requests[decode] += 1.0
            self._decode = decode
            self.renew(0, self._book.clock())

    def leave(self) -> None:
        """The request is over."""
        self.prefill_returned()
        self._book.stop_waiting(self)
        decode, self._decode = self._decode, None
        if decode is not None:
            self._book.leave(decode, self._share)
