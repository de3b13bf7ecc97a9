"""`rutter ablate`: every change on every workload, against the learned policy."""

import csv
from pathlib import Path

import pytest
from small_runs import Rutter

from learn.ablations import ABLATIONS, FULL


def test_every_change_on_every_workload(rutter: Rutter, compared_once: Path, tmp_path: Path) -> None:
    out = tmp_path / "ablate.csv"
    words = ("ablate", "--run-dir", compared_once, "--out", out, "--topology", "1P+2D", "--jobs", "1")
    ended = rutter(*words)
    assert ended.status == 0, ended.error
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    names = {ablation.name for ablation in ABLATIONS}
    assert {(row["workload"], row["change"]) for row in rows} == {(w, n) for w in ("chat", "documents") for n in names}
    with open(compared_once.parent / "grid.csv", newline="") as file:
        judged = [
            float(r["goodput"]) for r in csv.DictReader(file) if (r["workload"], r["policy"]) == ("chat", "rutter")
        ]
    (learned,) = [row for row in rows if (row["workload"], row["change"]) == ("chat", FULL)]
    assert float(learned["goodput"]) == pytest.approx(sum(judged) / len(judged), abs=1e-6)
    assert (float(learned["difference"]), int(learned["runs"])) == (0.0, 2)
    header = next(line for line in ended.out.splitlines() if line.startswith("1P+2D, goodput"))
    assert header.split()[-2:] == ["chat", "documents"]
    missing = rutter(*words, "--workloads", "mixed")
    assert missing.status == 1
    assert "no rutter on mixed 1P+2D" in missing.only_line()
