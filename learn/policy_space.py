"""Search spaces: what a policy may vary, and the policy that a point of its space is."""

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from learn.regimes import Regimes
from learn.table import CompiledTable, Costs
from serve_table import decision
from serve_table.artifact import Artifact
from serve_table.policy import DYNAMO_POLICIES, PlacementParams, Policy, policy
from serve_table.situation import LOCAL, REMOTE

Space = dict[str, BaseDistribution]
Params = Mapping[str, Any]

EDGE_FACTOR = 3.0


@dataclass(frozen=True)
class TablePoint:
    """The table policy at one point: actions (n_cells,), placement, and the regimes with their borders moved."""

    actions: npt.NDArray[np.uint8]
    placement: PlacementParams
    regimes: Regimes


def table_space(compiled: CompiledTable) -> Space:
    """Per cluster two borders, and the placement.

    A cluster prefills locally where the prefill pressure has reached its `from` regime and the decode pressure is
    below its `below` regime: more load on prefill engines can only speak for local, more on decode engines only
    against. All-local, all-remote and a length threshold are points of it. Scales move the regimes' borders.
    """
    n_prefill = len(compiled.regimes.prefill_edges_tokens) + 1
    n_decode = len(compiled.regimes.decode_edges_requests) + 1
    space: Space = {}
    for cluster in range(len(compiled.clusters)):
        space[f"local_from_{cluster}"] = IntDistribution(0, n_prefill)
        space[f"local_below_{cluster}"] = IntDistribution(0, n_decode)
    space["prefill_edge_scale"] = FloatDistribution(1 / EDGE_FACTOR, EDGE_FACTOR, log=True)
    space["decode_edge_scale"] = FloatDistribution(1 / EDGE_FACTOR, EDGE_FACTOR, log=True)
    space["prefill_request"] = FloatDistribution(0.0, 2.0)
    space["prefill_uncached"] = FloatDistribution(0.0, 2.0)
    space["decode_token"] = FloatDistribution(0.0, 2.0)
    space["decode_local_prefill"] = FloatDistribution(0.0, 10.0)
    space["decode_uncached"] = FloatDistribution(0.0, 4.0)
    return space


def table_point(compiled: CompiledTable, params: Params) -> TablePoint:
    """What a point of `table_space` says."""
    regimes = Regimes(
        tuple(edge * params["prefill_edge_scale"] for edge in compiled.regimes.prefill_edges_tokens),
        tuple(edge * params["decode_edge_scale"] for edge in compiled.regimes.decode_edges_requests),
    )
    n_prefill = len(regimes.prefill_edges_tokens) + 1
    n_decode = len(regimes.decode_edges_requests) + 1
    n_clusters = len(compiled.clusters)
    reached = np.arange(n_prefill) >= np.array([[params[f"local_from_{k}"]] for k in range(n_clusters)])
    below = np.arange(n_decode) < np.array([[params[f"local_below_{k}"]] for k in range(n_clusters)])
    local = reached[:, :, None] & below[:, None, :]
    placement = PlacementParams(
        prefill_request=params["prefill_request"],
        prefill_token=1.0,
        prefill_uncached=params["prefill_uncached"],
        decode_request=1.0,
        decode_token=params["decode_token"],
        decode_local_prefill=params["decode_local_prefill"],
        decode_uncached=params["decode_uncached"],
    )
    actions = np.where(local, LOCAL, REMOTE).astype(np.uint8).ravel()
    return TablePoint(actions, placement, regimes)


def table_policy(compiled: CompiledTable, point: TablePoint) -> Policy:
    """The policy of a point, as the router would have it from an artifact.

    Cells without rows keep the searched action: the simulator reaches regimes that the journal did not.
    """
    moved = replace(compiled, regimes=point.regimes)
    table = moved.decision_table(point.actions)
    params = [float(weight) for weight in astuple(point.placement)]
    return Policy("table", decision.TABLE, params, table, "searched")


def table_warm_start(compiled: CompiledTable) -> list[dict[str, Any]]:
    """All remote; all local; local for what is short to prefill; local when prefill engines are pressed."""
    n_prefill = len(compiled.regimes.prefill_edges_tokens) + 1
    n_decode = len(compiled.regimes.decode_edges_requests) + 1
    n_clusters = len(compiled.clusters)
    uncached = compiled.clusters.centres_tokens[:, 2]

    def point(local_from: list[int], local_below: list[int]) -> dict[str, Any]:
        params: dict[str, Any] = {}
        for k in range(n_clusters):
            params[f"local_from_{k}"] = local_from[k]
            params[f"local_below_{k}"] = local_below[k]
        params |= {"prefill_edge_scale": 1.0, "decode_edge_scale": 1.0, "prefill_request": 0.0}
        return params | {
            "prefill_uncached": 1.0,
            "decode_token": 0.0,
            "decode_local_prefill": 2.0,
            "decode_uncached": 1.0,
        }

    points = [
        point([n_prefill] * n_clusters, [0] * n_clusters),
        point([0] * n_clusters, [n_decode] * n_clusters),
        point([min(n_prefill - 1, 1)] * n_clusters, [n_decode] * n_clusters),
        point([n_prefill - 1] * n_clusters, [n_decode] * n_clusters),
    ]
    for threshold in sorted({float(value) for value in uncached}):
        short = uncached <= threshold
        points.append(point([0 if s else n_prefill for s in short], [n_decode if s else 0 for s in short]))
    return points


