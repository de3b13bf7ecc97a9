"""Splits of a cluster's engines into prefill and decode: whether another one would serve a workload better."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from learn.evaluate import Bench, Floats, interval
from learn.simulation import Topology
from serve_table.decision import PRICE
from serve_table.policy import Policy

LEAST_GAIN = 0.005
"""Of goodput: less is not worth giving an engine another role."""


@dataclass(frozen=True)
class Split:
    """What a policy does on one of the splits, its parameters unchanged. goodput: (n_traces,), alike in all splits."""

    topology: Topology
    goodput: Floats

    @property
    def name(self) -> str:
        """none: every engine does both for its own requests."""
        if self.topology.prefill_engines == 0:
            return "none"
        return f"{self.topology} with elastic roles" if self.topology.elastic else str(self.topology)

    def __str__(self) -> str:
        return f"{self.name} {np.mean(self.goodput):.3f}"


def splits_of(topology: Topology, elastic: bool) -> list[Topology]:
    """As many engines in every split, from no prefill engine to one decode engine. elastic: also the present split with
    elastic roles, last.
    """
    n = topology.prefill_engines + topology.decode_engines
    rigid = replace(topology, elastic=False)
    found = [replace(rigid, prefill_engines=p, decode_engines=n - p) for p in range(n)]
    return [*found, replace(topology, elastic=True)] if elastic and topology.prefill_engines > 0 else found


def judged_splits(bench: Bench, policy: Policy) -> list[Split]:
    """The policy on every split of the bench's engines; with elastic roles only where it is the price."""
    topologies = splits_of(bench.topology, policy.number == PRICE)
    return [Split(topology, replace(bench, topology=topology).goodput(policy)) for topology in topologies]


def split_lines(splits: Sequence[Split], present: Topology) -> list[str]:
    """Goodput of every split, and whether another one, none, or elastic roles would serve the workload better."""
    own = next(split for split in splits if split.topology == present)
    rigid = [split for split in splits if not split.topology.elastic]
    best = max(rigid, key=lambda split: float(np.mean(split.goodput)))
    lines = [f"splits of {present.prefill_engines + present.decode_engines} engines: {', '.join(map(str, splits))}"]
    if is_better(best, own):
        what = "no split" if best.name == "none" else "another split"
        lines.append(f"{what} would serve it better: {best} against {own}")
    else:
        lines.append(f"no other split would serve it better than {own}")
    for split in splits:
        if split.topology.elastic and is_better(split, own):
            lines.append(f"elastic roles (rutter serve --elastic) would serve it better: {split} against {own}")
    return lines


def is_better(split: Split, than: Split) -> bool:
    """By enough, and by more than chance, paired over the traces."""
    difference = split.goodput - than.goodput
    low, _ = interval(difference)
    return float(np.mean(difference)) >= LEAST_GAIN and low > 0.0
