"""What a simulated run works on: the load that arrives, what becomes of it, and the router's own state."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from learn.events import Events
from learn.residents import Bound
from serve_table.lookup import Table

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Load(NamedTuple):
    """What arrives: columns of a trace (n_requests,), with predicted output tokens and draws (n_requests, 4).

    predicted_tokens: the predictor's; once a request has come, as its decision saw them.
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    predicted_tokens: Floats
    slo_class: Ints
    chain_start: Ints
    chain_length: Ints
    draws: Floats


class Outcome(NamedTuple):
    """What happened: columns (n_requests,). prefill is -1 where local; times NaN where unanswered.

    held_s: from its coming until it was sent. features (n_requests, 7): as the decision saw them, in the order of
    `Features`; no rows where not wanted.
    """

    action: Ints
    prefill: Ints
    decode: Ints
    held_s: Floats
    first_token_s: Floats
    finish_s: Floats
    cached_tokens: Ints
    propensity: Floats
    features: Floats


class Held(NamedTuple):
    """Requests that wait in the router: the first size[0] of queue (n_requests,), in the order they came.

    uncached_tokens (n_requests,): what the best prefill engine would have computed of each when last decided. tried
    (n_requests,): 1 where it was since the engines last took more. timer_s (1,): when they are to be looked at again,
    infinity where something else has to happen first.
    """

    size: Ints
    queue: Ints
    uncached_tokens: Floats
    tried: Ints
    timer_s: Floats


def nothing_held(n_requests: int) -> Held:
    queue, tried = np.zeros((2, n_requests), np.int64)
    return Held(np.zeros(1, np.int64), queue, np.zeros(n_requests), tried, np.full(1, np.inf))


class State(NamedTuple):
    """The run's own state. next_end_s (n_engines,): infinity where idle.

    prefill_uncached and decode_uncached (n_requests,): what the router reserved for a request. bound and held: of as
    many requests where the policy is the price, else empty.
    """

    events: Events
    next_end_s: Floats
    prefill_uncached: Floats
    decode_uncached: Floats
    bound: Bound
    held: Held


class Routing(NamedTuple):
    """How the router decides. policy: a number of serve_table.decision, or FORCED with the choices in the outcome.

    overhead_s: time that each leg spends outside its engine (router and HTTP). prefill_cached (n_prefill,) and
    decode_cached (n_decode,), longer by n_prefill where elastic: scratch, since compiled functions do not allocate.
    """

    policy: int
    params: Any
    table: Table
    explore: float
    overhead_s: float
    prefill_cached: Any
    decode_cached: Any
