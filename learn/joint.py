"""One price for several workloads: every point of the search is judged on all of them, against each one's baselines.

A point that is far behind the best so far after some of the traces is not run on the others; its value is then the
best's with the difference so far, which leaves it behind. What is compared is the same traces at any time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

import numpy as np

from learn.evaluate import Bench, mean_percentile
from learn.neighbours import neighbour
from learn.objective import latency_gain, tail_excess
from learn.policy_space import Params, Space, table_point, table_policy, table_space, table_warm_start, within
from learn.price_space import price_policy, price_space, price_start
from learn.search import search
from learn.simulation import Simulated
from learn.study import Best, StoredStudy, best_of, count_complete
from learn.table import CompiledTable
from serve_table.lookup import Table
from serve_table.policy import Policy
from serve_table.price_params import PriceParams

WORST_WEIGHT = 1.0
"""Of the worst workload beside the mean of all, so that none pays for the others."""
TAIL_COST = 0.5
"""Goodput that a doubled P99 TTFT costs beyond the objective's limit, of the workload where it is longest."""
TAIL_LOAD = 1.0
"""At which the tail counts, the workload's own: at less nobody waits, beyond it the longest waits say among whom an
overload is shared out."""
LATENCY_UNIT = 0.1
"""Of an aim of latency, so that what is hopeless is as far behind as with goodput."""
GOOD: Params = MappingProxyType(
    {
        "harm_weight": 0.174,
        "ttft_width": 0.042,
        "tpot_width": 0.0376,
        "remaining_floor": 0.506,
        "kv_wait": 2.04,
        "ttft_weight": 0.0273,
        "tpot_weight": 0.00535,
        "backlog_weight": 0.0005,
        "prefill_weight": 0.0002,
        "local_weight": 0.0411,
        "short_stay": 0.778,
        "step_factor": 0.864,
    }
)
"""What a search on the five synthetic workloads at 2P+4D found, before requests could be held."""
PRICE_TRIALS: Mapping[str, float] = MappingProxyType({"goodput": 1.5, "latency": 3.0})
"""Of the price for each that a baseline's search has, by the objective's name: all workloads are to be fitted, and two
times at once are harder to lower than targets are to meet.
"""
SAMPLED_SHARE = 0.15
"""Of them are the sampler's; the others are neighbours of the best so far."""
CHAIN_SEEDS = 1000
"""Between the seeds of two chains, more than seeds that people give are apart."""
ROUND = 4
"""Neighbours of one leader."""
CONFIRMED = 40
"""Points that are tried on other traces in the end."""
HOPELESS: Mapping[int, float] = MappingProxyType({1: 0.08, 3: 0.04})
"""After so many traces a point that is so far behind the best is given up; wider than what the others could make up."""


@dataclass(frozen=True)
class JointCell:
    """A workload's part of a joint search. bench: the traces that are searched on, with lengths as the one predictor
    says; loads: theirs, in shares of the workload's rate. best, dynamo: on the same traces the runs of the workload's
    best tuned baseline and of tuned Dynamo-style, each with what it was tuned with. tail_only: how many of the last
    traces only the tail is judged on.
    """

    bench: Bench
    loads: Sequence[float]
    best: Sequence[Simulated]
    dynamo: Sequence[Simulated]
    tail_only: int = 0

    def gain(self, gain: "Gain", runs: Sequence[Simulated]) -> float:
        """Over its first traces, but for those of the tail."""
        return gain(self, runs[: len(self.loads) - self.tail_only])


Gain = Callable[[JointCell, Sequence[Simulated]], float]


def goodput_gain(cell: JointCell, runs: Sequence[Simulated]) -> float:
    """Mean difference in goodput to the best baseline.

    runs: of the cell's first traces. The spread between traces is not taken off as for a single workload: they are of
    different loads, and a gain that grows with the load is no worse for it.
    """
    return float(np.mean([run.goodput - other.goodput for run, other in zip(runs, cell.best, strict=False)]))


