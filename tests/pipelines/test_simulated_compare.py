"""`rutter compare --cluster simulated`: its rows, how it continues, what it leaves out and refuses."""

import csv
from pathlib import Path

import msgspec
import pytest
from small_runs import Ended, Rutter

from learn.contenders import CONTENDERS, RUTTER
from pipelines import simulated_compare
from pipelines.grid_cell import Cell, Judged, make_cell
from pipelines.simulated_compare import topology_of
from pipelines.workload_spec import HELD_OUT_SEED
from serve_table.errors import ConfigError

FIRST_COLUMNS = [
    *("workload", "prefill_engines", "decode_engines", "policy", "seed", "goodput"),
    *("ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p50_s", "tpot_p90_s", "tpot_p99_s", "cluster_kind"),
]
WORDS = ["--workloads", "chat", "--requests", "120", "--seeds", "2", "--trials", "3", "--jobs", "1"]
SMALL = ["--topologies", "1P+2D", "2P+2D"]
FEW = ["--policies", "round_robin", "dynamo_style"]
ALL = [*CONTENDERS, RUTTER]


class Grid:
    """A simulated comparison in a folder of its own, run again and again."""

    def __init__(self, rutter: Rutter, folder: Path) -> None:
        self.rutter = rutter
        self.folder = folder
        self.out = folder / "grid.csv"

    def run(self, *words: str | Path) -> Ended:
        places = ("--run-dir", self.folder / "run", "--out", self.out)
        return self.rutter("compare", "--cluster", "simulated", *places, *WORDS, *words)

    def rows(self) -> list[dict[str, str]]:
        with open(self.out, newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture
def grid(rutter: Rutter, tmp_path: Path) -> Grid:
    return Grid(rutter, tmp_path)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cells that were made, with their policies."""
    cells: list[str] = []

    def noting(cell: Cell) -> Cell:
        cells.append(f"{cell.config} {' '.join(contender.policy for contender in cell.contenders)}")
        return make_cell(cell)

    monkeypatch.setattr(simulated_compare, "make_cell", noting)
    return cells


def test_one_row_a_cell_policy_and_seed_at_the_cell_s_rate(grid: Grid) -> None:
    ended = grid.run("--topologies", "1P+2D")
    assert ended.status == 0, ended.error
    rows = grid.rows()
    assert list(rows[0])[: len(FIRST_COLUMNS)] == FIRST_COLUMNS
    seeds = (HELD_OUT_SEED, HELD_OUT_SEED + 1)
    assert {(row["policy"], int(row["seed"])) for row in rows} == {(n, seed) for n in ALL for seed in seeds}
    assert len(rows) == 2 * len(ALL)
    for row in rows:
        assert (row["workload"], row["prefill_engines"], row["decode_engines"]) == ("chat", "1", "2")
        assert (row["cluster_kind"], row["counted"], row["requests"]) == ("simulated", "true", "120")
        assert 0.0 < float(row["goodput"]) <= 1.0
        assert 0.0 < float(row["ttft_p50_s"]) <= float(row["ttft_p90_s"]) <= float(row["ttft_p99_s"])
        assert 0.0 < float(row["tpot_p50_s"]) <= float(row["tpot_p90_s"]) <= float(row["tpot_p99_s"])
    assert len({row["requests_per_s"] for row in rows}) == 1
    assert "1P+2D, mean goodput:" in ended.out
    assert "chat at " in ended.out
    assert "paired over 2 seeds" in ended.out
    assert "rutter against the best baseline of each of 1 cells" in ended.out
    # Tuned parameters stay in the run folder.
    (path,) = grid.folder.glob("run/cell-chat-1P+2D-dynamo_style-*/judged.json")
    judged = msgspec.json.decode(path.read_bytes(), type=Judged)
    assert judged.params.keys() >= {"mode", "eff_isl_threshold_tokens"}
    assert 0.0 < judged.training_goodput <= 1.0


def test_f35_a_killed_comparison_continues_with_the_missing_cells(
    grid: Grid, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def dying(cell: Cell) -> Cell:
            if cell.config.prefill_engines == 2:
                raise KeyboardInterrupt
            return make_cell(cell)

        patch.setattr(simulated_compare, "make_cell", dying)
        assert grid.run(*SMALL, *FEW).status != 0
    before = grid.rows()
    assert {row["prefill_engines"] for row in before} == {"1"}
    ended = grid.run(*SMALL, *FEW)
    assert ended.status == 0, ended.error
    assert "1 of 2 cells are done" in ended.out
    assert made == ["chat 2P+2D round_robin dynamo_style"]
    rows = grid.rows()
    assert len(rows) == 2 * len(before)
    assert all(row in rows for row in before)
    again = grid.run(*SMALL, *FEW)
    assert "2 of 2 cells are done" in again.out
    assert (len(made), grid.rows()) == (1, rows)


def test_f20_rows_follow_from_the_seeds_and_lost_ones_are_written_again(
    grid: Grid, made: list[str], tmp_path: Path
) -> None:
    grid.run("--topologies", "1P+2D", *FEW)
    rows = grid.rows()
    other = Grid(grid.rutter, tmp_path / "other")
    assert other.run("--topologies", "1P+2D", *FEW).status == 0
    assert other.rows() == rows
    grid.out.unlink()
    assert grid.run("--topologies", "1P+2D", *FEW).status == 0
    assert (grid.rows(), len(made)) == (rows, 2)


def test_another_policy_is_added_and_more_trials_or_seeds_go_on_from_the_same_search(
    grid: Grid, made: list[str]
) -> None:
    grid.run("--topologies", "1P+2D", "--policies", "round_robin", "dynamo_style")
    grid.run("--topologies", "1P+2D", "--policies", "round_robin", "dynamo_style", "clusters")
    grid.run("--topologies", "1P+2D", "--policies", "round_robin", "dynamo_style", "--trials", "4")
    assert made == ["chat 1P+2D round_robin dynamo_style", "chat 1P+2D clusters", "chat 1P+2D dynamo_style"]
    (study,) = grid.folder.glob("run/cell-chat-1P+2D-dynamo_style-*/study.log")
    assert study.read_text().count('"op_code":4') == 4
    ended = grid.run("--topologies", "1P+2D", "--policies", "round_robin", "dynamo_style", "--seeds", "3")
    assert ended.status == 0
    assert len([row for row in grid.rows() if row["policy"] == "dynamo_style"]) == 3


def test_public_traces_that_are_not_at_hand_are_left_out_with_a_line(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    lines = [f"2023-11-16 18:{i // 60:02d}:{i % 60:02d}.0000000,{700 + i},{40 + i % 90}" for i in range(300)]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines])
    (folder / "AzureLLMInferenceTrace_conv.csv").write_text(text)
    monkeypatch.setenv("RUTTER_TRACES", str(folder))
    monkeypatch.setattr(simulated_compare, "DEFAULT_WORKLOADS", simulated_compare.TRACES)
    words = ["--cluster", "simulated", "--run-dir", tmp_path / "run", "--out", grid.out, "--topologies", "1P+1D"]
    ended = grid.rutter("compare", *words, "--policies", "round_robin", "--requests", "120", "--jobs", "1")
    assert ended.status == 0, ended.error
    assert "azure-code is left out: " in ended.out
    assert "mooncake-conv is left out: " in ended.out
    assert "azure-conv: 300 requests have room for 1 windows of 120 besides training's, not 3" in ended.out
    assert [(row["workload"], row["seed"]) for row in grid.rows()] == [("azure-conv", str(HELD_OUT_SEED))]
    asked = grid.run("--workloads", "azure-code")
    assert asked.status == 1
    assert "AzureLLMInferenceTrace_code.csv" in asked.only_line()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--topologies", "2P4D"), "give each as 2P+4D"),
        (("--topologies", "0P+4D"), "at least one engine of both kinds"),
        (("--policies", "price"), "policy 'price' is not compared in the simulator; known: round_robin"),
        (("--rate", "chat=3"), "--rate is for live clusters"),
        (("--dilation", "2"), "--dilation is for live clusters"),
        (("--decode", "6"), "name them as --topologies"),
        (("--seed", "5"), "seed 5 could be training's"),
        (("--trials", "0"), "at least 1"),
        (("--jobs", "0"), "at least 1"),
        (("--requests", "99"), "at least 100"),
        (("--workloads", "nonsense"), "unknown trace 'nonsense'"),
    ],
)
def test_bad_flags_make_nothing(grid: Grid, words: tuple[str, ...], message: str) -> None:
    ended = grid.run(*words)
    assert ended.status == 2
    assert message in ended.only_line()
    assert not grid.out.exists()


def test_learned_policies_of_the_simulator_are_not_for_live_clusters(grid: Grid) -> None:
    ended = grid.rutter("compare", "--policies", "clusters")
    assert ended.status == 2
    assert "unknown policy 'clusters'" in ended.only_line()


@pytest.mark.parametrize(("text", "engines"), [("1P+2D", (1, 2)), ("12P+34D", (12, 34))])
def test_topologies_are_read(text: str, engines: tuple[int, int]) -> None:
    assert topology_of(text) == engines
    for wrong in (f" {text}", f"{text} ", text.lower(), "P+D", "1P+0D"):
        with pytest.raises(ConfigError):
            topology_of(wrong)


@pytest.mark.slow
def test_cells_are_made_in_parallel_with_the_same_rows(grid: Grid, tmp_path: Path) -> None:
    assert grid.run(*SMALL, *FEW).status == 0
    other = Grid(grid.rutter, tmp_path / "parallel")
    ended = other.run(*SMALL, *FEW, "--jobs", "2")
    assert ended.status == 0, ended.error
    assert other.rows() == grid.rows()
