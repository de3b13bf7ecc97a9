"""`rutter train`: repeatable, resumable, and in one line what is wrong with its input."""

import errno
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import optuna
import pytest
from small_runs import (
    N_REQUESTS,
    TRAIN,
    Rutter,
    simulated_collection,
    simulated_journal,
    simulated_rows,
    started,
    wait_for,
)
from synthetic_rows import journal_row, line_of, write_journal

from learn.frame import clean_journal
from learn.study import StoredStudy, count_tried
from pipelines.stages import Run
from pipelines.train import JOURNAL_TRAINING_SHARE, journal_runs, training_traces
from pipelines.train_config import TrainConfig, study_digest
from pipelines.train_search import front_from, front_lines
from serve_table.artifact import load
from serve_table.step_time import A40_3B


def candidate_in(run_dir: Path) -> Path:
    run = Run(run_dir)
    return run.output_path(run.latest("train"), "candidate")


def test_train_learns_from_what_the_run_collected_and_says_when_it_is_done(trained: Path, rutter: Rutter) -> None:
    artifact = load(candidate_in(trained))
    metadata = artifact.metadata
    assert (metadata.journal_rows, metadata.workload, metadata.cluster_kind) == (N_REQUESTS, "mixed", "emulated")
    assert (metadata.prefill_engines, metadata.decode_engines) == (2, 4)
    assert (metadata.seed, metadata.search_jobs, metadata.trials, metadata.sampler) == (0, 1, 10, "TPE, multivariate")
    assert metadata.policy in ("table", "price")
    assert artifact.price().kv_tokens == A40_3B.kv_tokens
    again = rutter("train", "--run-dir", trained, *TRAIN)
    assert again.status == 0
    assert again.out == f"train: already done, candidate in {candidate_in(trained)}\n"


def test_f20_trained_twice_with_one_job_and_the_same_seed_gives_the_same_bytes(trained: Path, rutter: Rutter) -> None:
    first = candidate_in(trained)
    again = rutter("train", "--run-dir", trained.parent / "again", *TRAIN)
    assert again.status == 1  # nothing collected there
    simulated_collection(trained.parent / "again")
    assert rutter("train", "--run-dir", trained.parent / "again", *TRAIN).status == 0
    assert candidate_in(trained.parent / "again").read_bytes() == first.read_bytes()
    assert rutter("train", "--run-dir", trained.parent / "again", *TRAIN, "--seed", "1").status == 0
    assert candidate_in(trained.parent / "again").read_bytes() != first.read_bytes()


@pytest.mark.slow
def test_f35_a_killed_search_is_continued_and_ends_with_the_same_bytes(trained: Path, rutter: Rutter) -> None:
    run_dir = trained.parent / "killed"
    simulated_collection(run_dir)

    def done() -> int:
        return sum(path.read_bytes().count(b'"op_code":4') for path in run_dir.glob("train-*/study.log"))

    with started("train", "--run-dir", run_dir, *TRAIN) as process:
        wait_for(lambda: done() >= 13 or process.poll() is not None)
        process.kill()
        process.wait()
    assert 13 <= done() <= 60
    ended = rutter("train", "--run-dir", run_dir, *TRAIN)
    assert ended.status == 0
    assert done() == 60
    assert candidate_in(run_dir).read_bytes() == candidate_in(trained).read_bytes()


def test_train_works_on_a_database_which_several_machines_can_share(trained: Path, rutter: Rutter) -> None:
    url = f"sqlite:///{trained.parent / 'study.db'}"
    assert rutter("train", "--run-dir", trained, *TRAIN, "--storage", url).status == 0
    names = optuna.get_all_study_names(url)
    assert {name.split(" ")[1] for name in names} == {
        "table",
        "price",
        "length_threshold",
        "dynamo_style",
        "class_aware",
        "marginal_cost",
    }
    for name in names:
        assert count_tried(StoredStudy(url, name).trials()) == 10
    # Another machine, with more cores, finds the search done.
    ended = rutter("train", "--run-dir", trained, "--trials", "10", "--jobs", "3", "--storage", url)
    assert ended.status == 0
    assert optuna.get_all_study_names(url) == names


