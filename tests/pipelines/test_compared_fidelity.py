"""`rutter compared-fidelity`: a comparison whose live cluster is the simulator, and what does not count."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from live_stand_in import StandIn, stand_in
from small_runs import ROOT, Rutter

from learn.costs import fitted_topology
from learn.table import costs_of_artifact
from pipelines.fidelity_results import fidelity_file
from pipelines.live_run import ClusterConfig, profile_of
from pipelines.recorded_runs import recorded_runs, run_named
from pipelines.simulated_runs import calibration_of
from serve_table.artifact import Artifact, load, save
from serve_table.step_time import A40_3B

__all__ = ["stand_in"]

POLICIES = ("round_robin", "always_local", "table")


@pytest.fixture
def artifact() -> Artifact:
    return load(ROOT / "artifacts" / "default.safetensors")


def compared(rutter: Rutter, folder: Path, artifact: Artifact) -> list[str | Path]:
    """Make a comparison with an artifact; the words that simulate it."""
    folder.mkdir(exist_ok=True)
    path = folder / "a.safetensors"
    save(artifact, path)
    words = ["--prefill", "1", "--decode", "1", "--requests", "100", "--workloads", "chat", "--rate", "chat=25"]
    words += ["--policies", *POLICIES, "--seeds", "1", "--out", folder / "live.csv", "--artifact", path]
    ended = rutter("compare", "--run-dir", folder / "run", *words)
    assert ended.status == 0, ended.error
    return ["compared-fidelity", folder / "run", "--artifact", path, "--out", folder / "fidelity.csv"]


def test_a_cluster_that_is_the_simulator_has_no_residual_and_another_has(
    rutter: Rutter, tmp_path: Path, stand_in: StandIn, artifact: Artifact
) -> None:
    stand_in.topology = fitted_topology(1, 1, A40_3B, costs_of_artifact(artifact))
    words = compared(rutter, tmp_path, artifact)
    ended = rutter(*words)
    assert ended.status == 0, ended.out
    assert "residual 0.000 over 3 runs: within the limit of 0.03" in ended.out
    assert "names the measured winner on 1 of 1 workloads" in ended.out
    rows = fidelity_file(tmp_path / "fidelity.csv").rows()
    assert {row.policy for row in rows} == set(POLICIES)
    for row in rows:
        assert 0.0 < row.live_goodput == row.simulated_goodput == row.replayed_goodput
        for column in ("ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s"):
            assert getattr(row, f"live_{column}") == getattr(row, f"simulated_{column}")
    assert "| policy | seed | live | simulated |" in rutter(*words, "--markdown").out
    assert fidelity_file(tmp_path / "fidelity.csv").rows() == rows

    slow = replace(stand_in.topology.profile, step=replace(A40_3B.step, floor_s=3.0 * A40_3B.step.floor_s))
    stand_in.topology = replace(stand_in.topology, profile=slow)
    ended = rutter(*compared(rutter, tmp_path / "slow", artifact))
    assert ended.status == 1
    assert "OUT OF the limit" in ended.out


def test_runs_that_do_not_count_are_told(rutter: Rutter, tmp_path: Path, stand_in: StandIn, artifact: Artifact) -> None:
    stand_in.late_runs = frozenset({2})
    words = compared(rutter, tmp_path, artifact)
    ended = rutter(*words)
    assert "always_local on emulated 1P+1D, attempt 1, does not count: the engines were late" in ended.out
    assert {row.policy for row in fidelity_file(tmp_path / "fidelity.csv").rows()} == {"round_robin", "table"}

    (table,) = [found for found in recorded_runs(run_named(str(tmp_path / "run"))) if found.config.table is not None]
    assert calibration_of(table, [artifact]) is artifact
    seed = artifact.metadata.seed + 1
    other = replace(artifact, metadata=msgspec.structs.replace(artifact.metadata, seed=seed))
    assert calibration_of(table, [other]) == f"no artifact given is its table {artifact.digest()}"
    elsewhere = replace(table, config=msgspec.structs.replace(table.config, cluster=cluster("vllm-cpu")))
    assert "were fitted to a cluster 'emulated', not 'vllm-cpu'" in str(calibration_of(elsewhere, [artifact]))
    # A run that taught the artifact its costs cannot judge them.
    baseline = replace(table, config=msgspec.structs.replace(table.config, table=None))
    digests = list(table.journal_digests())
    taught = replace(artifact, metadata=msgspec.structs.replace(artifact.metadata, journal_digests=digests))
    assert calibration_of(baseline, [taught]) == "its artifact learned from its journal"

    swapped = replace(table)
    swapped.__dict__["trace"] = replace(table.trace, output_tokens=table.trace.output_tokens + 1)
    assert "made otherwise" in str(swapped.why_not())


def cluster(kind: str) -> ClusterConfig:
    return ClusterConfig(kind, 1, 1, (), (), "a40-3b", 8.0, kind)


def test_vllm_on_cpus_is_simulated_with_its_own_blocks() -> None:
    assert profile_of(cluster("vllm-cpu")) == replace(A40_3B, block_tokens=32)
    assert profile_of(cluster("emulated")) == A40_3B


def test_a_folder_without_runs_is_one_line(rutter: Rutter, tmp_path: Path) -> None:
    given = ["--artifact", ROOT / "artifacts" / "default.safetensors", "--out", tmp_path / "f.csv"]
    assert "neither a run under" in rutter("compared-fidelity", tmp_path / "none", *given).only_line()
    assert "no compared run to simulate" in rutter("compared-fidelity", tmp_path, *given).only_line()
