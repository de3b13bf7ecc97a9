"""The search for policies: every baseline tuned, then the table and the price paired with the best of them."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from learn.evaluate import Bench
from learn.pareto import FrontPoint, front_of
from learn.policy_space import (
    Params,
    Space,
    TablePoint,
    baseline_policy,
    baseline_space,
    baseline_start,
    table_point,
    table_policy,
    table_space,
    table_start_of,
    table_warm_start,
)
from learn.price_space import price_policy, price_space, price_start, price_start_of
from learn.rating import References, ratings
from learn.search import search
from learn.study import Best, StoredStudy, spent_s
from learn.training import BASELINES, Learned
from learn.trials import Objective, Rating
from serve_table.artifact import Artifact
from serve_table.artifact_metadata import LearnedForm
from serve_table.policy import Policy

LATENCY_REFERENCE = "dynamo_style"

Step = Callable[[str, int], Callable[[int, float], None]]
"""Begins a step of so many trials and returns what to tell of each: trials so far and the best value."""


@dataclass(frozen=True)
class SearchPlan:
    """How policies are searched. trials: of each search; limit_s: of all together. objective: of the learned policies,
    by its name in `learn.objective`. start: an artifact whose price and placement are tried first.
    """

    trials: int
    seed: int
    jobs: int = 1
    objective: str = "goodput"
    limit_s: float = math.inf
    start: Artifact | None = None


@dataclass(frozen=True)
class Searched:
    """The best table and price, paired with the baseline `reference`, the front of the price, and every baseline at its
    tuned parameters. training_goodput: mean over the training traces, of all.
    """

    table: TablePoint
    table_best: Best
    price_best: Best
    front: tuple[FrontPoint, ...]
    baselines: dict[str, Params]
    reference: str
    training_goodput: dict[str, float]

    @property
    def price(self) -> Params:
        return self.price_best.params

    @property
    def form(self) -> LearnedForm:
        """The better one of the two learned policies, by the objective of the search."""
        return "price" if self.price_best.value > self.table_best.value else "table"


@dataclass
class _Searches:
    """Searches one after the other, each with an equal share of the time that those before it have left."""

    study: Callable[[str], StoredStudy]
    plan: SearchPlan
    step: Step
    left: int
    left_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.left_s = self.plan.limit_s

    def best(
        self, name: str, what: str, space: Space, objective: Objective, start: list[dict[str, object]]
    ) -> tuple[Best, StoredStudy]:
        stored = self.study(name)
        plan = self.plan
        best = search(
            stored,
            space,
            objective,
            plan.trials,
            seed=plan.seed,
            jobs=plan.jobs,
            warm_start=start,
            on_trial=self.step(what, plan.trials),
            limit_s=max(self.left_s, 0.0) / self.left,
        )
        self.left_s -= spent_s(stored.trials())
        self.left -= 1
        return best, stored


@dataclass(frozen=True)
class _Tuned:
    """Baselines at their tuned parameters."""

    params: dict[str, Params]
    goodput: dict[str, float]
    policies: dict[str, Policy]

    @property
    def best(self) -> str:
        return max(self.goodput, key=lambda name: self.goodput[name])


def search_policies(
    bench: Bench, learned: Learned, study: Callable[[str], StoredStudy], plan: SearchPlan, step: Step
) -> Searched:
    """Tune every baseline for its mean goodput; then search the table's actions, placement and regime borders, and the
    price's weights with that table, both for the plan's objective. Each with the same budget. study: of a search's
    name, which for the learned policies says what they are compared with.
    """
    searches = _Searches(study, plan, step, 2 + sum(bool(baseline_space(name)) for name in BASELINES))
    tuned = _tuned_baselines(bench, learned, searches)
    references = References(bench.runs(tuned.policies[tuned.best]), bench.runs(tuned.policies[LATENCY_REFERENCE]))
    compared = [plan.objective, *(tuned.policies[name].digest for name in (tuned.best, LATENCY_REFERENCE))]
    compiled = learned.compiled

    def rated(policy: Policy) -> Iterator[Rating]:
        return ratings(policy, bench, references, plan.objective)

    table_best, _ = searches.best(
        f"table {_digest(compared)}",
        "search the table",
        table_space(compiled),
        lambda params: rated(table_policy(compiled, table_point(compiled, params))),
        [*(table_start_of(compiled, plan.start) if plan.start else []), *table_warm_start(compiled)],
    )
    point = table_point(compiled, table_best.params)
    table = table_policy(compiled, point).table
    price_best, stored = searches.best(
        f"price {_digest([*compared, table_best.params])}",
        "search the price",
        price_space(plan.objective),
        lambda params: rated(price_policy(params, bench.topology, bench.slo, table)),
        [*(price_start_of(plan.start, plan.objective) if plan.start else []), *price_start(plan.objective)],
    )
    learned_goodput = {"table": table_best.figures["goodput"], "price": price_best.figures["goodput"]}
    return Searched(
        table=point,
        table_best=table_best,
        price_best=price_best,
        front=tuple(front_of(stored.trials())),
        baselines=tuned.params,
        reference=tuned.best,
        training_goodput=learned_goodput | tuned.goodput,
    )


def _tuned_baselines(bench: Bench, learned: Learned, searches: _Searches) -> _Tuned:
    """Each for its own mean goodput, all traces at every point."""
    costs, kv_tokens = learned.cost_fit.costs, bench.topology.profile.kv_tokens
    tuned = _Tuned({}, {}, {})
    for name in BASELINES:

        def goodput(params: Params, name: str = name) -> float:
            return float(bench.goodput(baseline_policy(name, params, costs, kv_tokens)).mean())

        space = baseline_space(name)
        if space:
            best, _ = searches.best(name, f"tune {name}", space, goodput, baseline_start(name))
            tuned.params[name], tuned.goodput[name] = best.params, best.value
        else:
            tuned.params[name], tuned.goodput[name] = {}, goodput({})
        tuned.policies[name] = baseline_policy(name, tuned.params[name], costs, kv_tokens)
    return tuned


def _digest(parts: Sequence[object]) -> str:
    """Values against other references, or of a price with another table, are not to be mixed in one study."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]
