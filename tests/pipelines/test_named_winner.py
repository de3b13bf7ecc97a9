"""Whether the simulator names the measured winner, on made-up outcomes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipelines.fidelity_report import Verdict, winner_line
from pipelines.live_run import ClusterConfig
from pipelines.named_winner import by_workload, named_winner, paired_interval
from pipelines.workload_spec import WorkloadSpec
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

CLUSTER = ClusterConfig("emulated", 1, 1, (), (), "a40-3b", 1.0, "emulated")
N = 400


def run(policy: str, live: int, simulated: int, seed: int = 1, rate: float = 10.0) -> Any:
    """A run of which the first requests met their targets, so many live and so many in the simulator."""
    spec = WorkloadSpec("chat", N, seed, 0, rate, 0.3, 4096)
    config = SimpleNamespace(workload=spec, cluster=CLUSTER, policy=policy, slo=targets_from_profile(A40_3B))
    recorded = SimpleNamespace(config=config, measured=SimpleNamespace(slo_met=np.arange(N) < live))
    return SimpleNamespace(recorded=recorded, simulated=SimpleNamespace(slo_met=np.arange(N) < simulated))


def test_the_same_winner_is_named() -> None:
    found = named_winner([run("a", 300, 290), run("b", 200, 210)])
    assert found is not None
    assert (found.measured, found.simulated, found.difference, found.named) == ("a", "a", 0.0, True)


@pytest.mark.parametrize(("live_of_b", "named"), [(299, True), (298, True), (280, False), (200, False)])
def test_another_winner_is_named_where_the_live_runs_cannot_tell_them_apart(live_of_b: int, named: bool) -> None:
    found = named_winner([run("a", 300, 200), run("b", live_of_b, 201)])
    assert found is not None
    assert (found.measured, found.simulated, found.named) == ("a", "b", named)
    assert found.difference == pytest.approx((300 - live_of_b) / N)
    assert ("within the interval" in winner_line(found)) == named


def test_a_policy_that_is_level_in_the_simulator_and_worse_live_is_not_overlooked() -> None:
    found = named_winner([run("a", 300, 200), run("b", 100, 200)])
    assert found is not None
    assert (found.simulated, found.named) == ("b", False)


def test_only_seeds_that_all_policies_have_are_compared() -> None:
    runs = [run("a", 300, 300), run("b", 200, 200), run("a", 0, 0, seed=2)]
    found = named_winner(runs)
    assert found is not None
    assert (found.measured, found.n_seeds) == ("a", 1)
    assert named_winner([runs[1], runs[2]]) is None
    assert named_winner([runs[0]]) is None


def test_rates_are_not_mixed_and_seeds_are() -> None:
    groups = by_workload([run("a", 1, 1), run("b", 1, 1), run("a", 1, 1, seed=2), run("b", 1, 1, rate=12.0)])
    assert sorted(len(group) for group in groups) == [1, 3]


def test_the_interval_is_that_of_a_paired_difference_and_repeats() -> None:
    differences = np.repeat([1.0, 0.0, -1.0], [40, 340, 20])
    low, high = paired_interval(differences)
    half = 1.96 * differences.std() / np.sqrt(N)
    assert (low, high) == pytest.approx((0.05 - half, 0.05 + half), abs=0.005)
    assert paired_interval(differences) == (low, high)


@pytest.mark.parametrize(("residual", "named", "within"), [(0.03, 4, True), (0.031, 4, False), (0.01, 3, False)])
def test_both_limits_hold_or_the_simulator_is_out_of_them(residual: float, named: int, within: bool) -> None:
    found = Verdict(residual, 12, named, 4)
    assert found.within_limits == within
    assert any("OUT OF" in line or "NOT ALL" in line for line in found.lines()) != within
