"""Small random traces and policies for the simulator's tests."""

from dataclasses import replace

import numpy as np
from engine_cases import SMALL

from learn.simulation import Topology
from learn.trace import Trace
from serve_table.decision import TABLE
from serve_table.lookup import Table
from serve_table.policy import POLICIES, Policy, policy
from serve_table.slo import targets_from_profile

SMALL_SLO = targets_from_profile(SMALL)
SMALL_TOPOLOGY = Topology(2, 3, replace(SMALL, kv_tokens=240), overhead_s=0.00131)


def random_trace(seed: int, n: int = 60, requests_per_s: float = 40.0, hash_block_tokens: int = 8) -> Trace:
    """Short prompts and answers that overload the SMALL profile at times; half of them share prefixes."""
    rng = np.random.default_rng(seed)
    prompt = np.minimum(1 + rng.exponential(35.0, n), 110).astype(np.int64)
    output = np.minimum(1 + rng.exponential(12.0, n), 50).astype(np.int64)
    family = rng.integers(0, 4, n)
    shared = np.where(rng.random(n) < 0.5, prompt // hash_block_tokens, 0)
    block_ids = np.arange(4 * 20, dtype=np.int64)
    return Trace(
        name=f"random {seed}",
        arrival_s=np.cumsum(rng.exponential(1.0 / requests_per_s, n)),
        prompt_tokens=prompt,
        output_tokens=output,
        slo_class=rng.integers(0, 2, n),
        chain_start=family * 20,
        chain_length=np.minimum(shared, rng.integers(0, 14, n)),
        block_ids=block_ids,
        hash_block_tokens=hash_block_tokens,
    )


def some_table() -> Table:
    """Two clusters by prompt length, remote for long prompts only while little prefill is pending."""
    return Table(
        grid_scale=[1.0, 1.0, 1.0, 1.0],
        grid_bins=[5, 1, 1, 1],
        clusters=bytes([0, 0, 0, 0, 1] * 2),
        actions=bytes([0, 0, 1, 0]),
        prefill_edges_tokens=(60.0,),
        decode_edges_requests=(),
    )


def every_policy() -> list[Policy]:
    """All the policies, the table with a table of its own, Dynamo's with a threshold that these traces cross."""
    policies = [policy(name) for name in POLICIES if name not in ("table", "rutter", "dynamo_style")]
    policies.append(policy("dynamo_style", {"eff_isl_threshold_tokens": 40, "eff_isl_ratio_threshold": 0.9}))
    policies.append(Policy("table", TABLE, [0.1, 1.0, 1.0, 1.0, 0.2, 2.0, 1.0], some_table(), "test"))
    return policies
