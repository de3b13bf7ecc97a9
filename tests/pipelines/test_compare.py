"""`rutter compare`: what it counts, how it continues, what it refuses."""

import csv
from pathlib import Path

import pytest
from live_stand_in import StandIn, stand_in
from small_runs import Ended, Rutter, processes_of

from pipelines.compare import given_rates
from pipelines.results import COLUMNS, ResultFile
from serve_table.errors import ConfigError

__all__ = ["stand_in"]

SEEDS = (1_000_000, 1_000_001)
WORDS = ["--prefill", "1", "--decode", "1", "--requests", "100", "--rate", "chat=30", "--workloads", "chat"]
TWO = ["--policies", "round_robin", "always_local", "--seeds", "2"]


class Comparison:
    """A comparison in a folder of its own, run again and again."""

    def __init__(self, rutter: Rutter, folder: Path, *words: str | Path) -> None:
        self.rutter = rutter
        self.out = folder / "results.csv"
        self.words = ["compare", "--run-dir", folder / "run", "--out", self.out, *WORDS, *words]

    def run(self, *more: str | Path) -> Ended:
        return self.rutter(*self.words, *more)

    def rows(self) -> list[dict[str, str]]:
        with open(self.out, newline="") as file:
            return list(csv.DictReader(file))

    def goodput(self) -> dict[tuple[str, str], str]:
        return {(row["policy"], row["seed"]): row["goodput"] for row in self.rows()}


@pytest.fixture
def comparison(rutter: Rutter, tmp_path: Path, stand_in: StandIn) -> Comparison:
    return Comparison(rutter, tmp_path, *TWO)


def test_every_policy_runs_on_every_seed_from_empty_caches_after_the_gates(
    comparison: Comparison, stand_in: StandIn
) -> None:
    ended = comparison.run()
    assert ended.status == 0, ended.error
    assert stand_in.calls == ["start", "gates", *["reset", "send"] * 4]
    # Interleaved within a seed, and each seed begins with another policy.
    assert stand_in.sent == [
        ("chat", "round_robin", SEEDS[0]),
        ("chat", "always_local", SEEDS[0]),
        ("chat", "always_local", SEEDS[1]),
        ("chat", "round_robin", SEEDS[1]),
    ]
    rows = comparison.rows()
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 4
    for row in rows:
        assert (row["workload"], row["prefill_engines"], row["decode_engines"]) == ("chat", "1", "1")
        assert (row["cluster_kind"], row["dilation"], row["requests_per_s"]) == ("emulated", "2", "30")
        assert (row["requests"], row["failed"], row["counted"]) == ("100", "0", "true")
        assert 0.0 < float(row["goodput"]) <= 1.0
        assert 0.0 < float(row["ttft_p50_s"]) <= float(row["ttft_p90_s"]) <= float(row["ttft_p99_s"])
        assert 0.0 < float(row["tpot_p50_s"]) <= float(row["tpot_p90_s"]) <= float(row["tpot_p99_s"])
    again = comparison.run()
    assert again.status == 0
    assert "4 of 4 runs are done" in again.out
    assert stand_in.calls.count("start") == 1
    assert comparison.rows() == rows


def test_f35_a_killed_comparison_continues_with_the_missing_runs(comparison: Comparison, stand_in: StandIn) -> None:
    stand_in.dies_in = 3
    assert comparison.run().status != 0
    before = comparison.goodput()
    assert len(before) == 2
    stand_in.dies_in = None
    ended = comparison.run()
    assert ended.status == 0, ended.error
    assert "2 of 4 runs are done" in ended.out
    # The run that was cut short was made anew, whole; the others were not touched.
    assert stand_in.sent[3:] == [("chat", "always_local", SEEDS[1]), ("chat", "round_robin", SEEDS[1])]
    assert {row["requests"] for row in comparison.rows()} == {"100"}
    assert comparison.goodput().items() >= before.items()
    assert stand_in.calls.count("gates") == 2


def test_results_that_were_lost_are_written_again_without_a_run(comparison: Comparison, stand_in: StandIn) -> None:
    comparison.run()
    rows = comparison.rows()
    comparison.out.unlink()
    assert comparison.run().status == 0
    assert comparison.rows() == rows
    assert len(stand_in.sent) == 4


def test_more_seeds_and_policies_add_their_runs_only(comparison: Comparison, stand_in: StandIn) -> None:
    comparison.run()
    ended = comparison.run("--seeds", "3", "--policies", "round_robin", "always_local", "least_loaded")
    assert ended.status == 0
    assert "4 of 9 runs are done" in ended.out
    assert len(comparison.rows()) == 9


def test_gates_that_fail_count_nothing(comparison: Comparison, stand_in: StandIn) -> None:
    stand_in.gate_passes = False
    ended = comparison.run()
    assert ended.status == 1
    assert "the gate 'greedy text' failed: d0 gives another text; look" in ended.only_line()
    assert stand_in.sent == []
    assert not comparison.out.exists()


def test_a_run_with_late_engines_is_written_but_not_counted_and_made_once_more(
    comparison: Comparison, stand_in: StandIn
) -> None:
    stand_in.late_runs = frozenset({2})
    ended = comparison.run()
    assert ended.status == 0
    assert "chat, seed 1000000, always_local does not count" in ended.out
    assert "the next call makes it once more" in ended.out
    assert "always_local, seed 1000000, does not count: the engines were late." in ended.out
    assert [(row["kept_pace"], row["counted"]) for row in comparison.rows()].count(("false", "false")) == 1
    assert len(stand_in.sent) == 4
    again = comparison.run()
    assert "3 of 4 runs are done, 1 are made once more" in again.out
    assert stand_in.sent[4:] == [("chat", "always_local", SEEDS[0])]
    assert {row["counted"] for row in comparison.rows()} == {"true"}
    assert "does not count" not in again.out


