"""`rutter saturate`: found, continued, spoilt, and taken over by a comparison."""

from pathlib import Path

import msgspec
import pytest
from live_stand_in import TOPOLOGY, StandIn, stand_in
from small_runs import Ended, Rutter, processes_of

from learn.saturation import round_robin_goodput
from pipelines.saturation_curve import CurveFile, Probe
from pipelines.workload_spec import WorkloadSpec, requests_of
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

__all__ = ["stand_in"]

CLUSTER = ["--prefill", "1", "--decode", "1", "--workloads", "chat", "--requests", "200"]


class Saturation:
    """A search in a run folder of its own, run again and again."""

    def __init__(self, rutter: Rutter, folder: Path) -> None:
        self.rutter, self.folder = rutter, folder / "run"

    def run(self, *words: str) -> Ended:
        return self.rutter("saturate", "--run-dir", self.folder, *CLUSTER, *words)

    def probes(self) -> list[Probe]:
        (path,) = self.folder.glob("saturate-chat-*/curve.jsonl")
        return CurveFile(path).probes()

    def rate(self) -> float:
        (path,) = self.folder.glob("saturate-chat-*/saturation.json")
        rate = msgspec.json.decode(path.read_bytes())["requests_per_s"]
        assert isinstance(rate, float)
        return rate


@pytest.fixture
def saturation(rutter: Rutter, tmp_path: Path, stand_in: StandIn) -> Saturation:
    return Saturation(rutter, tmp_path)


def test_the_rate_is_where_round_robin_passes_the_goodput_on_the_probes_trace(
    saturation: Saturation, stand_in: StandIn
) -> None:
    ended = saturation.run()
    assert ended.status == 0, ended.error
    probes = saturation.probes()
    assert stand_in.calls == ["start", "gates", *["reset", "send"] * len(probes)]
    assert len(probes) <= 8
    assert {probe.seed for probe in probes} == {probes[0].seed}
    assert 2_000_000 <= probes[0].seed < 2_000_020
    assert all(probe.goodput_low < probe.goodput < probe.goodput_high for probe in probes)
    rate = saturation.rate()
    spec = WorkloadSpec("chat", 200, probes[0].seed, 0, rate, 0.3, A40_3B.max_model_len_tokens)
    slo = targets_from_profile(A40_3B)
    assert round_robin_goodput([requests_of(spec)], TOPOLOGY, slo, rate) == pytest.approx(0.78, abs=0.04)
    assert f"chat: {rate:g} requests/s, between" in ended.out
    again = saturation.run()
    assert again.status == 0
    assert "already done" in again.out
    assert (saturation.probes(), saturation.rate()) == (probes, rate)
    assert stand_in.calls.count("start") == 1


def test_f35_a_killed_search_continues_after_its_last_probe(saturation: Saturation, stand_in: StandIn) -> None:
    stand_in.dies_in = 3
    assert saturation.run("--rate", "5").status != 0
    before = saturation.probes()
    assert len(before) == 2
    stand_in.dies_in = None
    ended = saturation.run("--rate", "5")
    assert ended.status == 0, ended.error
    assert "continuing after 2 probes" in ended.out
    assert saturation.probes()[:2] == before


def test_more_probes_continue_the_same_curve(saturation: Saturation, stand_in: StandIn) -> None:
    ended = saturation.run("--probes", "2", "--rate", "1")
    assert ended.status == 1
    assert "run the same command with more --probes" in ended.only_line()
    assert len(saturation.probes()) == 2
    assert saturation.run("--probes", "12").status == 0
    assert [probe.requests_per_s for probe in saturation.probes()[:2]] == [1.0, 1.6]


def test_a_probe_with_late_engines_does_not_count_and_is_made_again(saturation: Saturation, stand_in: StandIn) -> None:
    stand_in.late_runs = frozenset({2})
    ended = saturation.run()
    assert ended.status == 0, ended.error
    assert "this probe does not count, for its late engines" in ended.out
    probes = saturation.probes()
    assert [probe.counted for probe in probes].count(False) == 1
    assert probes[1].requests_per_s == probes[2].requests_per_s


def test_engines_that_are_late_again_and_again_end_the_search(saturation: Saturation, stand_in: StandIn) -> None:
    stand_in.late_runs = frozenset(range(1, 100))
    ended = saturation.run()
    assert ended.status == 1
    assert "take a larger --dilation" in ended.only_line()
    assert len(stand_in.sent) == 2


def test_gates_that_fail_start_no_probe(saturation: Saturation, stand_in: StandIn) -> None:
    stand_in.gate_passes = False
    ended = saturation.run()
    assert ended.status == 1
    assert "the gate 'greedy text' failed" in ended.only_line()
    assert stand_in.sent == []


def test_a_comparison_in_the_same_run_takes_the_rate_that_was_found(
    saturation: Saturation, rutter: Rutter, tmp_path: Path, stand_in: StandIn
) -> None:
    saturation.run()
    words = ["compare", "--run-dir", saturation.folder, "--out", tmp_path / "r.csv", "--policies", "round_robin"]
    ended = rutter(*words, "--seeds", "1", *CLUSTER)
    assert ended.status == 0, ended.error
    assert f"chat: {saturation.rate():g} requests/s, as `rutter saturate` found" in ended.out
    # Of another length the runs are no longer those that were searched with.
    ended = rutter(*words, "--seeds", "1", *CLUSTER, "--requests", "150")
    assert ended.status == 0, ended.error
    assert "none found by `rutter saturate` in this run for 150 requests" in ended.out


@pytest.mark.parametrize(
    "words",
    [
        ("--requests", "19"),
        ("--probes", "1"),
        ("--goodput", "1"),
        ("--rate", "0"),
        ("--seed", "-1"),
        ("--workloads", "nonsense"),
    ],
)
def test_bad_flags_start_nothing(saturation: Saturation, stand_in: StandIn, words: tuple[str, ...]) -> None:
    ended = saturation.run(*words)
    assert ended.status == 2
    assert "internal error" not in ended.error
    assert stand_in.calls == []


@pytest.mark.slow
def test_a_search_on_real_emulated_engines(rutter: Rutter, tmp_path: Path) -> None:
    saturation = Saturation(rutter, tmp_path)
    ended = saturation.run("--requests", "60", "--probes", "2", "--dilation", "0.3", "--rate", "60", "--goodput", "0.9")
    # Two probes need not pass the goodput, and a busy machine may be late; each way is said.
    assert ended.status in (0, 1), ended.error
    probes = saturation.probes()
    assert probes[0].requests_per_s == 60.0
    assert all(probe.requests == 60 and probe.failed == 0 and probe.cluster_kind == "emulated" for probe in probes)
    assert ended.status == 0 or "--probes" in ended.only_line() or "--dilation" in ended.only_line()
    assert processes_of(tmp_path) == {}
