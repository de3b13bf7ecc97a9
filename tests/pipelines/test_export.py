"""`rutter export`: judged on what training did not see, written whole or not at all, strict JSON."""

import errno
import os
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from small_runs import N_REQUESTS, TRAIN, Rutter, simulated_journal

from learn.frame import clean_journal
from pipelines.export import held_out_traces, score_lines
from pipelines.stages import Run
from pipelines.train import journal_runs, training_traces
from pipelines.train_config import TrainConfig
from pipelines.workload_spec import requests_of
from serve_table.artifact import MAX_BYTES, load
from serve_table.artifact_metadata import Score
from serve_table.policy import POLICIES

JUDGED = ("--held-out", "3")


def config_of(run_dir: Path) -> TrainConfig:
    return msgspec.json.decode(Run(run_dir).latest("train").config, type=TrainConfig)


def test_export_judges_every_policy_and_writes_the_artifact_once(trained: Path, rutter: Rutter) -> None:
    path = trained / "deep" / "rutter.safetensors"
    ended = rutter("export", "--run-dir", trained, "--to", path, *JUDGED)
    assert ended.status == 0, ended.error
    artifact = load(path)
    assert {score.policy for score in artifact.metadata.held_out} == set(POLICIES) - {"rutter"}
    goodputs = [score.goodput for score in artifact.metadata.held_out]
    assert goodputs == sorted(goodputs, reverse=True)
    assert path.stat().st_size <= MAX_BYTES
    for said in (
        "export: judging on 3 held-out traces (other seeds of mixed at 8 requests/s)",
        "export: splits of 6 engines: none ",
        f"journal: {N_REQUESTS} rows used, dropped: none; emulated cluster 2P+4D, workload mixed, dilation 1",
        f"artifact: {path}, {path.stat().st_size} bytes, digest {artifact.digest()}",
    ):
        assert said in ended.out
    assert re.search(
        rf"the {artifact.metadata.policy} is (better than|worse than|level with) the best baseline, \w+: goodput [+-]",
        ended.out,
    )
    assert f"policy 'rutter' is its {artifact.metadata.policy}" in ended.out
    for score in artifact.metadata.held_out:
        assert re.search(rf"^{score.policy} +{score.goodput:.3f}  ", ended.out, re.MULTILINE)
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    again = rutter("export", "--run-dir", trained, "--to", path, *JUDGED)
    assert again.status == 0
    assert again.out.startswith("export: already done, nothing has changed since\n")
    assert again.out.splitlines()[-1] == ended.out.splitlines()[-1]
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_f20_the_same_candidate_is_exported_to_the_same_bytes(trained: Path, rutter: Rutter) -> None:
    paths = [trained / name for name in ("a.safetensors", "b.safetensors")]
    for path in paths:
        assert rutter("export", "--run-dir", trained, "--to", path, *JUDGED).status == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_lost_or_altered_artifact_is_made_anew(trained: Path, rutter: Rutter) -> None:
    path = trained / "rutter.safetensors"
    rutter("export", "--run-dir", trained, "--to", path, *JUDGED)
    good = path.read_bytes()
    for spoil in (path.unlink, lambda: path.write_bytes(b"other")):
        spoil()
        ended = rutter("export", "--run-dir", trained, "--to", path, *JUDGED)
        assert ended.status == 0
        assert "judging" in ended.out
        assert path.read_bytes() == good


def test_held_out_traces_are_of_the_same_kind_and_hold_no_request_of_training(trained: Path) -> None:
    config = config_of(trained)
    traces, where = held_out_traces(config, 4)
    assert where == "other seeds of mixed at 8 requests/s"
    assert config.workload is not None
    sent = requests_of(config.workload)
    assert {len(trace) for trace in traces} == {len(sent)}
    rates = [(len(trace) - 1) / trace.arrival_s[-1] for trace in traces]
    assert rates == pytest.approx([8.0] * 4, rel=0.02)
    assert len({trace.prompt_tokens.tobytes() for trace in [sent, *traces]}) == 5