def test_a_study_is_shared_across_cores_paths_and_budgets_but_not_seeds() -> None:
    config = TrainConfig({"/a": "1f", "/b": "2e"}, "a40-3b", None, 300, 2, 0, None, None)
    same = TrainConfig(
        {"/x": "2e", "/y": "1f"}, "a40-3b", None, 600, 64, 0, "postgresql://h/d", None, minutes=5.0, start="3c"
    )
    assert study_digest(config) == study_digest(same)
    assert study_digest(config) != study_digest(msgspec.structs.replace(config, seed=1))
    assert study_digest(config) != study_digest(msgspec.structs.replace(config, journals={"/a": "1f"}))


def test_a_journal_from_elsewhere_is_split_by_time(tmp_path: Path, rutter: Rutter) -> None:
    journal = simulated_journal(tmp_path / "journal")
    ended = rutter("train", "--run-dir", tmp_path / "run", "--journal", journal, *TRAIN)
    assert ended.status == 0
    metadata = load(candidate_in(tmp_path / "run")).metadata
    assert (metadata.workload, metadata.journal_rows) == ("journal", N_REQUESTS)
    config = msgspec.json.decode(Run(tmp_path / "run").latest("train").config, type=TrainConfig)
    runs = journal_runs([journal], clean_journal([journal]))
    (seen,) = training_traces(runs, config)
    assert len(seen) == N_REQUESTS * JOURNAL_TRAINING_SHARE
    assert seen.arrival_s[-1] < np.quantile(runs[0].trace.arrival_s, 0.76)
    # Another spelling of its path is the same journal.
    other = tmp_path / "run" / ".." / "journal"
    assert "already done" in rutter("train", "--run-dir", tmp_path / "run", "--journal", other, *TRAIN).out


def test_train_leaves_the_front_and_says_what_its_ends_are(trained: Path, rutter: Rutter) -> None:
    run = Run(trained)
    front = front_from(run.output_path(run.latest("train"), "pareto"))
    assert front == sorted(front, key=lambda point: -point.goodput)
    lines = front_lines(front)
    assert lines[0].startswith(f"{len(front)} points of the price that no other one beats")
    assert [line.split(":")[0] for line in lines[1:]] == ["  highest goodput", "  lowest latency", "  shortest tail"]
    assert f"goodput {front[0].goodput:.3f}, P90 TTFT {front[0].ttft_p90_ratio - 1.0:+.0%}" in lines[1]
    ended = rutter("train", "--run-dir", trained, *TRAIN, "--objective", "latency")
    assert ended.status == 0
    assert "train: price: latency objective " in ended.out
    assert "train: training goodput " in ended.out
    # The front outlives the search that made it, as the candidate does.
    assert front_from(run.output_path(run.latest("train"), "pareto")) != front


def test_train_from_an_artifact_tries_its_parameters_first(trained: Path, rutter: Rutter) -> None:
    first = candidate_in(trained)
    ended = rutter("train", "--run-dir", trained, "--trials", "1", "--jobs", "1", "--from", first)
    assert ended.status == 0, ended.error
    again = load(candidate_in(trained)).price()
    assert again == load(first).price()
    missing = rutter("train", "--run-dir", trained, *TRAIN, "--from", trained / "none.safetensors")
    assert (missing.status, "cannot read the artifact" in missing.only_line()) == (1, True)


def test_train_ends_when_its_minutes_are_spent_and_says_so_when_it_is_done(trained: Path, rutter: Rutter) -> None:
    words = ("train", "--run-dir", trained, *TRAIN, "--minutes", "0.00001")
    ended = rutter(*words)
    assert ended.status == 0, ended.error
    assert load(candidate_in(trained)).metadata.trials == 1
    assert "already done" in rutter(*words).out


def test_runs_that_executed_nothing_and_torn_lines_do_not_stop_training(tmp_path: Path, rutter: Rutter) -> None:
    down = [
        journal_row(
            i,
            request_id=f"down{i}",
            status="unavailable",
            time=1_700_009_000.0 + i,
            arrival_s=float(i),
            executed=None,
            executed_decode_engine=None,
        )
        for i in range(3)
    ]
    journal = tmp_path / "journal"
    write_journal(journal, [*simulated_rows(120), *down])
    segment = journal / "journal-000002.jsonl"
    segment.write_bytes(line_of(simulated_rows(1, seed=9)[0])[:-50])
    ended = rutter("train", "--run-dir", tmp_path / "run", "--journal", journal, *TRAIN)
    assert ended.status == 0, ended.error
    assert "123 read, 120 used, 3 dropped" in ended.out
    assert str(segment) in ended.out
    metadata = load(candidate_in(tmp_path / "run")).metadata
    assert metadata.journal_rows == 120
    assert metadata.journal_dropped["unavailable"] == 3


