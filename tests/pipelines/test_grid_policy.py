"""The learned policy of a simulated comparison: one a topology, on all its workloads."""

import csv
import math
from pathlib import Path

import msgspec
import pytest
from small_runs import Ended, Rutter

from learn.contenders import REFERENCES
from learn.joint import CHAINS, PRICE_TRIALS
from learn.training import BASELINES
from pipelines import simulated_compare
from pipelines.grid_cell import Judged
from pipelines.grid_policy import LearnedPolicy, TopologyWork, make_policy
from pipelines.stages import Run
from pipelines.tuned_baselines import tuned_params
from serve_table.artifact import Artifact, load
from serve_table.errors import RunError
from serve_table.policy import policy

N_TRIALS = 3
WORDS = ["--requests", "120", "--seeds", "2", "--trials", str(N_TRIALS), "--jobs", "1", "--topologies", "1P+2D"]
OF_THE_PRICE = math.ceil(PRICE_TRIALS["goodput"] * N_TRIALS)


class Learning:
    """A simulated comparison of the learned policy in a folder of its own."""

    def __init__(self, rutter: Rutter, folder: Path) -> None:
        self.rutter = rutter
        self.run_folder = folder / "run"
        self.out = folder / "grid.csv"

    def run(self, *words: str) -> Ended:
        places = ("--run-dir", self.run_folder, "--out", self.out)
        return self.rutter("compare", "--cluster", "simulated", *places, *WORDS, *words)

    def rows(self, policy: str) -> list[dict[str, str]]:
        with open(self.out, newline="") as file:
            return [row for row in csv.DictReader(file) if row["policy"] == policy]

    def learned(self, policy: str = "rutter") -> LearnedPolicy:
        return msgspec.json.decode(self.output("learned", policy).read_bytes(), type=LearnedPolicy)

    def artifact(self) -> Artifact:
        return load(self.output("artifact", "rutter"))

    def output(self, key: str, policy: str) -> Path:
        run_ = Run(self.run_folder)
        return run_.output_path(run_.latest(f"policy-1P+2D-{policy}"), key)


@pytest.fixture
def learning(rutter: Rutter, tmp_path: Path) -> Learning:
    return Learning(rutter, tmp_path)


def test_one_policy_for_all_workloads_with_the_references_that_it_needs(learning: Learning) -> None:
    ended = learning.run("--workloads", "chat", "documents", "--policies", "rutter")
    assert ended.status == 0, ended.error
    rows = learning.rows("rutter")
    assert [row["workload"] for row in rows] == ["chat", "chat", "documents", "documents"]
    # One artifact: the same parameters and the same lengths, whatever the workload.
    assert len({row["policy_digest"] for row in rows}) == 1
    assert all(learning.rows(name) for name in REFERENCES)
    # A live comparison can take each workload's baselines as they were tuned here.
    tuned = tuned_params(str(learning.run_folder), ["chat", "documents"], "1P+2D")
    assert set(tuned["chat"]) == set(BASELINES)
    for name, params in tuned.items():
        (judged,) = learning.run_folder.glob(f"cell-{name}-1P+2D-dynamo_style-*/judged.json")
        assert params["dynamo_style"] == msgspec.json.decode(judged.read_bytes(), type=Judged).params
    with pytest.raises(RunError, match="no round_robin on mixed 1P\\+2D: run `rutter compare --cluster simulated`"):
        tuned_params(str(learning.run_folder), ["mixed"], "1P+2D")
    learned = learning.learned()
    assert (learned.workloads, learned.trials, learned.objective) == (("chat", "documents"), OF_THE_PRICE, "goodput")
    for path in learning.run_folder.glob("cell-*-rutter-*/judged.json"):
        assert msgspec.json.decode(path.read_bytes(), type=Judged).params == learned.params
    # The artifact that a router serves is the policy that was judged.
    artifact = learning.artifact()
    assert {name: getattr(artifact.price(), name) for name in learned.params} == pytest.approx(learned.params)
    metadata = artifact.metadata
    assert (metadata.cluster_kind, metadata.prefill_engines, metadata.decode_engines) == ("simulated", 1, 2)
    assert (metadata.workload, metadata.policy, metadata.trials) == ("chat, documents", "price", OF_THE_PRICE)
    assert policy("rutter", artifact=artifact).params == policy("price", artifact=artifact).params
    assert "rutter against the best baseline of each of 2 cells" in ended.out


def test_a_made_policy_stands_and_a_killed_one_goes_on(learning: Learning, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TopologyWork] = []

    def noting(work: TopologyWork) -> TopologyWork:
        made.append(work)
        return make_policy(work)

    monkeypatch.setattr(simulated_compare, "make_policy", noting)
    words = ("--workloads", "chat", "--policies", "rutter")
    assert learning.run(*words).status == 0
    rows = learning.rows("rutter")
    again = learning.run(*words)
    assert "the learned policies of 1 of 1 topologies are done" in again.out
    assert (len(made), learning.rows("rutter")) == (1, rows)
    # Another number of held-out seeds is judged with the policy that was learned.
    assert learning.run(*words, "--seeds", "3").status == 0
    assert (len(made), len(learning.rows("rutter"))) == (2, 3)
    assert learning.learned().trials == CHAINS["goodput"] * OF_THE_PRICE
    # A killed search goes on from its trials.
    (folder,) = learning.run_folder.glob("policy-*-rutter-*")
    (folder / "learned.json").unlink()
    assert learning.run(*words).status == 0
    for chain in range(CHAINS["goodput"]):
        assert (folder / f"price-{chain}.log").read_text().count('"op_code":4') == OF_THE_PRICE
    assert learning.rows("rutter")[:2] == rows


def test_the_latency_profile_is_a_policy_of_its_own(learning: Learning) -> None:
    assert learning.run("--workloads", "chat", "--policies", "rutter").status == 0
    ended = learning.run("--workloads", "chat", "--policies", "rutter", "--objective", "latency")
    assert ended.status == 0, ended.error
    assert "rutter_latency against tuned dynamo_style in 1 cells" in ended.out
    assert len(learning.rows("rutter")) == len(learning.rows("rutter_latency")) == 2
    assert learning.learned("rutter_latency").objective == "latency"
