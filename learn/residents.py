"""Residents in the simulator: who is bound to which decode engine, and their shares, as the router keeps them."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from learn.compiled import compile_with_callees, jit
from learn.core import DECODING, NONE, Core
from learn.planned_steps import steps_begun
from serve_table import harm, price_params
from serve_table.situation import REMOTE

Ints = npt.NDArray[np.int64]

renew_share = compile_with_callees(harm.renew_share)
remove_share = compile_with_callees(harm.remove_share)
ttft_target_s = compile_with_callees(price_params.ttft_target_s)

UNSEEN = -1
"""In place of a count of tokens: the share has not been written yet."""


class Bound(NamedTuple):
    """Per decode engine a linked list of its residents: first (n_decode,); the rest (n_requests,).

    told: tokens streamed when the share was last renewed. lost: 1 where the TTFT target was missed by then. own
    (n_requests * N_SHARE,): shares. sums: as `Residents.shares`. prefill_since_s: as there.
    """

    first: Ints
    next: Ints
    previous: Ints
    told: Ints
    lost: Ints
    own: Any
    sums: Any
    prefill_since_s: Any


def new_bound(n_requests: int, n_prefill: int, n_decode: int) -> Bound:
    """Nobody is bound to any engine."""
    return Bound(
        np.full(n_decode, NONE),
        np.full(n_requests, NONE),
        np.full(n_requests, NONE),
        np.full(n_requests, UNSEEN),
        np.zeros(n_requests, np.int64),
        np.zeros(n_requests * harm.N_SHARE),
        np.zeros(n_decode * harm.N_SHARE),
        np.zeros(n_prefill),
    )


@jit
def residents_at(bound: Bound, now_s: float) -> Any:
    """What a decision sees of them."""
    return harm.Residents(now_s, bound.prefill_since_s, bound.sums)


@jit
def bind(bound: Bound, fleet: Any, i: int, chosen: Any, now_s: float) -> None:
    """Take in request i that was just decided, before `fleet` counts it."""
    if chosen.action == REMOTE and fleet.prefill_requests[chosen.prefill] == 0.0:
        bound.prefill_since_s[chosen.prefill] = now_s
    d = chosen.decode
    bound.next[i] = bound.first[d]
    if bound.first[d] != NONE:
        bound.previous[bound.first[d]] = i
    bound.first[d] = i


@jit
def unbind(bound: Bound, i: int, d: int, n_requests: float) -> None:
    """n_requests: how many are left on the engine."""
    if bound.previous[i] == NONE:
        bound.first[d] = bound.next[i]
    else:
        bound.next[bound.previous[i]] = bound.next[i]
    if bound.next[i] != NONE:
        bound.previous[bound.next[i]] = bound.previous[i]
    if bound.told[i] != UNSEEN or n_requests == 0.0:
        remove_share(residents_at(bound, 0.0), d, n_requests, bound.own, i * harm.N_SHARE)


@jit
def renew_shares(core: Core, load: Any, outcome: Any, fleet: Any, bound: Bound, params: Any, now_s: float) -> None:
    """Renew the shares that the router would have renewed by now."""
    n_prefill = len(bound.prefill_since_s)
    for d in range(len(bound.first)):
        engine = core.engines[n_prefill + d]
        steps = engine.step
        if engine.busy == 1 and engine.planned_steps > 1:
            steps += steps_begun(core, n_prefill + d, now_s) - 1
        i = bound.first[d]
        while i != NONE:
            _renew(core, load, outcome, fleet, bound, params, now_s, d, i, steps)
            i = bound.next[i]


@jit
def _renew(
    core: Core,
    load: Any,
    outcome: Any,
    fleet: Any,
    bound: Bound,
    params: Any,
    now_s: float,
    d: int,
    i: int,
    steps: int,
) -> None:
    """Renew one resident's share if it is new, streamed enough, had its first token, or lost its TTFT target."""
    sequence = core.sequences[2 * i + 1]
    streamed = sequence.generated
    if sequence.state == DECODING:
        streamed += steps - sequence.join_step
    told = bound.told[i]
    lost = bound.lost[i]
    elapsed_s = 0.0
    if streamed == 0:
        if lost == 0:
            waited_s = now_s - load.arrival_s[i]
            lost = int(waited_s > ttft_target_s(params, load.slo_class[i], float(load.prompt_tokens[i])))
        if told == 0 and lost == bound.lost[i]:
            return
    elif told > 0 and streamed - told < harm.RENEWED_AFTER_TOKENS:
        return
    else:
        elapsed_s = now_s - outcome.first_token_s[i]
        waited_s = outcome.first_token_s[i] - load.arrival_s[i]
        lost = int(waited_s > ttft_target_s(params, load.slo_class[i], float(load.prompt_tokens[i])))
    bound.told[i] = streamed
    bound.lost[i] = lost
    resident = harm.Resident(
        load.slo_class[i],
        float(load.prompt_tokens[i]),
        load.predicted_tokens[i],
        float(streamed),
        elapsed_s,
        lost == 1,
    )
    residents = residents_at(bound, now_s)
    renew_share(params, residents, d, fleet.decode_requests[d], resident, bound.own, i * harm.N_SHARE)
