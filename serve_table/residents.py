"""The residents as the router keeps them: each request bound to a decode engine, by the tokens it really streamed.

What the price's constants really are is told from them as they stream (`serve_table.self_calibration`), and from their
ends how far answers are from what the artifact's predictor says (`serve_table.length_ratio`).
"""

from collections.abc import Callable, Sequence

from serve_table.harm import (
    N_SHARE,
    RENEWED_AFTER_TOKENS,
    Resident,
    Residents,
    context_tokens,
    note_prefill,
    remove_share,
    renew_share,
)
from serve_table.length_ratio import corrected_tokens, new_length_sums, observe_length
from serve_table.price_params import N_CONSTANTS, ttft_target_s
from serve_table.self_calibration import (
    UNSEEN,
    Mark,
    new_self_calibration,
    observe_pull,
    observe_window,
    prefill_disturbed,
    prefill_returns,
    prefill_starts,
)

MEAN_LAG_TOKENS = RENEWED_AFTER_TOKENS / 2
"""That a streaming resident has streamed since its share was last renewed."""


class DecodeEngine:
    """What is bound to one decode engine. streaming, streaming_tokens: residents that decode, their context as last
    told. local_tokens: prefilled here so far, or bound to be; local_pending: requests that are being prefilled here.
    """

    def __init__(self) -> None:
        self.streaming = 0.0
        self.streaming_tokens = 0.0
        self.local_tokens = 0.0
        self.local_pending = 0

    def mark(self, now_s: float, tokens: int) -> Mark:
        """The engine as one of its residents has streamed so many tokens."""
        context = self.streaming_tokens + MEAN_LAG_TOKENS * self.streaming
        local_tokens = UNSEEN if self.local_pending > 0 else self.local_tokens
        return Mark(now_s, float(tokens), self.streaming, context, local_tokens)


class ResidentBook:
    """All requests in flight, per decode engine. Only the price needs one.

    params: the price's. clock: in the engines' own seconds, so divided by the dilation. The book's own `params` have
    the constants as they are estimated now: whoever acts on the same engines should act on these. elastic: after the
    decode engines come the prefill engines, for whole requests.
    """

    def __init__(
        self,
        params: Sequence[float],
        prefill_engines: int,
        decode_engines: int,
        clock: Callable[[], float],
        elastic: bool = False,
    ) -> None:
        whole_engines = prefill_engines if elastic else 0
        n_bound = decode_engines + whole_engines
        self.found = new_self_calibration(params, prefill_engines, decode_engines)
        self.params: Sequence[float] = self.found.live
        self.lengths = new_length_sums()
        self.clock = clock
        self.requests = [0.0] * n_bound
        self.engines = [DecodeEngine() for _ in range(n_bound)]
        self._n_decode = decode_engines
        self._prefill_requests = [0] * prefill_engines
        self._residents = Residents(
            0.0, [0.0] * prefill_engines, [0.0] * (n_bound * N_SHARE), (), [0.0] * whole_engines
        )
        self._waiting: dict[BoundRequest, None] = {}

    def seen(self) -> Residents:
        """What a decision sees now, a copy. Those that waited for their first token too long are lost from here on."""
        now_s = self.clock()
        late = [bound for bound in self._waiting if now_s > bound.deadline_s]
        for bound in late:
            del self._waiting[bound]
            bound.renew(0, now_s)
        residents = self._residents
        constants, prefilled = self.params[:N_CONSTANTS], residents.prefilled_tokens[:]
        return Residents(now_s, residents.prefill_since_s[:], residents.shares[:], constants, prefilled)

    def bind(
        self,
        decode: int,
        prefill: int | None,
        slo_class: int,
        prompt_tokens: float,
        predicted_tokens: float,
        decode_uncached_tokens: float | None = None,
        prefill_uncached_tokens: float | None = None,
        waited_s: float = 0.0,
    ) -> "BoundRequest":
        """Take in a request that was just decided. prefill: the engine of a remote prefill. Uncached: of the prompt, on
        either engine; None: all of it. waited_s: since it came.
        """
        now_s = self.clock()
        resident = Resident(slo_class, prompt_tokens, predicted_tokens, 0.0, 0.0, False)
        uncached_tokens = prompt_tokens if decode_uncached_tokens is None else decode_uncached_tokens
        bound = BoundRequest(self, decode, prefill, resident, uncached_tokens, now_s - waited_s)
        self.requests[decode] += 1.0
        if prefill is None:
            bound.prefills_locally()
        else:
            bound.leg_tokens = prompt_tokens if prefill_uncached_tokens is None else prefill_uncached_tokens
            self.prefill_sent(prefill, now_s)
        self._waiting[bound] = None
        bound.renew(0, now_s)
        return bound

    def corrected_tokens(self, prompt_tokens: float, predicted_tokens: float) -> float:
        """What the predictor says of a request's output, corrected by what was answered."""
        return corrected_tokens(self.params, self.lengths, prompt_tokens, predicted_tokens)

    def answered(self, prompt_tokens: float, predicted_tokens: float, output_tokens: float) -> None:
        """A request was answered at its full length. predicted_tokens: by the predictor alone."""
        observe_length(self.lengths, prompt_tokens, predicted_tokens, output_tokens)

    def renew(self, decode: int, resident: Resident, share: list[float]) -> None:
        renew_share(self.params, self._residents, decode, self.requests[decode], resident, share, 0)

    def leave(self, decode: int, share: list[float]) -> None:
        self.requests[decode] -= 1.0
        remove_share(self._residents, decode, self.requests[decode], share, 0)

    def stop_waiting(self, bound: "BoundRequest") -> None:
        self._waiting.pop(bound, None)

    def whole_on(self, decode: int) -> int | None:
        """The prefill engine, where `decode` stands for one."""
        return decode - self._n_decode if decode >= self._n_decode else None

    def prefill_sent(self, prefill: int, now_s: float) -> None:
        """A leg, or a whole request."""
        if self._prefill_requests[prefill] == 0:
            self._note_prefill(prefill, 0.0, now_s)
            prefill_starts(self.found, prefill, now_s)
        self._prefill_requests[prefill] += 1

    def prefill_returned(self, prefill: int, tokens: float, now_s: float, whole: bool = False) -> None:
        """A leg, or with `whole` the first token of a whole request."""
        self._prefill_requests[prefill] -= 1
        self._note_prefill(prefill, tokens, now_s)
        d = self._n_decode + prefill
        if whole or (d < len(self.requests) and self.requests[d] > 0.0):
            prefill_disturbed(self.found, prefill, now_s)
        else:
            prefill_returns(self.found, prefill, tokens, now_s)

    def _note_prefill(self, prefill: int, tokens: float, now_s: float) -> None:
        note_prefill(self._residents._replace(now_s=now_s), prefill, tokens, now_s)

    def pulled(self, decode: int, tokens: float, waited_s: float, mark: Mark) -> None:
        """A remote request's first token has come, so long after its prefill leg."""
        observe_pull(self.found, tokens, context_tokens(self._residents, decode), waited_s, mark)


