"""Residents in the simulator: who is bound to which decode engine, and their shares, as the router keeps them."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from learn.compiled import compile_with_callees, jit
from learn.core import DECODING, NONE, Core
from learn.planned_steps import end_of_steps_s, steps_begun
from serve_table import harm, length_ratio, price_params, self_calibration
from serve_table.self_calibration import Mark, SelfCalibration
from serve_table.situation import REMOTE, WHOLE

Ints = npt.NDArray[np.int64]

renew_share = compile_with_callees(harm.renew_share)
note_prefill = compile_with_callees(harm.note_prefill)
remove_share = compile_with_callees(harm.remove_share)
ttft_target_s = compile_with_callees(price_params.ttft_target_s)
observe_window = compile_with_callees(self_calibration.observe_window)
observe_pull = compile_with_callees(self_calibration.observe_pull)
prefill_disturbed = compile_with_callees(self_calibration.prefill_disturbed)
prefill_starts = compile_with_callees(self_calibration.prefill_starts)
prefill_returns = compile_with_callees(self_calibration.prefill_returns)
corrected_tokens = compile_with_callees(length_ratio.corrected_tokens)
observe_length = compile_with_callees(length_ratio.observe_length)

N_MARK = len(Mark._fields)

UNSEEN_TOKENS = self_calibration.UNSEEN
UNSEEN = -1
"""In place of a count of tokens: the share has not been written yet."""


class Bound(NamedTuple):
    """Per decode engine a linked list of its residents: first (n_decode,); the rest (n_requests,). Where elastic, the
    prefill engines come after the decode engines.

    told: tokens streamed when the share was last renewed. lost: 1 where the TTFT target was missed by then. own
    (n_requests * N_SHARE,): shares. sums: as `Residents.shares`. prefill_since_s, prefilled_tokens: as there. marks
    (n_requests * N_MARK,): the engine when the share was last renewed. uncached_tokens (n_requests,): of the prompt, on
    its decode engine. local_tokens (n_decode,): prefilled there so far, or bound to be. returned_s (n_requests,): when
    its prefill leg was. found: what is told of the constants from all that. predicted_tokens (n_requests,): output, by
    the predictor alone; lengths: what answers tell of it.
    """

    first: Ints
    next: Ints
    previous: Ints
    told: Ints
    lost: Ints
    own: Any
    sums: Any
    prefill_since_s: Any
    prefilled_tokens: Any
    marks: Any
    uncached_tokens: Any
    local_tokens: Any
    returned_s: Any
    found: SelfCalibration
    predicted_tokens: Any
    lengths: Any


def new_bound(n_requests: int, n_prefill: int, n_decode: int, params: Any, whole_engines: int = 0) -> Bound:
    """Nobody is bound to any engine. params: the price's, of which the constants will be estimated in place.
    whole_engines: as in `Fleet`.
    """
    n_bound = n_decode + whole_engines
    return Bound(
        np.full(n_bound, NONE),
        np.full(n_requests, NONE),
        np.full(n_requests, NONE),
        np.full(n_requests, UNSEEN),
        np.zeros(n_requests, np.int64),
        np.zeros(n_requests * harm.N_SHARE),
        np.zeros(n_bound * harm.N_SHARE),
        np.zeros(n_prefill),
        np.zeros(whole_engines),
        np.zeros(n_requests * N_MARK),
        np.zeros(n_requests),
        np.zeros(n_bound),
        np.zeros(n_requests),
        _as_arrays(self_calibration.new_self_calibration(params, n_prefill, n_decode), params),
        np.zeros(n_requests),
        np.array(length_ratio.new_length_sums()),
    )


def _as_arrays(found: SelfCalibration, params: Any) -> SelfCalibration:
    """The same with `params` themselves as the live ones."""
    rest: list[Any] = [np.array(column, np.float64) for column in found[1:]]
    return SelfCalibration(params, *rest)


@jit
def residents_at(bound: Bound, now_s: float) -> Any:
    """What a decision sees of them."""
    return harm.Residents(now_s, bound.prefill_since_s, bound.sums, (), bound.prefilled_tokens)


@jit
def bind(bound: Bound, fleet: Any, i: int, chosen: Any, uncached_tokens: float, now_s: float) -> None:
    """Take in request i that was just decided, before `fleet` counts it. uncached_tokens: on its decode engine."""
    d = chosen.decode
    bound.uncached_tokens[i] = uncached_tokens
    p = chosen.prefill
    if chosen.action == WHOLE:
        p = d - len(bound.found.sampled_s)
    if chosen.action != REMOTE:
        bound.local_tokens[d] += uncached_tokens
    if p != NONE and fleet.prefill_requests[p] == 0.0 and fleet.prefill_tokens[p] == 0.0:
        note_prefill(residents_at(bound, now_s), p, 0.0, now_s)
        prefill_starts(bound.found, p, now_s)
    bound.next[i] = bound.first[d]
    if bound.first[d] != NONE:
        bound.previous[bound.first[d]] = i
    bound.first[d] = i


@jit
def expected_tokens(bound: Bound, i: int, prompt_tokens: float, predicted_tokens: float) -> float:
    """Output tokens of request i, which comes now, as its decision is to see them."""
    bound.predicted_tokens[i] = predicted_tokens
    return corrected_tokens(bound.found.live, bound.lengths, prompt_tokens, predicted_tokens)


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
def whole_prefilled(bound: Bound, p: int, tokens: float, now_s: float) -> None:
    """A prefill engine that serves whole requests too has prefilled one, or a leg."""
    note_prefill(residents_at(bound, now_s), p, tokens, now_s)
    prefill_disturbed(bound.found, p, now_s)


@jit
def leg_returned(bound: Bound, i: int, p: int, tokens: float, now_s: float) -> None:
    """The prefill leg of request i, of so many uncached tokens, is over."""
    bound.returned_s[i] = now_s
    d = len(bound.found.sampled_s) + p
    if d < len(bound.first) and bound.first[d] != NONE:
        whole_prefilled(bound, p, tokens, now_s)
        return
    note_prefill(residents_at(bound, now_s), p, tokens, now_s)
    prefill_returns(bound.found, p, tokens, now_s)


@jit
def renew_shares(core: Core, load: Any, outcome: Any, fleet: Any, bound: Bound, params: Any, now_s: float) -> None:
    """Renew the shares that the router would have renewed by now."""
    n_prefill = len(bound.prefill_since_s)
    for d in range(len(bound.first)):
        e = n_prefill + d
        if e >= len(core.engines):
            e -= len(core.engines)
        engine = core.engines[e]
        steps = 0
        token_s = engine.step_start_s
        if engine.busy == 1 and engine.planned_steps > 1:
            steps = steps_begun(core, e, now_s) - 1
            if steps > 0:
                token_s = end_of_steps_s(core, e, steps)
        seen = Mark(
            token_s,
            float(engine.step + steps),
            float(engine.decoding),
            float(engine.context_tokens + steps * engine.decoding),
            bound.local_tokens[d] if fleet.decode_prefill_tokens[d] == 0.0 else UNSEEN_TOKENS,
        )
        i = bound.first[d]
        while i != NONE:
            _renew(core, load, outcome, fleet, bound, params, now_s, d, i, seen)
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
    seen: Mark,
) -> None:
    """Renew one resident's share if it is new, streamed enough, had its first token, or lost its TTFT target.

    seen: its engine, with the number of its last step that is over in place of tokens.
    """
    sequence = core.sequences[2 * i + 1]
    streamed = sequence.generated
    if sequence.state == DECODING:
        streamed += int(seen.tokens) - sequence.join_step
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
        _observe(bound, outcome, d, i, float(streamed), told > 0, seen)
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


@jit
def _observe(bound: Bound, outcome: Any, d: int, i: int, streamed: float, told: bool, seen: Mark) -> None:
    """What the window of request i since its last renewal, or its first token, tells of the constants; that of a whole
    one on a prefill engine, between legs, nothing.
    """
    if d >= len(bound.found.sampled_s):
        return
    at = i * N_MARK
    marks = bound.marks
    now = Mark(seen.time_s, streamed, seen.requests, seen.context_tokens, seen.local_tokens)
    if told:
        begin = Mark(marks[at], marks[at + 1], marks[at + 2], marks[at + 3], marks[at + 4])
        observe_window(bound.found, d, begin, now)
    elif outcome.action[i] == REMOTE:
        bound_tokens = bound.sums[d * harm.N_SHARE + harm.CONTEXT]
        waited_s = outcome.first_token_s[i] - bound.returned_s[i]
        observe_pull(bound.found, bound.uncached_tokens[i], bound_tokens, waited_s, now)
    marks[at] = now.time_s
    marks[at + 1] = now.tokens
    marks[at + 2] = now.requests
    marks[at + 3] = now.context_tokens
    marks[at + 4] = now.local_tokens