def foreign(folder: Path) -> Path:
    path = folder / "foreign.jsonl"
    path.write_text('{"some": "thing"}\n{"other": 1}\n')
    return path


def empty_file(folder: Path) -> Path:
    path = folder / "empty.jsonl"
    path.touch()
    return path


def empty_folder(folder: Path) -> Path:
    path = folder / "none"
    path.mkdir()
    return path


def binary(folder: Path) -> Path:
    path = folder / "binary.jsonl"
    path.write_bytes(bytes(range(256)) * 100)
    return path


def torn_only(folder: Path) -> Path:
    path = folder / "torn.jsonl"
    path.write_bytes(line_of(journal_row(0))[:-20])
    return path


def mixed_kinds(folder: Path) -> Path:
    write_journal(folder / "mixed", [journal_row(0), journal_row(1, cluster_kind="existing")])
    return folder / "mixed"


@pytest.mark.parametrize("make", [foreign, empty_file, empty_folder, binary, torn_only, mixed_kinds])
def test_journals_that_teach_nothing_end_in_one_clear_line(
    tmp_path: Path, rutter: Rutter, make: Callable[[Path], Path]
) -> None:
    ended = rutter("train", "--run-dir", tmp_path / "run", "--journal", make(tmp_path), *TRAIN)
    assert ended.status == 1
    assert ended.error.count("\n") == 1
    assert "internal error" not in ended.only_line()
    assert not list((tmp_path / "run").glob("train-*/candidate*"))


def test_a_journal_that_is_not_there_is_named(tmp_path: Path, rutter: Rutter) -> None:
    ended = rutter("train", "--run-dir", tmp_path / "run", "--journal", tmp_path / "nowhere")
    assert ended.status == 1
    assert f"no journal at {tmp_path / 'nowhere'}" in ended.only_line()


@pytest.mark.parametrize(
    "words",
    [
        ("--trials", "0"),
        ("--jobs", "0"),
        ("--seed", "-1"),
        ("--trials", "many"),
        ("--minutes", "0"),
        ("--minutes", "inf"),
        ("--objective", "beauty"),
        ("--hardware", "h100"),
        ("--no-such-flag",),
        ("--run", "a/b"),
    ],
)
def test_wrong_flags_end_with_status_2(trained: Path, rutter: Rutter, words: tuple[str, ...]) -> None:
    where = () if words[0] == "--run" else ("--run-dir", trained)
    assert rutter("train", *where, *words).status == 2


def test_f35_an_objective_that_is_never_a_number_leaves_the_candidate_as_it_was(
    trained: Path, rutter: Rutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = candidate_in(trained).read_bytes()
    monkeypatch.setattr("learn.evaluate.Bench.goodput", lambda _bench, _policy: np.array([np.nan]))
    ended = rutter("train", "--run-dir", trained, *TRAIN, "--seed", "5")
    assert ended.status == 1
    assert ended.only_line() == "rutter: 21 of 21 trials failed, the last: the objective is nan"
    assert [path.read_bytes() for path in trained.glob("train-*/candidate.safetensors")] == [before]
    exported = rutter("export", "--run-dir", trained, "--to", trained / "out.safetensors")
    assert exported.status == 1
    assert "'train' is not finished" in exported.only_line()
    assert not (trained / "out.safetensors").exists()


def test_a_full_disk_ends_in_one_line_and_training_goes_on_from_there(
    trained: Path, rutter: Rutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "study.log")

    with monkeypatch.context() as patch:
        patch.setattr("optuna.storages.journal.JournalFileBackend.append_logs", full)
        ended = rutter("train", "--run-dir", trained, *TRAIN, "--seed", "6")
    assert ended.status == 1
    assert "No space left on device" in ended.only_line() or "the disk is full" in ended.only_line()
    assert rutter("train", "--run-dir", trained, *TRAIN, "--seed", "6").status == 0


def test_another_run_in_the_folder_is_named(trained: Path, rutter: Rutter) -> None:
    with Run(trained).lock():
        ended = rutter("train", "--run-dir", trained, *TRAIN)
    assert ended.status == 1
    assert "in use by process" in ended.only_line()
