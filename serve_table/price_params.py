"""Parameters of the price: what is known of the engines and targets, and what is learned."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from serve_table.errors import ConfigError
from serve_table.slo import SloTargets, targets_from_profile
from serve_table.step_time import A40_3B, HardwareProfile, step_time_s

# Places of the fields of `PriceParams`; the step-time constants are the first five.
FLOOR_S = 0
TOKEN_S = 1
KNEE_TOKENS = 2
PREFILL_TOKEN_S = 3
CONTEXT_TOKEN_S = 4
HANDOFF_S = 5
HANDOFF_TOKEN_S = 6
N_CONSTANTS = 7
OVERHEAD_S = 7
KV_TOKENS = 8
MAX_SEQUENCES = 9
STEP_TOKENS = 10
TARGETS = 11
TARGETS_OF_A_CLASS = 3
HARM_WEIGHT = 17
TTFT_WIDTH = 18
TPOT_WIDTH = 19
REMAINING_FLOOR = 20
KV_WAIT = 21
TTFT_WEIGHT = 22
LATE_WEIGHT = 23
TPOT_WEIGHT = 24
BACKLOG_WEIGHT = 25
PREFILL_WEIGHT = 26
LOCAL_WEIGHT = 27
SHORT_STAY = 28
STEP_FACTOR = 29
TABLE_WEIGHT = 30
HOLD_S = 31
LATE_HOLD = 32
DEADLINE_SHARE = 33
RUSH = 34
ADAPT = 35

_DIVISORS = ("loose_tpot_s", "tight_tpot_s", "loose_ttft_base_s", "tight_ttft_base_s", "ttft_width", "tpot_width")
_TARGETS = targets_from_profile(A40_3B)


@dataclass(frozen=True)
class PriceParams:
    """In the order in which `serve_table.price` reads them; constants and targets of the a40-3b profile.

    harm_weight: of a resident's miss against this request's own chance. Widths: of the logistic, in shares of the
    target. remaining_floor: the least share of its predicted tokens that an answer is taken to have left. kv_wait:
    factor on the wait for KV blocks. Then weights of small terms: TTFT in targets, and again what of it is beyond the
    target, so that who is late anyway goes where it waits least; TPOT in targets, committed tokens in KV budgets,
    computing on a prefill engine and on the decode engine in TTFT targets. short_stay: how far a request that is
    predicted to be shorter than what its engine's residents have left harms them less; 0: not at all, 1: in
    proportion. step_factor: on the step time of all that are bound to an engine, of whom some have not begun to decode.
    table_weight: what the action that the table has for the request's cluster and regime is worth. Then the guard
    (`serve_table.guard`). hold_s: the longest backlog of a prefill engine that a request is sent into; 0: holds none.
    late_hold: after how many of its TTFT targets a held request that is late anyway goes first. deadline_share: how
    much of its TTFT target a held request's turn follows; 1: earliest deadline first, 0: first come, first served.
    rush: the share of the prefill time of all that was held before it that a held request reckons with: whom that
    would make late goes before those with time to spare. adapt: 1: the times of steps and hand-offs are estimated anew
    from what is seen (`serve_table.self_calibration`), and so is how long answers are (`serve_table.length_ratio`); 0:
    they stay.
    """

    step_floor_s: float = A40_3B.step.floor_s
    step_per_token_s: float = A40_3B.step.per_token_s
    step_knee_tokens: float = A40_3B.step.knee_tokens
    step_per_token_beyond_s: float = A40_3B.step.per_token_beyond_s
    step_per_context_token_s: float = A40_3B.step.per_context_token_s
    handoff_latency_s: float = A40_3B.handoff.latency_s
    handoff_per_token_s: float = A40_3B.handoff.per_token_s
    overhead_s: float = 0.0
    kv_tokens: float = float(A40_3B.kv_tokens)
    max_num_seqs: float = float(A40_3B.max_num_seqs)
    max_num_batched_tokens: float = float(A40_3B.max_num_batched_tokens)
    loose_ttft_base_s: float = _TARGETS.loose.ttft_base_s
    loose_ttft_per_prompt_token_s: float = _TARGETS.loose.ttft_per_prompt_token_s
    loose_tpot_s: float = _TARGETS.loose.tpot_s
    tight_ttft_base_s: float = _TARGETS.tight.ttft_base_s
    tight_ttft_per_prompt_token_s: float = _TARGETS.tight.ttft_per_prompt_token_s
    tight_tpot_s: float = _TARGETS.tight.tpot_s
    harm_weight: float = 0.55
    ttft_width: float = 0.06
    tpot_width: float = 0.028
    remaining_floor: float = 0.55
    kv_wait: float = 0.7
    ttft_weight: float = 0.02
    late_weight: float = 0.1
    tpot_weight: float = 0.03
    backlog_weight: float = 0.01
    prefill_weight: float = 0.015
    local_weight: float = 0.04
    short_stay: float = 0.7
    step_factor: float = 0.965
    table_weight: float = 0.0
    hold_s: float = 0.0
    late_hold: float = 20.0
    deadline_share: float = 0.0
    rush: float = 0.25
    adapt: float = 1.0

    def __post_init__(self) -> None:
        for name in ("step_floor_s", "kv_tokens", "max_num_seqs", "max_num_batched_tokens", "step_factor", *_DIVISORS):
            if getattr(self, name) <= 0.0:
                raise ConfigError(f"parameter {name!r} of policy 'price' must be greater than 0")


CONSTANT_NAMES = tuple(field.name for field in fields(PriceParams))[:N_CONSTANTS]
"""Of the times of steps and hand-offs, as metrics name them."""

LEARNED_FIELDS = tuple(field.name for field in fields(PriceParams))[HARM_WEIGHT:]
"""Of `PriceParams`: what search finds, in their order; all before them is known."""


def price_constants(profile: HardwareProfile, slo: SloTargets, overhead_s: float = 0.0) -> dict[str, float]:
    """The fields of `PriceParams` that are not learned."""
    return {
        "step_floor_s": profile.step.floor_s,
        "step_per_token_s": profile.step.per_token_s,
        "step_knee_tokens": profile.step.knee_tokens,
        "step_per_token_beyond_s": profile.step.per_token_beyond_s,
        "step_per_context_token_s": profile.step.per_context_token_s,
        "handoff_latency_s": profile.handoff.latency_s,
        "handoff_per_token_s": profile.handoff.per_token_s,
        "overhead_s": overhead_s,
        "kv_tokens": float(profile.kv_tokens),
        "max_num_seqs": float(profile.max_num_seqs),
        "max_num_batched_tokens": float(profile.max_num_batched_tokens),
        "loose_ttft_base_s": slo.loose.ttft_base_s,
        "loose_ttft_per_prompt_token_s": slo.loose.ttft_per_prompt_token_s,
        "loose_tpot_s": slo.loose.tpot_s,
        "tight_ttft_base_s": slo.tight.ttft_base_s,
        "tight_ttft_per_prompt_token_s": slo.tight.ttft_per_prompt_token_s,
        "tight_tpot_s": slo.tight.tpot_s,
    }


def with_constants(params: Sequence[float], constants: Sequence[float]) -> Sequence[float]:
    """The price's params with these constants (N_CONSTANTS,) in place of their own, unless none are given."""
    return [*constants, *params[N_CONSTANTS:]] if len(constants) > 0 else params


def tpot_target_s(params: Sequence[float], slo_class: int) -> float:
    return params[TARGETS + TARGETS_OF_A_CLASS * slo_class + 2]


def expected_step_s(params: Sequence[float], n_requests: float, context_tokens: float) -> float:
    """Time of a decode engine's step with so many requests bound to it."""
    return params[STEP_FACTOR] * step_time_s(params, n_requests, context_tokens)


def ttft_target_s(params: Sequence[float], slo_class: int, prompt_tokens: float) -> float:
    base = TARGETS + TARGETS_OF_A_CLASS * slo_class
    return params[base] + params[base + 1] * prompt_tokens
