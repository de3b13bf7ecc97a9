"""Admission: from a body to its features, its decision, and the work reserved for it."""

import asyncio
import logging
import math
from dataclasses import dataclass

from serve_table.context import RouterContext
from serve_table.endpoints import Endpoint
from serve_table.engine_caches import common_source
from serve_table.engine_response import Headers
from serve_table.errors import ConfigError, RequestError
from serve_table.fleet import Engine, Reservation
from serve_table.harm import NO_RESIDENTS, Residents
from serve_table.placement import least
from serve_table.prompt import Prompt, read_prompt
from serve_table.record import Admission, Record, action_name
from serve_table.request_body import (
    Fields,
    cache_identity,
    expressible_as_handle,
    is_taken_as_it_is,
    output_limit_tokens,
    read,
)
from serve_table.situation import LOCAL, NO_ENGINE, Decision, Draws, Fleet, Request
from serve_table.slo import SloTargets
from serve_table.tenants import tenant_of

logger = logging.getLogger("rutter")

SLO_CLASS_HEADER = b"x-rutter-slo-class"
PREDICTION_HEADER = b"x-rutter-predicted-output-tokens"


@dataclass(frozen=True)
class Hints:
    """What the operator's own headers say of a request."""

    slo_class: int
    predicted_output_tokens: float | None


def read_hints(headers: list[tuple[bytes, bytes]], default_slo_class: int) -> Hints:
    """RequestError for a value that means nothing."""
    slo_class = default_slo_class
    predicted = None
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == SLO_CLASS_HEADER:
            try:
                slo_class = SloTargets.index(text)
            except ConfigError as error:
                raise RequestError(400, f"header {SLO_CLASS_HEADER.decode()}: {error}") from error
        elif name == PREDICTION_HEADER:
            try:
                predicted = float(text)
            except ValueError:
                predicted = math.nan
            if not 0.0 < predicted < 1e9:
                raise RequestError(400, f"header {PREDICTION_HEADER.decode()}: {text!r} is not a number of tokens")
    return Hints(slo_class, predicted)


@dataclass
class Admitted:
    """A request that has its engines. prompt is kept to learn the token ratio from its answer, predicted_tokens, of its
    output by the artifact's predictor alone, to learn the length ratio; None where its answer will not tell.
    """

    prompt: Prompt
    predicted_tokens: float | None
    prefill: Engine | None
    decode: Engine
    reservation: Reservation


async def admit(
    context: RouterContext, endpoint: Endpoint, fields: Fields, hints: Hints, headers: Headers, record: Record
) -> Admitted:
    """Measure, decide and reserve, without a pause between: simultaneous requests see each other's work.

    Pauses only where the policy holds requests, and then decides once more after it.
    """
    arrival = Arrival(context, endpoint, fields, hints, record)
    if context.holding is None:
        arrival.decide(0.0, 0.0)
        return arrival.reserve()
    try:
        await context.holding.admit(arrival, tenant_of(headers, context.tenant_salt, context.config.tenant_header))
    except asyncio.CancelledError:
        # The client may leave between the moment that its engines are reserved and the one that we hear of it.
        if arrival.admitted is not None:
            arrival.admitted.reservation.release()
        raise
    return arrival.reserve()


