"""`rutter export --confirm live`: what is run, when something new is exported, and when to keep what is there."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from live_stand_in import StandIn, stand_in
from small_runs import TRAIN, Ended, Rutter, simulated_journal

from learn.objective import latency_gain
from learn.simulation import Topology
from learn.table import with_price
from pipelines.confirm_verdict import Gain, Runs, Verdict, run_lines, verdict_lines, verdict_of
from pipelines.export import NOTHING_CONFIRMED
from pipelines.stages import Run
from pipelines.workload_spec import HELD_OUT_SEED
from serve_table.artifact import load, save
from serve_table.step_time import A40_3B

__all__ = ["stand_in"]

N_REQUESTS = 100
CONFIRM = ["--held-out", "2", "--confirm", "live", "--confirm-requests", str(N_REQUESTS), "--confirm-seeds", "2"]


@dataclass(frozen=True)
class Fixed:
    """A run whose requests all took the same."""

    goodput: float
    ttft: float = 0.1

    @property
    def ttft_s(self) -> npt.NDArray[np.float64]:
        return np.full(4, self.ttft)

    @property
    def tpot_s(self) -> npt.NDArray[np.float64]:
        return np.full(4, np.nan)

    def percentile(self, column: str, q: float) -> float | None:
        return float(np.percentile(getattr(self, column), q))


def runs_of(*goodput: float | None) -> Sequence[Fixed | None]:
    return [None if value is None else Fixed(value) for value in goodput]


def judged(runs: dict[str, Runs], learned: Sequence[str], opponents: Sequence[str]) -> Verdict:
    return verdict_of(runs, learned, opponents, "goodput", 400)


def test_the_best_of_those_that_beat_the_best_opponent_beyond_the_interval_is_chosen() -> None:
    runs: dict[str, Runs] = {
        "new": runs_of(0.92, 0.82, 0.72),
        "newer": runs_of(0.95, 0.85, 0.76),
        "lucky": runs_of(0.99, 0.99, 0.50),
        "current": runs_of(0.90, 0.80, 0.70),
        "baseline": runs_of(0.85, 0.82, 0.60),
    }
    verdict = judged(runs, ["new", "newer", "lucky"], ["current", "baseline"])
    assert (verdict.opponent, verdict.chosen) == ("current", "newer")
    assert [gain.confirmed for gain in verdict.gains] == [True, True, False]
    assert verdict.gains[0].gain == pytest.approx(0.02)
    assert verdict_lines(verdict)[-1] == "confirmed: newer"
    # A baseline that does better than the current artifact is the one to beat.
    stronger = judged(runs | {"baseline": runs_of(0.96, 0.86, 0.76)}, ["new", "newer"], ["current", "baseline"])
    assert (stronger.opponent, stronger.chosen) == ("baseline", None)
    assert verdict_lines(stronger)[-1] == ("keep what you have: nothing is better than baseline beyond the interval")


def test_runs_that_do_not_count_confirm_nothing() -> None:
    runs: dict[str, Runs] = {"new": runs_of(0.9, None, 0.9), "baseline": runs_of(0.5, 0.5, None)}
    (gain,) = judged(runs, ["new"], ["baseline"]).gains
    assert (gain.seeds, gain.confirmed) == (1, False)
    assert verdict_lines(judged(runs, ["new"], ["baseline"]))[-1] == (
        "keep what you have: too few runs count to confirm anything"
    )
    (none,) = judged(runs | {"new": runs_of(None, None, None)}, ["new"], ["baseline"]).gains
    assert (none.seeds, none.gain, none.confirmed) == (0, 0.0, False)
    assert run_lines({"new": runs_of(None)}) == ["  new  no run counts"]
    assert run_lines({"new": runs_of(0.9, None)}) == [
        "  new  goodput 0.900, P90 TTFT 100.0 ms, P99 TTFT 100.0 ms; 1 seeds"
    ]


def test_another_objective_is_confirmed_by_its_own_measure() -> None:
    runs: dict[str, Runs] = {
        "new": [Fixed(0.9, 0.08), Fixed(0.8, 0.081)],
        "baseline": [Fixed(0.9, 0.1), Fixed(0.8, 0.1)],
    }
    assert judged(runs, ["new"], ["baseline"]).chosen is None
    verdict = verdict_of(runs, ["new"], ["baseline"], "latency", 400)
    assert verdict.chosen == "new"
    expected = np.mean([latency_gain([a], [b]) for a, b in zip(runs["new"], runs["baseline"], strict=True) if a and b])
    assert verdict.gains[0].gain == pytest.approx(float(expected))


@pytest.fixture
def cluster(stand_in: StandIn) -> StandIn:
    """As the collection's, which the small runs say was a 2P+4D."""
    stand_in.topology = Topology(2, 4, A40_3B, 0.003)
    return stand_in


def export(rutter: Rutter, run_dir: Path, to: Path, *words: str) -> Ended:
    return rutter("export", "--run-dir", run_dir, "--to", to, *CONFIRM, *words)


