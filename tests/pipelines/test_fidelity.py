"""`rutter fidelity`: what counts as agreement, and a small run of it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_runs import Rutter, processes_of

from learn.costs import fitted_topology
from learn.evaluate import bench_of
from learn.simulation import simulate
from learn.table import Costs
from pipelines.fidelity import agreement
from pipelines.policy_run import Conditions, Measured
from pipelines.workloads import make_workload
from serve_table.artifact import Artifact, load
from serve_table.policy import policy
from serve_table.step_time import A40_3B

GOOD = Conditions(True, True)


@pytest.fixture(scope="session")
def artifact_path(trained_once: Path) -> Path:
    (candidate,) = trained_once.glob("train-*/candidate.safetensors")
    return candidate


@pytest.fixture
def artifact(artifact_path: Path) -> Artifact:
    return load(artifact_path)


def measured_by_the_simulator(artifact: Artifact, name: str) -> tuple[Measured, dict[str, object]]:
    trace = make_workload("mixed", 300, 5, 8.0)
    costs = Costs(artifact.step_time(), artifact.handoff(), float(artifact.arrays["overhead_s"][0]))
    topology = fitted_topology(2, 4, A40_3B, costs)
    predicted = bench_of([trace], topology, artifact.slo_targets(), artifact.predictor()).predicted[0]
    chosen = policy(name, artifact=artifact if name == "table" else None)
    run = simulate(trace, topology, chosen, artifact.slo_targets(), predicted, 3)
    return Measured(run.ttft_s, run.tpot_s, run.slo_met, np.zeros(len(trace), bool), GOOD), {
        "name": name,
        "trace": trace,
        "topology": topology,
        "artifact": artifact,
        "seed": 3,
    }


@pytest.mark.parametrize("name", ["round_robin", "table"])
def test_a_cluster_that_is_the_simulator_agrees_exactly(artifact: Artifact, name: str) -> None:
    measured, given = measured_by_the_simulator(artifact, name)
    found = agreement(measured=measured, **given)  # type: ignore[arg-type]
    assert found.within_limits
    assert found.live_goodput == found.simulated_goodput
    assert found.live == found.simulated
    assert set(found.live) == {"ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s"}


@pytest.mark.parametrize(("factor", "within"), [(1.0, True), (1.08, True), (0.95, True), (1.15, False), (0.85, False)])
@pytest.mark.parametrize("column", ["ttft_s", "tpot_s"])
def test_times_may_be_ten_percent_off(artifact: Artifact, column: str, factor: float, within: bool) -> None:
    measured, given = measured_by_the_simulator(artifact, "round_robin")
    other = replace(measured, **{column: getattr(measured, column) * factor})
    assert agreement(measured=other, **given).within_limits == within  # type: ignore[arg-type]


@pytest.mark.parametrize(("n_changed", "within"), [(0, True), (5, True), (8, False)])
def test_goodput_may_be_two_points_off(artifact: Artifact, n_changed: int, within: bool) -> None:
    measured, given = measured_by_the_simulator(artifact, "round_robin")
    met = measured.slo_met.copy()
    met[np.flatnonzero(met)[:n_changed]] = False
    assert agreement(measured=replace(measured, slo_met=met), **given).within_limits == within  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("--requests", "99"), 2),
        (("--rate", "-1"), 2),
        (("--seed", "-1"), 2),
        (("--policies", "clairvoyant"), 2),
        (("--prefill", "0"), 2),
        (("--trace", "nonsense"), 2),
        (("--artifact", "/nowhere/a.safetensors"), 1),
    ],
)
def test_bad_flags_start_nothing(
    artifact_path: Path, tmp_path: Path, rutter: Rutter, words: tuple[str, ...], status: int
) -> None:
    ended = rutter("fidelity", "--run-dir", tmp_path / "run", "--artifact", artifact_path, *words)
    assert ended.status == status
    assert "internal error" not in ended.error
    assert processes_of(tmp_path) == {}


@pytest.mark.slow
def test_a_small_run_is_reported_and_kept(
    artifact_path: Path, tmp_path: Path, rutter: Rutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["fidelity", "--run-dir", tmp_path / "run", "--artifact", artifact_path, "--json"]
    words += ["--prefill", "1", "--decode", "2", "--dilation", "0.3", "--trace", "chat", "--requests", "100"]
    words += ["--rate", "12", "--policies", "table"]
    first = rutter(*words)
    assert first.status in (0, 1), first.error
    report = json.loads(first.out)
    assert [found["policy"] for found in report["policies"]] == ["table"]
    assert (report["topology"], report["cluster_kind"], report["workload"]) == ("1P+2D", "emulated", "chat")
    for found in report["policies"]:
        assert found["requests"] == 100
        assert 0.0 < found["live_goodput"] <= 1.0
        assert all(value > 0.0 for value in found["live"].values())
    assert first.status == (0 if all(found["within_limits"] for found in report["policies"]) else 1)
    assert json.loads((tmp_path / "build" / "fidelity.json").read_bytes()) == report
    assert processes_of(tmp_path / "run") == {}
    # Done once, it is read from the journal and gives the same.
    again = rutter(*words)
    assert (again.status, json.loads(again.out)) == (first.status, report)
    assert "is ready at" not in again.error
