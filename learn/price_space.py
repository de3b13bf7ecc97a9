"""The price's search space: what may vary of it, what is tried first, and the policy that a point is."""

from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from optuna.distributions import FloatDistribution

from learn.policy_space import Params, Space, within
from learn.simulation import Topology
from serve_table.artifact import Artifact
from serve_table.lookup import Table
from serve_table.policy import Policy, policy
from serve_table.price_params import PriceParams, price_constants
from serve_table.slo import SloTargets

SMALL_TERMS = ("ttft_weight", "tpot_weight", "backlog_weight", "prefill_weight", "local_weight")
"""Of the price, beside the chances of meeting targets."""
WIDE_TERMS = 1.0
"""The most that they may weigh where the space is wide."""
QUICK: Params = MappingProxyType(
    {
        "harm_weight": 3.7,
        "ttft_width": 0.046,
        "tpot_width": 0.18,
        "remaining_floor": 0.15,
        "kv_wait": 0.35,
        "ttft_weight": 0.6,
        "late_weight": 0.09,
        "tpot_weight": 0.75,
        "backlog_weight": 0.76,
        "prefill_weight": 0.7,
        "local_weight": 0.22,
        "short_stay": 0.77,
        "step_factor": 1.05,
        "hold_s": 0.0075,
        "late_hold": 3.9,
        "deadline_share": 0.47,
        "rush": 0.93,
    }
)
"""What a search for latency found on Azure code's training traces: much of every time counts, whether it meets its
target or not, which no small change of a price for targets leads to."""


def price_space(objective: str = "goodput", wide: bool = False) -> Space:
    """What is learned of the price. wide: small terms may outweigh the chances, as they always may for latency.

    For latency no table is favoured: one learned on some windows of a trace was worse than none on others.
    """
    space: Space = {
        "harm_weight": FloatDistribution(0.1, 4.0, log=True),
        "ttft_width": FloatDistribution(0.02, 0.5, log=True),
        "tpot_width": FloatDistribution(0.01, 0.2, log=True),
        "remaining_floor": FloatDistribution(0.02, 1.0, log=True),
        "kv_wait": FloatDistribution(0.1, 3.0, log=True),
        "ttft_weight": FloatDistribution(0.0, 0.2),
        "late_weight": FloatDistribution(0.0, 1.0),
        "tpot_weight": FloatDistribution(0.0, 0.2),
        "backlog_weight": FloatDistribution(0.0, 0.2),
        "prefill_weight": FloatDistribution(0.0, 0.2),
        "local_weight": FloatDistribution(0.0, 0.2),
        "short_stay": FloatDistribution(0.0, 1.0),
        "step_factor": FloatDistribution(0.7, 1.1),
        # In steps, so that the search can come back to exactly 0, which switches each off.
        "table_weight": FloatDistribution(0.0, 0.3, step=0.01),
        "hold_s": FloatDistribution(0.0, 0.05, step=0.0025),
        "late_hold": FloatDistribution(1.0, 30.0, log=True),
        "deadline_share": FloatDistribution(0.0, 1.0),
        "rush": FloatDistribution(0.0, 1.5),
    }
    if wide or objective == "latency":
        space |= {name: FloatDistribution(0.0, WIDE_TERMS) for name in SMALL_TERMS}
    if objective == "latency":
        del space["table_weight"]
    return space


def price_start(objective: str = "goodput", wide: bool = False) -> list[dict[str, Any]]:
    """Tried first: the defaults, which hold nothing and favour no table; the same without the harm to others, with
    sharper and wider probabilities, with requests held, and with the table favoured or, in a wide space, what was quick
    before.
    """
    start = asdict(PriceParams())
    others: tuple[dict[str, float], ...] = (
        {"harm_weight": 0.1},
        {"tpot_width": 0.015, "ttft_width": 0.03},
        {"tpot_width": 0.06, "ttft_width": 0.12},
        {"harm_weight": 1.5, "step_factor": 1.0},
        {"hold_s": 0.01},
        {"hold_s": 0.01, "rush": 0.5},
        dict(QUICK) if wide or objective == "latency" else {"table_weight": 0.05},
    )
    space = price_space(objective, wide)
    return [within(space, start), *(within(space, start | other) for other in others)]


def price_policy(params: Params, topology: Topology, slo: SloTargets, table: Table | None = None) -> Policy:
    """The price at one point, with the constants of a cluster and its targets, and the table that it may favour."""
    found = policy("price", {**price_constants(topology.profile, slo, topology.overhead_s), **params})
    return found if table is None else replace(found, table=table)


def price_start_of(artifact: Artifact, objective: str) -> list[dict[str, Any]]:
    """An artifact's price as a point of the objective's space."""
    return [within(price_space(objective), asdict(artifact.price()))]
