"""Contenders of a simulated comparison: each by name, with what is tuned of it and where its search starts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from learn.evaluate import Bench
from learn.hard_clusters import clusters_policy, clusters_space, clusters_start
from learn.policy_space import (
    Params,
    Space,
    baseline_policy,
    baseline_space,
    baseline_start,
    table_point,
    table_policy,
    table_space,
    table_warm_start,
)
from learn.search import search
from learn.simulated_training import SimulatedTraining
from learn.study import Best, StoredStudy
from learn.training import BASELINES
from serve_table.policy import Policy

RUTTER, RUTTER_LATENCY = "rutter", "rutter_latency"
JOINT: Mapping[str, str] = MappingProxyType({"goodput": RUTTER, "latency": RUTTER_LATENCY})
"""The policies that are learned for all workloads of a cluster at once, by their objective."""


@dataclass(frozen=True)
class Contender:
    """A policy to be tuned. space: empty where there is nothing to tune; policy: the one at a point of the space."""

    space: Space
    start: Sequence[Params]
    policy: Callable[[Params], Policy]


def _baseline(name: str) -> Callable[[SimulatedTraining], Contender]:
    def contender(training: SimulatedTraining) -> Contender:
        kv_tokens = training.topology.profile.kv_tokens
        return Contender(
            baseline_space(name),
            baseline_start(name),
            lambda params: baseline_policy(name, params, training.costs, kv_tokens),
        )

    return contender


def _clusters(training: SimulatedTraining) -> Contender:
    compiled = training.compiled
    return Contender(
        clusters_space(compiled), clusters_start(compiled), lambda params: clusters_policy(compiled, params)
    )


def _table(training: SimulatedTraining) -> Contender:
    compiled = training.compiled
    return Contender(
        table_space(compiled),
        table_warm_start(compiled),
        lambda params: table_policy(compiled, table_point(compiled, params)),
    )


CONTENDERS: Mapping[str, Callable[[SimulatedTraining], Contender]] = MappingProxyType(
    {**{name: _baseline(name) for name in BASELINES}, "clusters": _clusters, "table": _table}
)
"""Tuned for every workload and cluster by itself."""
REFERENCES = (*BASELINES, "clusters")
"""Of these the best one is what a learned policy is held against."""


def is_tuned(name: str) -> bool:
    """Whether a contender has anything to tune."""
    return name not in BASELINES or bool(baseline_space(name))


def tuned(
    contender: Contender, bench: Bench, study: Callable[[], StoredStudy], n_trials: int, seed: int
) -> tuple[Params, float]:
    """The best point on the training bench and its mean goodput; nothing is searched in an empty space."""

    def goodput(params: Params) -> float:
        return float(bench.goodput(contender.policy(params)).mean())

    if not contender.space:
        return {}, goodput({})
    best: Best = search(study(), contender.space, goodput, n_trials, seed=seed, warm_start=contender.start)
    return best.params, best.value