def test_a_journal_from_elsewhere_is_judged_on_its_later_part(tmp_path: Path, rutter: Rutter) -> None:
    journal = simulated_journal(tmp_path / "journal")
    run_dir, path = tmp_path / "run", tmp_path / "rutter.safetensors"
    assert rutter("train", "--run-dir", run_dir, "--journal", journal, *TRAIN).status == 0
    ended = rutter("export", "--run-dir", run_dir, "--to", path, *JUDGED)
    assert ended.status == 0, ended.error
    assert f"resampled from the last {N_REQUESTS // 4} of {N_REQUESTS} journaled requests" in ended.out
    assert load(path).metadata.workload == "journal"
    config = config_of(run_dir)
    runs = journal_runs([journal], clean_journal([journal]))
    (seen,) = training_traces(runs, config)
    seen_pairs = set(zip(seen.prompt_tokens.tolist(), seen.output_tokens.tolist(), strict=True))
    later = runs[0].trace.window(len(seen), N_REQUESTS)
    traces, _ = held_out_traces(config, 2)
    for trace in traces:
        pairs = set(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
        assert pairs <= set(zip(later.prompt_tokens.tolist(), later.output_tokens.tolist(), strict=True))
        assert pairs.isdisjoint(seen_pairs)
        assert len(trace) == N_REQUESTS


def test_what_must_come_first_is_named(tmp_path: Path, rutter: Rutter) -> None:
    ended = rutter("export", "--run-dir", tmp_path / "run", "--to", tmp_path / "a")
    assert (ended.status, ended.only_line()) == (
        1,
        f"rutter: the run in {tmp_path / 'run'} has no 'train' yet: run `rutter train` first",
    )
    assert rutter("export", "--run-dir", tmp_path / "run", "--held-out", "1").status == 2
    assert rutter("export", "--no-such-flag").status == 2


def test_f35_f36_scores_that_are_no_numbers_leave_the_old_artifact(
    trained: Path, rutter: Rutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trained / "rutter.safetensors"
    assert rutter("export", "--run-dir", trained, "--to", path, *JUDGED).status == 0
    before = path.read_bytes()
    monkeypatch.setattr("learn.simulation.Simulated.goodput", property(lambda _run: np.nan))
    ended = rutter("export", "--run-dir", trained, "--to", path, "--held-out", "4")
    assert ended.status == 1
    assert "goodput of 'round_robin' is nan: an artifact holds finite numbers only" in ended.only_line()
    assert path.read_bytes() == before


def test_a_full_disk_leaves_the_old_artifact_and_no_half_of_a_new_one(
    trained: Path, rutter: Rutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trained / "out" / "rutter.safetensors"
    assert rutter("export", "--run-dir", trained, "--to", path, *JUDGED).status == 0
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        ended = rutter("export", "--run-dir", trained, "--to", path, "--held-out", "4")
    assert ended.status == 1
    assert "No space left on device" in ended.only_line()
    assert [file.name for file in path.parent.iterdir()] == ["rutter.safetensors"]
    assert path.read_bytes() == before
    assert rutter("export", "--run-dir", trained, "--to", path, "--held-out", "4").status == 0


def test_a_place_that_cannot_be_written_is_named(trained: Path, rutter: Rutter) -> None:
    for path in (Path("/dev/full/rutter.safetensors"), Path("/proc/rutter.safetensors")):
        ended = rutter("export", "--run-dir", trained, "--to", path, *JUDGED)
        assert ended.status == 1
        assert f"cannot write {path}" in ended.only_line()


def test_an_altered_candidate_is_not_exported(trained: Path, rutter: Rutter) -> None:
    (candidate,) = trained.glob("train-*/candidate.safetensors")
    candidate.write_bytes(candidate.read_bytes()[:-1])
    ended = rutter("export", "--run-dir", trained, "--to", trained / "a.safetensors")
    assert ended.status == 1
    assert "was changed since it was made: run `rutter train` again" in ended.only_line()
    assert not (trained / "a.safetensors").exists()


def test_scores_without_a_time_show_a_dash() -> None:
    header, line = score_lines([Score("some", 0.5, 0.4, 0.6, 0.1, 0.2, None)])
    assert header.split() == ["policy", "goodput", "95", "%", "interval", "P90", "TTFT", "P99", "TTFT", "P90", "TPOT"]
    assert line.split() == ["some", "0.500", "0.400", "-", "0.600", "100.0", "ms", "200.0", "ms", "-"]