def baseline_space(name: str) -> Space:
    """What is tuned of a baseline; empty where it has nothing to tune."""
    if name in ("dynamo_style", "class_aware"):
        space: Space = {
            "mode": CategoricalDistribution(DYNAMO_POLICIES),
            "eff_isl_threshold_tokens": FloatDistribution(32.0, 8192.0, log=True),
            "eff_isl_ratio_threshold": FloatDistribution(0.05, 1.05),
            "prefill_busy_tokens": FloatDistribution(128.0, 32768.0, log=True),
            "decode_busy_requests": FloatDistribution(2.0, 128.0, log=True),
        }
        if name == "class_aware":
            space["tight_share"] = FloatDistribution(0.1, 0.9)
            space["tight_added_requests"] = FloatDistribution(0.25, 128.0, log=True)
            space["loose_added_requests"] = FloatDistribution(0.25, 128.0, log=True)
        return space
    if name == "length_threshold":
        return {
            "threshold_tokens": FloatDistribution(16.0, 2048.0, log=True),
            "long_share": FloatDistribution(0.0, 1.0),
        }
    if name == "marginal_cost":
        return {
            "kv_pressure_s": FloatDistribution(0.0, 5.0),
            "tight_multiplier": FloatDistribution(0.25, 8.0, log=True),
        }
    return {}


def baseline_start(name: str) -> list[dict[str, Any]]:
    """The published defaults of a baseline, tried first."""
    if name in ("dynamo_style", "class_aware"):
        preference = {"tight_share": 0.3, "tight_added_requests": 8.0, "loose_added_requests": 8.0}
        return [
            {
                "mode": mode,
                "eff_isl_threshold_tokens": 2048.0,
                "eff_isl_ratio_threshold": ratio,
                "prefill_busy_tokens": 4096.0,
                "decode_busy_requests": 128.0,
                **(preference if name == "class_aware" else {}),
            }
            for mode in DYNAMO_POLICIES
            for ratio in (0.7, 1.05)
        ]
    if name == "length_threshold":
        return [{"threshold_tokens": 256.0, "long_share": 0.5}]
    if name == "marginal_cost":
        return [{"kv_pressure_s": 0.5, "tight_multiplier": 2.0}]
    return []


def baseline_params(name: str, params: Params, costs: Costs, kv_tokens: int) -> dict[str, float | str]:
    """A baseline's parameters at one point; the marginal-cost router gets the fitted constants."""
    given = dict(params)
    if name == "marginal_cost":
        given |= {
            "prefill_token_s": costs.step_time.per_token_beyond_s,
            "decode_token_s": costs.step_time.per_token_s,
            "kv_tokens": float(kv_tokens),
        }
    return given


def baseline_policy(name: str, params: Params, costs: Costs, kv_tokens: int) -> Policy:
    """A baseline at one point."""
    return policy(name, baseline_params(name, params, costs, kv_tokens))


def table_start_of(compiled: CompiledTable, artifact: Artifact) -> list[dict[str, Any]]:
    """An artifact's placement, with each of the tables that are tried first; its clusters are not these ones.

    None where it weighs nothing by prefill tokens or by decode requests, which the space does by definition.
    """
    given = PlacementParams(*artifact.params())
    if given.prefill_token <= 0.0 or given.decode_request <= 0.0:
        return []
    scales = {"prefill": given.prefill_token, "decode": given.decode_request}
    weights = {name: value / scales[name.partition("_")[0]] for name, value in asdict(given).items()}
    space = table_space(compiled)
    return [within(space, point | weights) for point in table_warm_start(compiled)]


def within(space: Space, values: Params) -> dict[str, Any]:
    """The values of the space's names, moved into its ranges and onto its steps."""
    point = {}
    for name, distribution in space.items():
        value = values[name]
        if isinstance(distribution, FloatDistribution):
            if distribution.step is not None:
                steps = round((value - distribution.low) / distribution.step)
                value = distribution.low + steps * distribution.step
            value = min(max(value, distribution.low), distribution.high)
        point[name] = value
    return point