def test_the_candidate_a_point_of_its_front_the_baseline_and_the_current_artifact_are_run_interleaved(
    trained: Path, rutter: Rutter, cluster: StandIn
) -> None:
    to = trained / "rutter.safetensors"
    assert rutter("export", "--run-dir", trained, "--to", to, "--held-out", "2").status == 0
    assert cluster.calls == []
    worse = with_price(load(to), {"harm_weight": 0.1, "tpot_width": 0.2})
    save(worse, to)
    ended = export(rutter, trained, to)
    assert ended.status in (0, NOTHING_CONFIRMED), ended.error
    assert cluster.calls == ["start", "gates", *["reset", "send"] * 8]
    assert [seed for _, _, seed in cluster.sent] == [HELD_OUT_SEED] * 4 + [HELD_OUT_SEED + 1] * 4
    first, second = ([name for _, name, _ in cluster.sent[i : i + 4]] for i in (0, 4))
    assert first == [*["rutter"] * 3, first[3]]
    assert second == [*first[1:], first[0]]
    for said in (
        "export: live, 2 seeds of 100 requests of mixed:",
        "export:   the candidate ",
        "export:   point 1 of the front ",
        "export:   the current artifact ",
        "export: the candidate against ",
    ):
        assert said in ended.out
    # The same command makes no run again.
    assert export(rutter, trained, to).status == ended.status
    assert len(cluster.sent) == 8


def test_nothing_better_keeps_the_exported_artifact_and_says_so_by_its_status(
    trained: Path, rutter: Rutter, cluster: StandIn
) -> None:
    to = trained / "rutter.safetensors"
    assert rutter("export", "--run-dir", trained, "--to", to, "--held-out", "2").status == 0
    before = (to.read_bytes(), to.stat().st_mtime_ns)
    # What is there already is the candidate itself, so there is nothing new to run.
    ended = export(rutter, trained, to, "--confirm-others", "0")
    assert ended.status == NOTHING_CONFIRMED
    assert "export: keep what you have: there is nothing new to confirm" in ended.out
    assert f"export: {to} is as it was\n" in ended.out
    assert (to.read_bytes(), to.stat().st_mtime_ns) == before
    assert "the candidate" not in {
        line.split("  ")[1] for line in ended.out.splitlines() if line.startswith("export:  ")
    }
    assert [name for _, name, _ in cluster.sent].count("rutter") == 2
    missing = trained / "none.safetensors"
    cluster.fails = N_REQUESTS - 1
    ended = export(rutter, trained, missing, "--confirm-others", "0", "--confirm-requests", "101")
    assert ended.status == NOTHING_CONFIRMED
    assert f"nothing was written to {missing}" in ended.out
    assert not missing.exists()


def test_what_is_better_live_is_exported_with_its_scores_and_its_confirmation(
    trained: Path, rutter: Rutter, cluster: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surely(runs: dict[str, Runs], learned: Sequence[str], *_: object) -> Verdict:
        return Verdict("goodput", "x", (Gain(learned[-1], "x", 2, 0.1, 0.05, 0.15),), learned[-1])

    to = trained / "rutter.safetensors"
    to.write_bytes(b"of an older format")
    monkeypatch.setattr("pipelines.confirm.verdict_of", surely)
    ended = export(rutter, trained, to)
    assert ended.status == 0, ended.error
    assert "is refused" in ended.out
    assert "export: confirmed: point " in ended.out
    run = Run(trained)
    record = run.latest("export")
    verdict = msgspec.json.decode(run.output_path(record, "confirmation").read_bytes(), type=Verdict)
    assert verdict.chosen is not None
    (given,) = trained.glob(f"export-*/{verdict.chosen.replace(' ', '-')}.safetensors")
    assert load(to).price() == load(given).price()
    assert load(to).metadata.held_out != []
    assert "already done" in export(rutter, trained, to).out
    assert len(cluster.sent) == 6


def test_a_late_run_is_made_once_more_and_a_killed_confirmation_continues(
    trained: Path, rutter: Rutter, cluster: StandIn
) -> None:
    to = trained / "rutter.safetensors"
    words = ("--confirm-others", "0")
    cluster.dies_in = 2
    assert export(rutter, trained, to, *words).status != 0
    cluster.dies_in = None
    cluster.late_runs = frozenset({3})
    ended = export(rutter, trained, to, *words)
    assert ended.status in (0, NOTHING_CONFIRMED)
    # One before the kill, the one that was cut short, three more, and the late one again.
    assert len(cluster.sent) == 1 + 1 + 3 + 1


def test_a_run_without_a_cluster_of_its_own_and_wrong_flags_are_refused(
    tmp_path: Path, trained: Path, rutter: Rutter, cluster: StandIn
) -> None:
    journal = simulated_journal(tmp_path / "journal")
    run_dir, to = tmp_path / "other", tmp_path / "rutter.safetensors"
    assert rutter("train", "--run-dir", run_dir, "--journal", journal, *TRAIN).status == 0
    ended = export(rutter, run_dir, to)
    assert ended.status == 2
    assert "this one learned from other journals" in ended.only_line()
    for words in (("--confirm-seeds", "1"), ("--confirm-others", "-1"), ("--confirm-requests", "99")):
        assert export(rutter, trained, to, *words).status == 2
    assert cluster.sent == []
    assert not to.exists()
