"""The saturation rate: where round robin's goodput falls through what is asked, and errors where it never does."""

from dataclasses import replace

import numpy as np
import pytest

from learn.saturation import MID_COLLAPSE, round_robin_goodput, saturation_rate, settled_rate
from learn.simulation import Topology
from learn.trace import Trace
from pipelines.traces import PUBLIC_TRACES, traces_folder
from pipelines.workload_spec import WorkloadSpec, requests_of
from pipelines.workloads import make_workload
from serve_table.errors import TraceError
from serve_table.slo import SloClass, SloTargets, targets_from_profile
from serve_table.step_time import A40_3B

SLO = targets_from_profile(A40_3B)
TOPOLOGY = Topology(2, 4, A40_3B, 0.003)
IMPOSSIBLE = SloTargets(SloClass("loose", 1e-4, 0.0, 1e-4), SloClass("tight", 1e-4, 0.0, 1e-4))


def chat(n_requests: int = 1000) -> list[Trace]:
    return [make_workload("chat", n_requests, seed, 10.0) for seed in range(2)]


@pytest.mark.parametrize("goodput", [0.6, MID_COLLAPSE, 0.9])
def test_the_found_rate_gives_the_asked_goodput(goodput: float) -> None:
    rate = saturation_rate(chat(), TOPOLOGY, SLO, goodput)
    assert round_robin_goodput(chat(), TOPOLOGY, SLO, rate) == pytest.approx(goodput, abs=0.01)


def test_less_goodput_asked_is_more_rate_and_so_are_more_engines() -> None:
    rates = [saturation_rate(chat(), TOPOLOGY, SLO, goodput) for goodput in (0.95, 0.85, 0.75, 0.5)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    smaller = saturation_rate(chat(), Topology(1, 2, A40_3B, 0.003), SLO)
    assert 1.5 < saturation_rate(chat(), TOPOLOGY, SLO) / smaller < 3.0


def test_rates_far_below_one_are_found_too() -> None:
    long = [replace(trace, output_tokens=trace.output_tokens * 0 + 4000) for trace in chat(300)]
    slow = replace(
        A40_3B,
        step=replace(A40_3B.step, floor_s=A40_3B.step.floor_s * 50),
    )
    slo = targets_from_profile(slow, tight=(4.0, 1.05), loose=(4.0, 1.05))
    one = Topology(1, 1, slow)
    rate = saturation_rate(long, one, slo)
    assert 0.005 < rate < 0.5
    assert round_robin_goodput(long, one, slo, rate) == pytest.approx(MID_COLLAPSE, abs=0.02)


def test_a_settled_rate_is_right_for_traces_made_at_it() -> None:
    """Bursts keep their length in seconds, so traces made at 10 requests/s and stretched are others."""
    made: list[float] = []

    def mixed(rate: float) -> list[Trace]:
        made.append(rate)
        return [make_workload("mixed", 600, seed, rate) for seed in range(3)]

    wide = Topology(4, 12, A40_3B, 0.003)
    rate = settled_rate(mixed, wide, SLO)
    assert made[0] == 10.0
    assert made[-1] == pytest.approx(rate, rel=0.03)
    assert round_robin_goodput(mixed(rate), wide, SLO, rate) == pytest.approx(MID_COLLAPSE, abs=0.03)
    made.clear()
    settled_rate(mixed, wide, SLO, rounds=1)
    assert made == [10.0]


def test_targets_that_cannot_be_met_are_an_error_that_says_so() -> None:
    with pytest.raises(TraceError, match="round robin misses its targets even when idle"):
        saturation_rate(chat(100), TOPOLOGY, IMPOSSIBLE)


def test_requests_too_few_to_saturate_are_an_error_not_a_huge_rate() -> None:
    with pytest.raises(TraceError, match=r"its 3 requests do not saturate 2P\+4D"):
        saturation_rate([make_workload("chat", 3, 0, 1.0)], TOPOLOGY, SLO)


def test_requests_that_arrive_together_at_any_rate_are_named_as_the_reason() -> None:
    trace = make_workload("documents", 400, 0, 5.0)
    steps = replace(trace, arrival_s=np.floor(np.arange(400) / 40) * 3.0)
    with pytest.raises(TraceError, match="98% of its requests arrive with the one before, at any rate"):
        saturation_rate([steps], TOPOLOGY, SLO)


@pytest.mark.skipif(traces_folder() is None, reason="no folder of public traces here (RUTTER_TRACES)")
@pytest.mark.parametrize("name", PUBLIC_TRACES)
def test_every_public_trace_has_a_saturation_rate(name: str) -> None:
    trace = requests_of(WorkloadSpec(name, 1000, 0, 0, 1.0, 0.3, A40_3B.max_model_len_tokens))
    rate = saturation_rate([trace], TOPOLOGY, SLO)
    assert 0.5 < rate < 50.0
    assert round_robin_goodput([trace], TOPOLOGY, SLO, rate) == pytest.approx(MID_COLLAPSE, abs=0.03)
