"""Admission: from a body to its features, its decision, and the work reserved for it."""

import logging
import math
from dataclasses import dataclass

from serve_table.context import RouterContext
from serve_table.endpoints import Endpoint
from serve_table.engine_caches import common_source
from serve_table.errors import ConfigError, RequestError
from serve_table.fleet import Engine, Reservation
from serve_table.harm import NO_RESIDENTS, Residents
from serve_table.placement import least
from serve_table.prompt import Prompt, read_prompt
from serve_table.record import Admission, Record, action_name
from serve_table.request_body import Fields, expressible_as_handle, is_taken_as_it_is, output_limit_tokens, read
from serve_table.situation import LOCAL, NO_ENGINE, Decision, Draws, Fleet, Request
from serve_table.slo import SloTargets

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
    """A request that has its engines. prompt is kept to learn the token ratio from its answer."""

    prompt: Prompt
    prefill: Engine | None
    decode: Engine
    reservation: Reservation


def admit(context: RouterContext, endpoint: Endpoint, fields: Fields, hints: Hints, record: Record) -> Admitted:
    """Measure, decide and reserve, without a pause between: simultaneous requests see each other's work."""
    prompt = read_prompt(fields, endpoint)
    identity = b"\0".join(bytes(fields.get(name, b"")) for name in ("model", "cache_salt"))
    measured = context.prompts.measure(prompt, identity, is_taken_as_it_is(fields, endpoint))
    fleet = context.fleet.snapshot()
    chain = context.caches.chain(measured, read(fields, "model", str), read(fields, "cache_salt", str))
    cached = [context.caches.cached_tokens(engine.url, measured, chain) for engine in context.fleet.engines]
    n_prefill = len(context.fleet.prefill)
    request = Request(
        prompt_tokens=measured.tokens,
        predicted_output_tokens=_predicted_tokens(context, endpoint, fields, hints, measured.tokens),
        slo_class=hints.slo_class,
        prefill_cached_tokens=[tokens for tokens, _ in cached[:n_prefill]],
        decode_cached_tokens=[tokens for tokens, _ in cached[n_prefill:]],
        remote_allowed=endpoint.remote_allowed and prompt.plain and expressible_as_handle(fields),
    )
    rotation = context.next_rotation()
    draws = Draws(*(context.rng.random() for _ in range(4)))
    decision, residents = _decide(context, request, fleet, rotation, draws)
    if decision is None:
        action, prefill_index, decode_index = LOCAL, NO_ENGINE, least(fleet.decode_requests, fleet.decode_up, rotation)
    else:
        action, prefill_index, decode_index = decision.action, decision.prefill, decision.decode
    prefill = context.fleet.prefill[prefill_index] if prefill_index != NO_ENGINE else None
    decode = context.fleet.decode[decode_index]
    record.admission = Admission(
        prompt=measured,
        request=request,
        cached_tokens_source=common_source([source for _, source in cached]),
        fleet=fleet,
        residents=residents,
        rotation=rotation,
        draws=draws,
        decision=decision,
        action=action_name(action),
        prefill_engine=prefill.url if prefill is not None else None,
        decode_engine=decode.url,
    )
    bound = None
    if context.residents is not None:
        bound = context.residents.bind(
            decode_index,
            prefill_index if prefill is not None else None,
            request.slo_class,
            request.prompt_tokens,
            request.predicted_output_tokens,
            request.prompt_tokens - request.decode_cached_tokens[decode_index],
            request.prompt_tokens - (request.prefill_cached_tokens[prefill_index] if prefill is not None else 0.0),
        )
    reservation = Reservation(
        prefill=prefill,
        decode=decode,
        committed_tokens=float(round(request.prompt_tokens + request.predicted_output_tokens)),
        prefill_tokens=measured.tokens - (request.prefill_cached_tokens[prefill_index] if prefill is not None else 0.0),
        local_tokens=measured.tokens - request.decode_cached_tokens[decode_index],
        bound=bound,
    )
    return Admitted(prompt, prefill, decode, reservation)


def _predicted_tokens(
    context: RouterContext, endpoint: Endpoint, fields: Fields, hints: Hints, prompt_tokens: float
) -> float:
    if hints.predicted_output_tokens is not None:
        return hints.predicted_output_tokens
    # Benchmarks set ignore_eos with the exact length as limit, which must not leak into the decision.
    limit = None if read(fields, "ignore_eos", bool) else output_limit_tokens(fields, endpoint)
    return context.predictor.predict(prompt_tokens, limit)


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
