"""Explored journal rows without interference: real decisions, outcomes of known probability."""

import math

import msgspec
import numpy as np
from synthetic_rows import DECODE_ENGINES, PREFILL_ENGINES, journal_row

from serve_table.journal import FleetRow, Row
from serve_table.policy import Policy
from serve_table.replay import request_and_fleet
from serve_table.situation import ACTION_NAMES, LOCAL, Draws, Fleet, Request

N_PREFILL, N_DECODE = len(PREFILL_ENGINES), len(DECODE_ENGINES)


def random_fleet(rng: np.random.Generator) -> FleetRow:
    """Loads that differ between the engines, drawn anew for each request: no choice of another is in them."""
    return FleetRow(
        prefill_requests=rng.integers(0, 6, N_PREFILL).astype(float).tolist(),
        prefill_tokens=rng.integers(0, 8000, N_PREFILL).astype(float).tolist(),
        prefill_up=[1.0] * N_PREFILL,
        decode_requests=rng.integers(0, 40, N_DECODE).astype(float).tolist(),
        decode_tokens=rng.integers(0, 30_000, N_DECODE).astype(float).tolist(),
        decode_prefill_tokens=[0.0] * N_DECODE,
        decode_up=[1.0] * N_DECODE,
        prefill_cached_tokens=[0.0] * N_PREFILL,
        decode_cached_tokens=[0.0] * N_DECODE,
    )


def met_probability(request: Request, fleet: Fleet, action: int, prefill: int, decode: int) -> float:
    """Long prompts are better sent to a prefill engine, and busy engines are worse."""
    logit = 2.5 - 0.08 * fleet.decode_requests[decode]
    if action == LOCAL:
        logit += 1.0 - request.prompt_tokens / 1500.0
    else:
        logit -= 0.3 * fleet.prefill_requests[prefill]
    return 1.0 / (1.0 + math.exp(-logit))


def explored_rows(n_rows: int, seed: int, policy: Policy, explore: float = 0.3) -> list[Row]:
    """Rows of one router run whose decisions the policy really makes."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(n_rows):
        prompt = int(rng.integers(50, 4000))
        row = journal_row(
            number,
            policy=policy.name,
            policy_digest=policy.digest,
            explore=explore,
            draws=rng.random(4).tolist(),
            prompt_tokens=float(prompt),
            usage_prompt_tokens=prompt,
            output_tokens=int(rng.integers(20, 200)),
            fleet=random_fleet(rng),
        )
        rows.append(_answered(row, policy, rng))
    return rows


def _answered(row: Row, policy: Policy, rng: np.random.Generator) -> Row:
    request, fleet = request_and_fleet(row)
    found = policy.decide(request, fleet, row.rotation, row.explore, Draws(*row.draws))
    met = bool(rng.random() < met_probability(request, fleet, found.action, found.prefill, found.decode))
    action = ACTION_NAMES[found.action]
    prefill = None if found.action == LOCAL else PREFILL_ENGINES[found.prefill]
    decode = DECODE_ENGINES[found.decode]
    return msgspec.structs.replace(
        row,
        action=action,
        prefill_engine=prefill,
        decode_engine=decode,
        executed=action,
        executed_prefill_engine=prefill,
        executed_decode_engine=decode,
        propensity=found.propensity,
        slo_met=met,
        ttft_s=0.2 if met else 0.9,
    )


def true_goodput(rows: list[Row], candidate: Policy, seed: int = 0) -> float:
    """Expected goodput of the candidate on these very requests."""
    rng = np.random.default_rng(seed)
    probabilities = []
    for row in rows:
        request, fleet = request_and_fleet(row)
        found = candidate.decide(request, fleet, row.rotation, 0.0, Draws(*rng.random(4)))
        probabilities.append(met_probability(request, fleet, found.action, found.prefill, found.decode))
    return float(np.mean(probabilities))
