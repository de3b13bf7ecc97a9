"""`rutter check-journal` on whole, torn, foreign and missing journals."""

import json
from pathlib import Path
from typing import Any

import pytest

from learn.simulation import Topology
from pipelines import cli
from pipelines.bench_artifact import full_size_artifact
from serve_table.artifact import save
from serve_table.journal import FORMAT_VERSION, FleetRow, JournalWriter, Row
from serve_table.policy import policy
from serve_table.replay import request_and_fleet
from serve_table.situation import LOCAL, Draws
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

FLEET = FleetRow([0.0], [0.0], [1.0], [0.0], [0.0], [0.0], [1.0], [0.0], [0.0])
ROW: dict[str, Any] = {
    **dict.fromkeys(Row.__struct_fields__),
    "version": FORMAT_VERSION,
    "time": 1.7e9,
    "arrival_s": 1.0,
    "endpoint": "/v1/completions",
    "stream": True,
    "cluster_kind": "emulated",
    "dilation": 1.0,
    "policy": "round_robin",
    "policy_digest": "0",
    "explore": 0.0,
    "rotation": 0,
    "draws": [],
    "prompt_tokens": 100.0,
    "prompt_tokens_source": "ids",
    "predicted_output_tokens": 10.0,
    "slo_class": 0,
    "remote_allowed": True,
    "prefix_hashes": [],
    "hash_block_tokens": 64,
    "prefill_engines": ["p"],
    "decode_engines": ["d"],
    "fleet": FLEET,
    "attempts": 1,
    "status": "ok",
    "e2e_s": 1.0,
    "executed": "local",
}


def journal(folder: Path) -> Path:
    """Three rows: two answered, one of them late, and one that was refused."""
    writer = JournalWriter(folder)
    writer.append(Row(**{**ROW, "request_id": "a", "slo_met": True}))
    writer.append(Row(**{**ROW, "request_id": "b", "slo_met": False, "executed": "remote"}))
    writer.append(Row(**{**ROW, "request_id": "c", "status": "client_error", "fleet": None, "executed": None}))
    writer.close()
    return folder / "journal-000001.jsonl"


def test_counts_by_what_the_rows_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal(tmp_path)
    assert cli.main(["check-journal", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "3 rows in 1 segments, 2 of them with a decision",
        "SLO met: 1 of 2 judged rows (50.0%)",
        "status: ok 2, client_error 1",
    ]
    assert "executed: local 1, remote 1, none 1" in lines
    assert not any("warning" in line for line in lines)


def test_f19_broken_lines_are_counted_with_their_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = journal(tmp_path)
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-20] + b"\n" + b"\0" * 4096)
    assert cli.main(["check-journal", "--json", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["rows"] == 2
    last_row = whole.rstrip().rindex(b"\n") + 1
    assert [line.partition(":")[0] for line in summary["broken"]] == [
        f"{segment} at byte {last_row}",
        f"{segment} at byte {len(whole) - 19}",
    ]
    assert cli.main(["check-journal", "--strict", str(tmp_path)]) == cli.FAILED
    assert capsys.readouterr().err.startswith(f"rutter: {segment} at byte {last_row}: ")


def test_many_broken_lines_are_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(journal(tmp_path), "ab") as file:
        file.write(b"{}\n" * 25)
    assert cli.main(["check-journal", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "warning: 25 broken lines, left out:" in lines
    assert lines[-1] == "  and 5 more; --json lists all"


def test_a_segment_given_twice_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = journal(tmp_path)
    assert cli.main(["check-journal", str(segment), str(tmp_path)]) == 0
    assert "warning: 3 rows repeat a request id" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "folder", b"\x89PNG\n\x1a\n"])
def test_what_is_no_journal_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | str | None
) -> None:
    path = tmp_path / "x.jsonl"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    assert cli.main(["check-journal", str(path)]) == cli.FAILED
    error = capsys.readouterr().err
    assert error.startswith("rutter: ")
    assert str(path) in error
    assert error.count("\n") == 1


def test_f14_rows_are_decided_again_from_what_they_journaled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = full_size_artifact(Topology(1, 1, A40_3B), targets_from_profile(A40_3B), 300, 1)
    save(artifact, tmp_path / "table.safetensors")
    table = policy("table", artifact=artifact)
    decided = {**ROW, "policy": "table", "policy_digest": table.digest, "draws": [0.5, 0.5, 0.5, 0.5]}
    remote = {"action": "remote", "prefill_engine": "p", "decode_engine": "d"}
    local = {"action": "local", "prefill_engine": None, "decode_engine": "d"}
    request, fleet = request_and_fleet(Row(**{**decided, "request_id": "?"}))
    right, wrong = remote, local
    if table.decide(request, fleet, 0, 0.0, Draws(0.5, 0.5, 0.5, 0.5)).action == LOCAL:
        right, wrong = local, remote
    writer = JournalWriter(tmp_path / "journal")
    writer.append(Row(**{**decided, **right, "request_id": "right"}))
    writer.append(Row(**{**ROW, "request_id": "other policy"}))
    writer.close()
    words = ["check-journal", str(tmp_path / "journal"), "--artifact", str(tmp_path / "table.safetensors")]
    assert cli.main(words) == 0
    assert "decided again from the journaled features: 1 of 1 alike, 1 left out" in capsys.readouterr().out
    writer = JournalWriter(tmp_path / "journal")
    writer.append(Row(**{**decided, **wrong, "request_id": "wrong"}))
    writer.close()
    assert cli.main(words) == 1
    assert "warning: decided otherwise: wrong" in capsys.readouterr().out