def long_tail(cell: JointCell, runs: Sequence[Simulated]) -> float:
    """How far P99 TTFT is beyond its limit against tuned Dynamo-style's, as `learn.objective.tail_excess` has it.

    Means over the traces are compared, as they are reported: a trace with a bad tail weighs as much as it is bad.
    """
    found = [(run, other) for run, other, load in zip(runs, cell.dynamo, cell.loads, strict=False) if load == TAIL_LOAD]
    own_s, its_s = (mean_percentile([pair[k] for pair in found], "ttft_s", 99) for k in (0, 1))
    return tail_excess(own_s / its_s) if own_s and its_s else 0.0


def lower_latency(cell: JointCell, runs: Sequence[Simulated]) -> float:
    """How far P90 TTFT and P90 TPOT are below tuned Dynamo-style's over the cell's first traces."""
    return LATENCY_UNIT * latency_gain(runs, cell.dynamo[: len(runs)])


JOINT_LOADS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"goodput": (1.0, 1.15, 1.0, 0.85, 1.3, 1.0, 1.5), "latency": 2 * (1.0, 0.92, 1.0, 1.08, 1.0, 1.0)}
)
"""Loads of the traces that are searched on, by the objective's name: for goodput also one far beyond what baselines
carry, for latency those about the load there is, and more of them: a P90 differs more between traces."""

ALONE_LOADS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"goodput": (1.0, 1.08, 1.0, 0.92, 1.15, 1.0, 1.25), "latency": JOINT_LOADS["latency"]}
)
"""The same where a workload is alone: nearer to its own load, which no other workload stands for."""
CHAINS: Mapping[str, int] = MappingProxyType({"goodput": 3, "latency": 1})
"""Searches for one workload's price, by the objective's name, apart by their seeds: each goes from neighbour to
neighbour and may end on a hill of its own. For latency three found no more than one does with its many trials."""

CONFIRMING_ROUNDS = 2
"""The traces that the best points are tried on in the end are so many times those of the search."""
CONFIRMING_TAILS = 12
"""More of them, of the load where the tail counts: a P99 is of few requests, and one burst in many has the longest."""

GAINS: Mapping[str, Gain] = MappingProxyType({"goodput": goodput_gain, "latency": lower_latency})
"""What is learned for, by the objective's name."""


def joint_loads(objective: str, n_workloads: int) -> tuple[float, ...]:
    """Loads of the traces that a price for so many workloads is searched on."""
    return (ALONE_LOADS if n_workloads == 1 else JOINT_LOADS)[objective]


def joint_chains(objective: str, n_workloads: int) -> int:
    """Searches for the price of so many workloads: one where many are to be fitted, which steadies it by itself."""
    return CHAINS[objective] if n_workloads == 1 else 1


def joint_space(objective: str, n_workloads: int) -> Space:
    """What is learned of the price: wide for one workload alone; what suits several is found sooner in a narrow one."""
    return price_space(objective, wide=n_workloads == 1)


def joint_start(objective: str, n_workloads: int) -> list[Params]:
    """Tried first: the price's own start, what was good before, and the same with requests held."""
    good = within(joint_space(objective, n_workloads), asdict(PriceParams()) | dict(GOOD))
    return [*price_start(objective, wide=n_workloads == 1), good, good | {"hold_s": 0.01}]


