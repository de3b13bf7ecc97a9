"""`rutter frontier`: loads and engines on a comparison's run folder, and what it says of them."""

import csv
from pathlib import Path

import pytest
from small_runs import Rutter

from pipelines.frontier import ELASTIC, ENGINE_COUNTS, ENGINE_POLICIES, LOAD_POLICIES
from pipelines.frontier_report import ENGINES, LOAD, SPLITS, FrontierRow, engine_lines, load_lines
from pipelines.grid_rivals import nearest


def rows_in(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_every_policy_at_every_load_and_on_every_number_of_engines(
    rutter: Rutter, compared_once: Path, tmp_path: Path
) -> None:
    out = tmp_path / "frontier.csv"
    words = ("--topology", "1P+2D", "--loads", "0.5", "1.0", "1.6", "--engines-workload", "chat", "--jobs", "1")
    ended = rutter("frontier", "--run-dir", compared_once, "--out", out, *words)
    assert ended.status == 0, ended.error
    loads = [row for row in rows_in(out) if row["part"] == LOAD]
    assert {row["workload"] for row in loads} == {"chat", "documents"}
    assert len(loads) == 2 * 3 * len((*LOAD_POLICIES, ELASTIC))
    chat = {(row["policy"], row["load"]): float(row["goodput"]) for row in loads if row["workload"] == "chat"}
    # A third engine's time to decode in is worth the most where two have too little.
    assert chat[ELASTIC, "1.6"] > chat["rutter", "1.6"]
    # The comparison's rate is where round robin is in mid-collapse.
    assert chat["round_robin", "0.5"] > chat["round_robin", "1"] > chat["round_robin", "1.6"]
    engines = [row for row in rows_in(out) if row["part"] == ENGINES]
    assert len(engines) == len(ENGINE_COUNTS) * (len(ENGINE_POLICIES) + 1)
    assert {(row["prefill_engines"], row["decode_engines"]) for row in engines} >= {("1", "2"), ("0", "3"), ("2", "5")}
    assert "chat on 1P+2D, load at goodput 0.90" in ended.out
    assert "rutter on 3 engines is" in ended.out


def test_other_splits_of_the_engines_and_what_is_advised(rutter: Rutter, compared_once: Path, tmp_path: Path) -> None:
    out = tmp_path / "frontier.csv"
    words = ("--topology", "1P+2D", "--loads", "0.5", "1.0", "--engines-workload", "chat", "--jobs", "1", "--splits")
    ended = rutter("frontier", "--run-dir", compared_once, "--out", out, "--workloads", "chat", *words)
    assert ended.status == 0, ended.error
    splits = [row for row in rows_in(out) if row["part"] == SPLITS]
    assert [(row["prefill_engines"], row["decode_engines"], row["policy"]) for row in splits] == [
        ("0", "3", "rutter"),
        ("1", "2", "rutter"),
        ("1", "2", "rutter_elastic"),
        ("2", "1", "rutter"),
    ]
    assert "chat: splits of 3 engines: none " in ended.out
    assert "would serve it better" in ended.out


def test_what_was_not_compared_is_named(rutter: Rutter, compared_once: Path, tmp_path: Path) -> None:
    words = ("frontier", "--run-dir", compared_once, "--out", tmp_path / "out.csv", "--jobs", "1")
    ended = rutter(*words, "--workloads", "mixed", "--topology", "1P+2D")
    assert ended.status == 1
    assert "no rutter on mixed 1P+2D: run `rutter compare --cluster simulated` with it" in ended.only_line()
    assert rutter(*words, "--loads", "1").status == 2
    assert rutter(*words, "--topology", "2P4D").status == 2
    assert not (tmp_path / "out.csv").exists()


def row(part: str, policy: str, engines: tuple[int, int], load: float, goodput: float) -> FrontierRow:
    return FrontierRow(
        part=part,
        workload="mixed",
        prefill_engines=engines[0],
        decode_engines=engines[1],
        policy=policy,
        load=load,
        requests_per_s=9.0 * load,
        goodput=goodput,
        goodput_low=goodput,
        goodput_high=goodput,
        runs=8,
    )


def test_loads_are_held_against_dynamo_style() -> None:
    goodput = {"rutter": (0.98, 0.94, 0.86), "dynamo_style": (0.95, 0.85, 0.7), "round_robin": (0.8, 0.7, 0.6)}
    rows = [row(LOAD, name, (2, 4), 1.0 + k, value) for name, found in goodput.items() for k, value in enumerate(found)]
    assert load_lines(rows) == [
        "mixed on 2P+4D, load at goodput 0.90 (1 is 9 requests/s):",
        "  rutter carries 2.50, 1.67 times dynamo_style's",
        "  dynamo_style carries 1.50",
        "  round_robin carries no load of these, or all",
    ]


@pytest.mark.parametrize(("least", "verdict"), [(0.45, "not below round robin: +0.050"), (0.3, "below round robin: -")])
def test_engines_that_are_enough_and_the_fewest_of_all(least: float, verdict: str) -> None:
    goodput = {"rutter": (least, 0.9, 0.95), "round_robin": (0.4, 0.8, 0.85)}
    clusters = [(1, 2), (2, 3), (2, 5)]
    rows = [row(ENGINES, name, clusters[k], 1.0, v) for name, found in goodput.items() for k, v in enumerate(found)]
    lines = engine_lines(rows)
    assert "  rutter on 5 engines matches round robin on 7 (0.850)" in lines
    assert verdict in lines[-1]


def test_the_nearest_topology_has_as_many_engines_or_nearly() -> None:
    known = [(1, 2), (2, 2), (2, 4), (2, 6)]
    assert nearest(known, 2, 4) == (2, 4)
    assert nearest(known, 2, 5) == (2, 4)
    assert nearest(known, 1, 1) == (1, 2)
    assert nearest(known, 3, 8) == (2, 6)