def test_a_run_that_is_late_again_stays_out_and_is_not_made_for_ever(comparison: Comparison, stand_in: StandIn) -> None:
    stand_in.late_runs = frozenset({1, 5})
    comparison.run()
    assert "it is not made again" in comparison.run().out
    third = comparison.run()
    assert len(stand_in.sent) == 5
    assert "round_robin, seed 1000000, does not count: the engines were late." in third.out
    assert len(comparison.rows()) == 4
    # The one seed that counts for both gives a difference without an interval.
    (line,) = [line for line in third.out.splitlines() if line.startswith("round_robin") and "seed" not in line]
    assert line.split()[-1] == "1"


def test_failed_requests_miss_their_targets_and_are_told(comparison: Comparison, stand_in: StandIn) -> None:
    comparison.run()
    whole = {key: float(value) for key, value in comparison.goodput().items()}
    stand_in.fails = 40
    other = Comparison(comparison.rutter, comparison.out.parent / "other", *TWO)
    assert other.run().status == 0
    assert {row["failed"] for row in other.rows()} == {"40"}
    for key, value in other.goodput().items():
        assert float(value) <= min(whole[key], 0.6)


def test_results_of_another_kind_are_never_mixed_in(comparison: Comparison, stand_in: StandIn) -> None:
    comparison.run()
    (first, *_) = ResultFile(comparison.out, "emulated").rows()
    with pytest.raises(ConfigError, match="holds results of a cluster 'emulated', these are of 'vllm-cpu'"):
        ResultFile(comparison.out, "vllm-cpu").put([first])
    before = comparison.out.read_bytes()
    ended = comparison.run("--cluster", "vllm-cpu")
    assert ended.status == 2
    assert "kinds are never mixed in one file, name another --out" in ended.only_line()
    assert comparison.out.read_bytes() == before
    assert stand_in.calls.count("start") == 1


def test_the_table_needs_its_artifact_and_is_told_apart_from_the_best_baseline(
    rutter: Rutter, tmp_path: Path, stand_in: StandIn, trained_once: Path
) -> None:
    (artifact,) = trained_once.glob("train-*/candidate.safetensors")
    comparison = Comparison(rutter, tmp_path, "--policies", "table", "dynamo_style", "marginal_cost", "--seeds", "3")
    assert comparison.run().only_line() == (
        "rutter: policy 'table' needs --artifact FILE; make one with `rutter export`"
    )
    ended = comparison.run("--artifact", artifact, "--tuned", trained_once, "--markdown")
    assert ended.status == 0, ended.error
    assert "| policy | goodput | spread | P90 TTFT | P99 TTFT | P90 TPOT |" in ended.out
    assert "| **table** | **" in ended.out
    assert "the best baseline, " in ended.out
    assert ", paired over 3 seeds." in ended.out
    assert "Conditions: emulated 1P+1D, a40-3b, dilation 2; " in ended.out
    assert "tuned before: dynamo_style, marginal_cost" in ended.out
    digests = {row["policy"]: row["policy_digest"] for row in comparison.rows()}
    assert len(set(digests.values())) == 3
    # Tuned otherwise, a baseline is another one and runs anew; the table does not.
    n_before = len(stand_in.sent)
    assert comparison.run("--artifact", artifact).status == 0
    assert {name for _, name, _ in stand_in.sent[n_before:]} <= {"dynamo_style", "marginal_cost"}
    assert len(stand_in.sent) > n_before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--requests", "99"), "at least 100"),
        (("--seeds", "0"), "at least 1"),
        (("--seed", "-1"), "at least 0"),
        (("--rate", "chat"), "give it as WORKLOAD=REQUESTS_PER_S"),
        (("--rate", "mixed=3"), "mixed is not among --workloads chat"),
        (("--workloads", "chat", "nonsense", "--rate", "nonsense=3"), "unknown trace 'nonsense'"),
        (("--tuned", "nowhere"), "neither a run under"),
        (("--dilation", "0"), "must be above 0"),
    ],
)
def test_bad_flags_start_nothing(
    comparison: Comparison, stand_in: StandIn, words: tuple[str, ...], message: str
) -> None:
    ended = comparison.run(*words)
    assert ended.status == 2
    assert message in ended.only_line()
    assert stand_in.calls == []
    assert not comparison.out.exists()


@pytest.mark.parametrize("text", ["mixed=", "mixed=x", "=3", "mixed=0", "mixed=-1", "mixed=inf", "mixed=nan", "3"])
def test_rates_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        given_rates([text], ["mixed"])
    assert given_rates(["mixed=10.1"], ["mixed"]) == {"mixed": 10.1}


@pytest.mark.slow
def test_two_policies_on_real_emulated_engines(rutter: Rutter, tmp_path: Path) -> None:
    comparison = Comparison(rutter, tmp_path, *TWO)
    ended = comparison.run("--seeds", "1", "--dilation", "0.3")
    assert ended.status == 0, ended.error
    assert "gates passed in" in ended.out
    found = ResultFile(comparison.out, "emulated").rows()
    assert [row.policy for row in found] == ["always_local", "round_robin"]
    for row in found:
        assert (row.requests, row.failed, row.dilation) == (100, 0, 0.3)
        # A busy machine may be late; then the run says so and does not count.
        assert row.counted == (row.kept_schedule and row.kept_pace is True)
        assert row.ttft_p50_s is not None and 0.0 < row.ttft_p50_s < 10.0
    local = sorted((tmp_path / "run").glob("run-chat-always_local-*/journal/*.jsonl"))
    assert len(local) == 1
    assert processes_of(tmp_path) == {}
