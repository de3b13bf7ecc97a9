"""DolphinRouting (arXiv 2610.40292): one searched action a cluster, whatever the load; least-loaded placement."""

from dataclasses import astuple, replace

import numpy as np
from optuna.distributions import CategoricalDistribution

from learn.policy_space import Params, Space
from learn.regimes import Regimes
from learn.table import CompiledTable
from serve_table import decision
from serve_table.policy import PlacementParams, Policy
from serve_table.situation import TABLE_ACTION_NAMES

LEAST_LOADED = PlacementParams(
    prefill_request=1.0,
    prefill_token=0.0,
    prefill_uncached=0.0,
    decode_request=1.0,
    decode_token=0.0,
    decode_local_prefill=0.0,
    decode_uncached=0.0,
)


def clusters_space(compiled: CompiledTable) -> Space:
    """The action of each cluster."""
    return {f"action_{k}": CategoricalDistribution(TABLE_ACTION_NAMES) for k in range(len(compiled.clusters))}


def clusters_start(compiled: CompiledTable) -> list[Params]:
    """All remote; local for what has at most so many uncached tokens, from none to all clusters."""
    uncached = compiled.clusters.centres_tokens[:, 2]
    thresholds = [-1.0, *sorted({float(value) for value in uncached})]
    return [
        {f"action_{k}": "local" if tokens <= threshold else "remote" for k, tokens in enumerate(uncached.tolist())}
        for threshold in thresholds
    ]


def clusters_policy(compiled: CompiledTable, params: Params) -> Policy:
    """The policy of a point: the table's look-up with a single regime."""
    actions = np.array(
        [TABLE_ACTION_NAMES.index(params[f"action_{k}"]) for k in range(len(compiled.clusters))], np.uint8
    )
    table = replace(compiled, regimes=Regimes((), ())).decision_table(actions)
    return Policy("clusters", decision.TABLE, list(astuple(LEAST_LOADED)), table, "searched")
