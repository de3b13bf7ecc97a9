"""The situation of a decision: what is known of the request and of the fleet, and what comes out.

Sequences are indexed by engine: prefill engines (n_prefill,), decode engines (n_decode,). The records are named
tuples, which numba compiles; online they hold lists, in the simulator arrays.
"""

from collections.abc import Sequence
from typing import NamedTuple

LOCAL = 0
REMOTE = 1
WHOLE = 2
"""On a prefill engine that may also decode: only in an elastic fleet, and only by the price."""
ACTION_NAMES = ("local", "remote", "whole")
TABLE_ACTION_NAMES = ACTION_NAMES[:WHOLE]
"""Those that a table may hold."""

NO_ENGINE = -1
"""Inside decisions only: no engine of that pool; records and rows say None."""

REASON_POLICY = 0
REASON_EXPLORED = 1
REASON_NO_PREFILL_ENGINE = 2
REASON_UNSUPPORTED_REMOTE = 3
REASON_NAMES = ("policy", "explored", "no_prefill_engine", "unsupported_remote")


class Request(NamedTuple):
    """What is known of one request when it arrives.

    prefill_cached_tokens (n_prefill,) and decode_cached_tokens (n_decode,): tokens of its prompt that each
    engine is believed to hold. remote_allowed: False where a KV handle cannot express the request. waited_s: since
    it came, where it was held; held_ahead_tokens: uncached prompt tokens of held requests that will go before it.
    """

    prompt_tokens: float
    predicted_output_tokens: float
    slo_class: int
    prefill_cached_tokens: Sequence[float]
    decode_cached_tokens: Sequence[float]
    remote_allowed: bool
    waited_s: float = 0.0
    held_ahead_tokens: float = 0.0


class Fleet(NamedTuple):
    """Work in flight through this router, per engine; `up` is 1.0 where the engine may get work.

    prefill_tokens: uncached prompt tokens whose remote prefill has not returned. decode_tokens: prompt and
    predicted output tokens of the requests bound to a decode engine. decode_prefill_tokens: uncached prompt
    tokens being prefilled locally, until their first token.

    Elastic: the last `whole_engines` entries of the decode columns are the prefill engines (all of them) as they serve
    whole requests. What those have to prefill is then in prefill_tokens and at the end of decode_prefill_tokens alike.
    """

    prefill_requests: Sequence[float]
    prefill_tokens: Sequence[float]
    prefill_up: Sequence[float]
    decode_requests: Sequence[float]
    decode_tokens: Sequence[float]
    decode_prefill_tokens: Sequence[float]
    decode_up: Sequence[float]
    whole_engines: int = 0


class Features(NamedTuple):
    """The features as the decision sees them; tokens, and per-engine means for the two pressures."""

    prompt_tokens: float
    uncached_prefill_tokens: float
    uncached_decode_tokens: float
    predicted_output_tokens: float
    slo_class: int
    prefill_pressure_tokens: float
    decode_pressure_requests: float


class Draws(NamedTuple):
    """Uniform draws in [0, 1), made by the caller: whether to explore, then action and engines."""

    explore: float
    action: float
    prefill: float
    decode: float


class Decision(NamedTuple):
    """prefill is NO_ENGINE unless remote; decode of a whole request is n_decode + its prefill engine. cluster and
    regime are NO_ENGINE unless the policy is TABLE or PRICE.
    """

    action: int
    prefill: int
    decode: int
    cluster: int
    regime: int
    propensity: float
    reason: int


def n_decode_engines(fleet: Fleet) -> int:
    """Without the prefill engines of an elastic fleet."""
    return len(fleet.decode_up) - fleet.whole_engines


def features_of(request: Request, fleet: Fleet) -> Features:
    """Cache-adjusted lengths on the best live engine of each pool, and the pools' mean pressure."""
    cached = 0.0
    pressure = 0.0
    n_up = 0
    for i in range(len(fleet.prefill_up)):
        if fleet.prefill_up[i] > 0.0:
            n_up += 1
            pressure += fleet.prefill_tokens[i]
            if request.prefill_cached_tokens[i] > cached:
                cached = request.prefill_cached_tokens[i]
    uncached_prefill = max(request.prompt_tokens - cached, 0.0)
    prefill_pressure = pressure / n_up if n_up > 0 else 0.0
    cached = 0.0
    pressure = 0.0
    n_up = 0
    for i in range(n_decode_engines(fleet)):
        if fleet.decode_up[i] > 0.0:
            n_up += 1
            pressure += fleet.decode_requests[i]
            if request.decode_cached_tokens[i] > cached:
                cached = request.decode_cached_tokens[i]
    return Features(
        request.prompt_tokens,
        uncached_prefill,
        max(request.prompt_tokens - cached, 0.0),
        request.predicted_output_tokens,
        request.slo_class,
        prefill_pressure,
        pressure / n_up if n_up > 0 else 0.0,
    )
