"""Splits of a cluster's engines: what they are, and when another one is advised."""

import numpy as np
import pytest
from trace_cases import SMALL_SLO, SMALL_TOPOLOGY, random_trace

from learn.evaluate import Bench
from learn.price_space import price_policy
from learn.simulation import Topology, simulate
from learn.splits import Split, judged_splits, split_lines, splits_of
from serve_table.policy import policy
from serve_table.step_time import A40_3B

PRESENT = Topology(2, 4, A40_3B)


def splits(**goodput: float) -> list[Split]:
    """By a letter and the prefill engines: p of a split, e of one with elastic roles."""
    noise = np.array([-0.002, 0.001, 0.001])
    return [
        Split(Topology(int(name[1]), 6 - int(name[1]), A40_3B, 0.0, name[0] == "e"), mean + noise)
        for name, mean in goodput.items()
    ]


def test_every_split_has_as_many_engines() -> None:
    assert [str(split) for split in splits_of(PRESENT, elastic=False)] == [
        *("0P+6D", "1P+5D", "2P+4D", "3P+3D", "4P+2D", "5P+1D")
    ]
    assert splits_of(PRESENT, elastic=True)[-1] == Topology(2, 4, A40_3B, 0.0, True)
    assert not any(split.elastic for split in splits_of(Topology(0, 6, A40_3B), elastic=True))


@pytest.mark.parametrize(
    ("goodput", "advice"),
    [
        ({"p0": 0.7, "p2": 0.88, "p3": 0.95}, ["another split would serve it better: 3P+3D 0.950 against 2P+4D 0.880"]),
        ({"p0": 0.99, "p2": 0.88, "p3": 0.95}, ["no split would serve it better: none 0.990 against 2P+4D 0.880"]),
        ({"p0": 0.7, "p2": 0.95, "p3": 0.953}, ["no other split would serve it better than 2P+4D 0.950"]),
        (
            {"p2": 0.9, "p3": 0.8, "e2": 0.97},
            [
                "no other split would serve it better than 2P+4D 0.900",
                "elastic roles (rutter serve --elastic) would serve it better: "
                "2P+4D with elastic roles 0.970 against 2P+4D 0.900",
            ],
        ),
    ],
)
def test_what_is_advised(goodput: dict[str, float], advice: list[str]) -> None:
    lines = split_lines(splits(**goodput), PRESENT)
    assert lines[0].startswith("splits of 6 engines: ")
    assert lines[1:] == advice


def test_what_may_be_chance_is_not_advised() -> None:
    own, other = splits(p2=0.9, p3=0.95)
    lucky = Split(other.topology, own.goodput + np.array([-0.02, 0.0, 0.1]))
    assert split_lines([own, lucky], PRESENT)[1] == f"no other split would serve it better than {own}"


def test_splits_are_judged_on_the_same_traces() -> None:
    traces = (random_trace(0), random_trace(1))
    lengths = tuple(np.full(len(trace), 12.0) for trace in traces)
    bench = Bench(traces, SMALL_TOPOLOGY, SMALL_SLO, lengths)
    found = judged_splits(bench, price_policy({}, SMALL_TOPOLOGY, SMALL_SLO))
    assert [split.name for split in found] == [
        *("none", "1P+4D", "2P+3D", "3P+2D", "4P+1D", "2P+3D with elastic roles")
    ]
    again = simulate(traces[1], found[1].topology, price_policy({}, SMALL_TOPOLOGY, SMALL_SLO), SMALL_SLO, 12.0, 1)
    assert found[1].goodput[1] == again.goodput
    assert len(judged_splits(bench, policy("least_loaded"))) == 5