class BoundRequest:
    """One request, from its decision until it `leave`s. Every step may be called twice."""

    def __init__(
        self,
        book: ResidentBook,
        decode: int,
        prefill: int | None,
        resident: Resident,
        uncached_tokens: float,
        came_s: float,
    ) -> None:
        self.deadline_s = came_s + ttft_target_s(book.params, resident.slo_class, resident.prompt_tokens)
        self.leg_tokens = 0.0
        self._book = book
        self._decode: int | None = decode
        self._prefill = prefill
        self._resident = resident
        self._uncached_tokens = uncached_tokens
        self._first_token_s: float | None = None
        self._returned_s: float | None = None
        self._share = [0.0] * N_SHARE
        self._mark: Mark | None = None
        self._streaming_tokens = 0.0
        self._local = False

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
        if self._decode is not None:
            self._observe(self._decode, tokens, now_s)
        self.renew(tokens, now_s)

    def _observe(self, decode: int, tokens: int, now_s: float) -> None:
        """What its window since the last call, or since its prefill leg, tells of the constants."""
        book = self._book
        engine = book.engines[decode]
        pulled = not self._local
        self._end_local_prefill()
        if book.whole_on(decode) is not None:
            # Legs come in between, which are not seen here.
            return
        if self._mark is None:
            engine.streaming += 1.0
        context = self._resident.prompt_tokens + tokens
        engine.streaming_tokens += context - self._streaming_tokens
        self._streaming_tokens = context
        mark = engine.mark(now_s, tokens)
        if self._mark is not None:
            observe_window(book.found, decode, self._mark, mark)
        elif pulled and self._returned_s is not None:
            book.pulled(decode, self._uncached_tokens, now_s - self._returned_s, mark)
        self._mark = mark

    def prefills_locally(self) -> None:
        """Its decode engine prefills it itself."""
        if self._decode is not None and self._first_token_s is None and not self._local:
            self._local = True
            engine = self._book.engines[self._decode]
            engine.local_tokens += self._uncached_tokens
            engine.local_pending += 1
            prefill = self._book.whole_on(self._decode)
            if prefill is not None:
                self._book.prefill_sent(prefill, self._book.clock())

    def _end_local_prefill(self) -> None:
        if self._local and self._decode is not None:
            self._local = False
            self._book.engines[self._decode].local_pending -= 1
            prefill = self._book.whole_on(self._decode)
            if prefill is not None:
                self._book.prefill_returned(prefill, self._uncached_tokens, self._book.clock(), whole=True)

    def prefill_returned(self) -> None:
        """Its prefill leg is over, well or not."""
        prefill, self._prefill = self._prefill, None
        if prefill is not None:
            self._returned_s = self._book.clock()
            self._book.prefill_returned(prefill, self.leg_tokens, self._returned_s)

    def move_to(self, decode: int) -> None:
        """Another decode engine takes it over, before its first token."""
        if self._decode is not None:
            local = self._local
            self._release_engine(self._decode)
            self._book.leave(self._decode, self._share)
            self._book.requests[decode] += 1.0
            self._decode = decode
            if local:
                self.prefills_locally()
            self.renew(0, self._book.clock())

    def leave(self) -> None:
        """The request is over."""
        self.prefill_returned()
        self._book.stop_waiting(self)
        if self._decode is not None:
            self._release_engine(self._decode)
        decode, self._decode = self._decode, None
        if decode is not None:
            self._book.leave(decode, self._share)

    def _release_engine(self, decode: int) -> None:
        """Take it out of what its engine streams and prefills."""
        self._end_local_prefill()
        if self._mark is not None:
            engine = self._book.engines[decode]
            engine.streaming -= 1.0
            engine.streaming_tokens = (
                engine.streaming_tokens - self._streaming_tokens if engine.streaming > 0.0 else 0.0
            )
            self._mark = None
            self._streaming_tokens = 0.0