class JointObjective:
    """The value of a point over all cells: the mean of their gains and, weighted, the least of them, less the longest
    tail.

    Remembers how the best point so far stood after each trace, to give up hopeless ones.
    """

    def __init__(self, cells: Sequence[JointCell], gain: Gain, policy: Callable[[Params], Policy]) -> None:
        self._cells = cells
        self._gain = gain
        self._policy = policy
        self._leader: list[float] = []

    def __call__(self, params: Params) -> float:
        policy = self._policy(params)
        runs: list[list[Simulated]] = [[] for _ in self._cells]
        values: list[float] = []
        for k in range(len(self._cells[0].bench.traces)):
            for cell, found in zip(self._cells, runs, strict=True):
                found.append(cell.bench.run(policy, k))
            values.append(self._value(runs))
            if self._leader and values[k] < self._leader[k] - HOPELESS.get(k + 1, np.inf):
                return self._leader[-1] + values[k] - self._leader[k]
        if not self._leader or values[-1] > self._leader[-1]:
            self._leader = values
        return values[-1]

    def _value(self, runs: Sequence[Sequence[Simulated]]) -> float:
        gains = [cell.gain(self._gain, found) for cell, found in zip(self._cells, runs, strict=True)]
        tail = max(long_tail(cell, found) for cell, found in zip(self._cells, runs, strict=True))
        return float(np.mean(gains)) + WORST_WEIGHT * min(gains) - TAIL_COST * tail


@dataclass(frozen=True)
class JointSearch:
    """A search over cells of one topology with the same number of traces. objective: of GAINS. n_trials: of the table.

    Equal cells and seeds give equal results, also across kills.
    """

    cells: Sequence[JointCell]
    objective: str
    n_trials: int
    seed: int

    def best_table(self, study: StoredStudy, compiled: CompiledTable) -> Best:
        """The best table, of the sampler's points: it is for the price to favour."""
        value = self._value(study, self.n_trials, lambda params: table_policy(compiled, table_point(compiled, params)))
        space, start = table_space(compiled), table_warm_start(compiled)
        return search(study, space, value, self.n_trials, seed=self.seed, warm_start=start)

    def best_price(self, study: StoredStudy, table: Table, chain: int = 0) -> Best:
        """The best price that may favour the table. chain: which of several searches, each with a study of its own.

        The sampler's points first, then neighbours of the best so far: few of many parameters matter at a time, and the
        others are near their best already.
        """
        bench, n_workloads = self.cells[0].bench, len(self.cells)
        space, start = joint_space(self.objective, n_workloads), joint_start(self.objective, n_workloads)
        n_trials = math.ceil(PRICE_TRIALS[self.objective] * self.n_trials)
        value = self._value(study, n_trials, lambda params: price_policy(params, bench.topology, bench.slo, table))
        done = math.ceil(SAMPLED_SHARE * n_trials)
        seed = self.seed + CHAIN_SEEDS * chain
        best = search(study, space, value, done, seed=seed, warm_start=start)
        while done < n_trials:
            leader = best_of(study.trials(), done).params
            rng = np.random.default_rng([seed, done])
            round_end = min(done + ROUND, n_trials)
            points = [neighbour(space, leader, rng) for _ in range(done, round_end)]
            best = search(study, space, value, round_end, seed=seed, warm_start=points)
            done = round_end
        return best

    def confirmed(self, studies: Sequence[StoredStudy], table: Table, cells: Sequence[JointCell]) -> Best:
        """Of the best CONFIRMED points of each finished search the best on other traces, with its value there.

        The best of many on the same traces is partly the luckiest.
        """
        bench = self.cells[0].bench
        trials = [[trial for trial in study.trials() if trial.value is not None] for study in studies]
        leaders = [sorted(found, key=lambda trial: -float(trial.value or 0.0))[:CONFIRMED] for found in trials]
        tried = [trial for found in leaders for trial in found]
        value = JointObjective(
            cells, GAINS[self.objective], lambda params: price_policy(params, bench.topology, bench.slo, table)
        )
        values = [value(trial.params) for trial in tried]
        best = int(np.argmax(values))
        return Best(dict(tried[best].params), values[best], sum(map(len, trials)), 0)

    def _value(self, study: StoredStudy, n_trials: int, policy: Callable[[Params], Policy]) -> JointObjective:
        """The objective, which knows the best of a study that is continued."""
        value = JointObjective(self.cells, GAINS[self.objective], policy)
        trials = study.trials()
        if 0 < count_complete(trials) < n_trials:
            value(best_of(trials).params)
        return value
