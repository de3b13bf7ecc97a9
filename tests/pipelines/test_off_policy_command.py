"""`rutter off-policy`: the report of a journal beside the simulator, and its one line for a bad input."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from explored_rows import explored_rows, true_goodput
from small_runs import ROOT, Rutter, simulated_collection
from synthetic_rows import journal_row, write_journal

from pipelines import cli
from serve_table.policy import policy

N_ROWS = 600
ARTIFACT = ROOT / "artifacts" / "default.safetensors"
LEAST_LOADED = policy("least_loaded")


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    return explored_rows(N_ROWS, 0, LEAST_LOADED, explore=0.5)


@pytest.fixture
def journal(tmp_path: Path, rows: list[Any]) -> Path:
    write_journal(tmp_path / "journal", rows)
    return tmp_path / "journal"


def test_the_report_has_every_candidate_beside_the_simulator_and_is_in_the_run_folder(
    rutter: Rutter, tmp_path: Path, journal: Path, rows: list[Any]
) -> None:
    words = ["off-policy", "--run-dir", tmp_path / "run", "--journal", journal, "--artifact", ARTIFACT, "--json"]
    ended = rutter(*words, "--policies", "table", "always_local")
    assert ended.status == 0, ended.error
    report = json.loads(ended.out)
    assert report == json.loads((tmp_path / "run" / "off-policy.json").read_text())
    assert report["rows"] == N_ROWS
    assert report["on_policy"]["goodput"]["value"] == pytest.approx(sum(row.slo_met for row in rows) / N_ROWS)
    assert 0.0 <= report["replayed_goodput"] <= 1.0
    assert [one["policy"] for one in report["candidates"]] == ["table", "always_local"]
    assert "follows the candidate alone" in report["limit"]
    local = report["candidates"][1]
    assert 0.0 <= local["simulated_goodput"] <= 1.0
    full = local["estimates"]["full"]["goodput"]["dr"]
    assert full["low"] <= true_goodput(rows, policy("always_local")) <= full["high"]


def test_the_text_says_what_is_evaluated_and_where_it_ends(rutter: Rutter, tmp_path: Path, journal: Path) -> None:
    ended = rutter("off-policy", "--run-dir", tmp_path / "run", "--journal", journal, "--policies", "always_local")
    assert ended.status == 0, ended.error
    lines = ended.out.splitlines()
    table = [line.split() for line in lines if line.startswith("always_local")]
    assert [row[:2] for row in table] == [["always_local", "action"], ["always_local", "full"]]
    text = " ".join(ended.out.split())
    for said in (
        "600 explored rows, logged by least_loaded; support: 100.0%",
        "weights not clipped",
        "action: local or remote as the candidate has it, engines as the journal's policy places them given that.",
        "none without --artifact",
        "Limit: requests interfere",
        "how one request would fare that follows the candidate alone",
    ):
        assert said in text
    assert lines[-1] == str(tmp_path / "run" / "off-policy.json")


def test_clipped_weights_are_stated(rutter: Rutter, tmp_path: Path, journal: Path) -> None:
    words = ["off-policy", "--run-dir", tmp_path / "run", "--journal", journal, "--policies", "always_local"]
    ended = rutter(*words, "--clip", "2")
    assert "weights clipped at 2, of one candidate at most" in ended.out
    assert ended.status == 0


def test_the_journals_own_policy_is_known_by_its_given_parameters(rutter: Rutter, tmp_path: Path) -> None:
    params = {"eff_isl_threshold_tokens": 2000.0, "eff_isl_ratio_threshold": 1.05}
    write_journal(tmp_path / "journal", explored_rows(300, 0, policy("dynamo_style", params), explore=0.5))
    words = ["off-policy", "--run-dir", tmp_path / "run", "--journal", tmp_path / "journal", "--json"]
    words += ["--policies", "always_local"]

    def refusal(*more: str) -> str | None:
        (found,) = json.loads(rutter(*words, *more).out)["candidates"]
        why: str | None = found["estimates"]["action"]["goodput"]["refusal"]
        return why

    assert "is not known here with these parameters" in (refusal() or "")
    assert refusal("--policy-params", f"dynamo_style={json.dumps(params)}") is None


def test_the_collected_journal_is_the_default_and_what_cannot_be_known_is_refused(
    rutter: Rutter, tmp_path: Path
) -> None:
    # Its rows name a policy with a digest that is none of ours.
    run = simulated_collection(tmp_path / "run")
    ended = rutter("off-policy", "--run-dir", run.folder, "--policies", "round_robin")
    assert ended.status == 0, ended.error
    assert "round_robin, action, refused: the journal's policy round_robin (0000000000000000) is not known" in ended.out


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (["--policies", "fastest"], cli.USAGE, "unknown policy 'fastest'; known: round_robin, "),
        (["--policies", "table"], cli.USAGE, "policy 'table' needs --artifact FILE"),
        (["--policy-params", "fastest={}"], cli.USAGE, "--policy-params 'fastest={}': give it as NAME=JSON"),
        (["--policy-params", "dynamo_style=1"], cli.USAGE, "--policy-params must be a JSON object"),
        (["--clip", "0.5"], cli.USAGE, "--clip 0.5: a weight limit is at least 1"),
        (["--cluster-kind", "gpu"], cli.FAILED, "none of 0 journal rows can be evaluated off-policy"),
    ],
)
def test_bad_input_is_one_line(
    rutter: Rutter, tmp_path: Path, journal: Path, words: list[str], status: int, line: str
) -> None:
    ended = rutter("off-policy", "--run-dir", tmp_path / "run", "--journal", journal, *words)
    assert ended.status == status
    assert ended.only_line().startswith(f"rutter: {line}")


@pytest.mark.parametrize(
    ("fields", "reason"), [({"explore": 0.0}, "not_explored"), ({"propensity": None}, "no_propensity")]
)
def test_a_journal_without_exploration_or_propensities_is_one_line(
    rutter: Rutter, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    rows = [msgspec.structs.replace(journal_row(number), **fields) for number in range(5)]
    write_journal(tmp_path / "journal", rows)
    ended = rutter("off-policy", "--run-dir", tmp_path / "run", "--journal", tmp_path / "journal")
    assert ended.status == cli.FAILED
    assert (
        f"none of 5 journal rows can be evaluated off-policy: 5 {reason}; journal with --explore" in ended.only_line()
    )
    assert not (tmp_path / "run").exists()