class Arrival:
    """A request from its measured prompt to its engines. What it draws is drawn once, however often it is decided."""

    def __init__(
        self, context: RouterContext, endpoint: Endpoint, fields: Fields, hints: Hints, record: Record
    ) -> None:
        prompt = read_prompt(fields, endpoint)
        measured = context.prompts.measure(prompt, cache_identity(fields), is_taken_as_it_is(fields, endpoint))
        self._predicted_tokens, seen_tokens = _predicted_tokens(context, endpoint, fields, hints, measured.tokens)
        self.request = Request(
            prompt_tokens=measured.tokens,
            predicted_output_tokens=seen_tokens,
            slo_class=hints.slo_class,
            prefill_cached_tokens=[],
            decode_cached_tokens=[],
            remote_allowed=endpoint.remote_allowed and prompt.plain and expressible_as_handle(fields),
        )
        """As the last decision saw it."""
        self.admitted: Admitted | None = None
        self._context = context
        self._record = record
        self._prompt = prompt
        self._measured = measured
        self._chain = context.caches.chain(measured, read(fields, "model", str), read(fields, "cache_salt", str))
        self._rotation = context.next_rotation()
        self._draws = Draws(*(context.rng.random() for _ in range(4)))

    def decide(self, waited_s: float, held_ahead_tokens: float) -> None:
        """Decide from the fleet, residents and caches as they are now."""
        context = self._context
        caches, engines = context.caches, context.fleet.engines
        self.fleet = fleet = context.fleet.snapshot()
        cached = [caches.cached_tokens(engine.url, self._measured, self._chain) for engine in engines]
        n_prefill, n_decode = len(context.fleet.prefill), len(context.fleet.decode)
        whole = context.fleet.whole
        self.request = self.request._replace(
            prefill_cached_tokens=[tokens for tokens, _ in cached[:n_prefill]],
            decode_cached_tokens=[tokens for tokens, _ in cached[n_prefill:] + cached[: len(whole)]],
            waited_s=waited_s,
            held_ahead_tokens=held_ahead_tokens,
        )
        decision, residents = _decide(context, self.request, fleet, self._rotation, self._draws)
        if decision is None:
            action, self.prefill = LOCAL, NO_ENGINE
            self.decode = least(fleet.decode_requests, fleet.decode_up[:n_decode], self._rotation)
        else:
            action, self.prefill, self.decode = decision.action, decision.prefill, decision.decode
        self.residents = residents or NO_RESIDENTS
        self._record.admission = Admission(
            prompt=self._measured,
            request=self.request,
            cached_tokens_source=common_source([source for _, source in cached]),
            fleet=fleet,
            residents=residents,
            rotation=self._rotation,
            draws=self._draws,
            decision=decision,
            action=action_name(action),
            prefill_engine=context.fleet.prefill[self.prefill].url if self.prefill != NO_ENGINE else None,
            decode_engine=context.fleet.decode_candidates[self.decode].url,
        )

    def hold(self) -> None:
        """It is held from now on."""
        self._record.held = True

    def reserve(self) -> Admitted:
        """The engines of its last decision, which count its work from the first call on."""
        if self.admitted is None:
            self.admitted = self._reserved()
        return self.admitted

    def _reserved(self) -> Admitted:
        context, request = self._context, self.request
        prefill = context.fleet.prefill[self.prefill] if self.prefill != NO_ENGINE else None
        decode = context.fleet.decode_candidates[self.decode]
        tokens = request.prompt_tokens
        prefill_tokens = tokens - (request.prefill_cached_tokens[self.prefill] if prefill is not None else 0.0)
        local_tokens = tokens - request.decode_cached_tokens[self.decode]
        bound = None
        if context.residents is not None:
            bound = context.residents.bind(
                self.decode,
                self.prefill if prefill is not None else None,
                request.slo_class,
                tokens,
                request.predicted_output_tokens,
                local_tokens,
                prefill_tokens,
                request.waited_s,
            )
        reservation = Reservation(
            prefill=prefill,
            decode=decode,
            committed_tokens=float(round(tokens + request.predicted_output_tokens)),
            prefill_tokens=prefill_tokens,
            local_tokens=local_tokens,
            bound=bound,
            on_prefill_returned=context.holding.wake if context.holding is not None else None,
        )
        return Admitted(self._prompt, self._predicted_tokens, prefill, decode, reservation)


def _predicted_tokens(
    context: RouterContext, endpoint: Endpoint, fields: Fields, hints: Hints, prompt_tokens: float
) -> tuple[float | None, float]:
    """Output tokens by the predictor, and as the decision is to see them. None where a client says how many, or limits
    them to fewer: how long the answer would have been is then not known.
    """
    if hints.predicted_output_tokens is not None:
        return None, hints.predicted_output_tokens
    # Benchmarks set ignore_eos with the exact length as limit, which must not leak into the decision.
    limit = None if read(fields, "ignore_eos", bool) else output_limit_tokens(fields, endpoint)
    predicted = context.predictor.predict(prompt_tokens, None)
    seen = predicted if context.residents is None else context.residents.corrected_tokens(prompt_tokens, predicted)
    return (predicted, seen) if limit is None or seen <= limit else (None, max(float(limit), 1.0))


def _decide(
    context: RouterContext, request: Request, fleet: Fleet, rotation: int, draws: Draws
) -> tuple[Decision | None, Residents | None]:
    """The policy's decision, None, counted, where it failed: a fault there must not fail requests. And the residents
    that it saw, where the policy looks at them.
    """
    began_s = context.clock()
    policy = context.policy
    residents = None
    try:
        residents = None if context.residents is None else context.residents.seen()
        decision = policy.decide(request, fleet, rotation, context.config.explore, draws, residents or NO_RESIDENTS)
    except Exception:
        context.metrics.decision_errors.inc()
        logger.exception("policy %s failed; the request goes local to the least loaded decode engine", policy.name)
        return None, residents
    context.metrics.decision_time.observe(context.clock() - began_s)
    return decision, residents
