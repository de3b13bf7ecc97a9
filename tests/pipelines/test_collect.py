"""`rutter collect` with a fast emulated cluster: killed, interrupted, continued, done; and the whole main job."""

import os
import signal
from pathlib import Path

import pytest
from small_runs import FAST, TRAIN, Rutter, journal_rows, processes_of, started, wait_for

from learn.saturation import MID_COLLAPSE, round_robin_goodput
from learn.simulation import Topology
from pipelines.collect import mid_collapse_rate
from pipelines.emulated.cluster import start_emulated
from pipelines.stages import Run
from pipelines.workload_spec import WorkloadSpec, requests_of
from serve_table.artifact import load
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

N_REQUESTS = 150


def answered(run_dir: Path) -> int:
    return sum(row.status == "ok" for row in journal_rows(run_dir))


@pytest.mark.slow
def test_f35_a_collection_is_killed_interrupted_continued_trained_on_and_exported(
    tmp_path: Path, rutter: Rutter
) -> None:
    run_dir = tmp_path / "run"
    words = ("collect", "--run-dir", run_dir, *FAST)
    with started(*words) as process:
        wait_for(lambda: answered(run_dir) >= 20 or process.poll() is not None, 60.0)
        assert any(" serve " in words for words in processes_of(run_dir).values())
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    wait_for(lambda: processes_of(run_dir) == {}, 15.0)
    killed_at = answered(run_dir)
    assert 20 <= killed_at < N_REQUESTS

    with started(*words) as process:
        wait_for(lambda: answered(run_dir) >= killed_at + 20 or process.poll() is not None, 60.0)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30.0)
    assert process.returncode == 130, error
    assert f"collect: continuing, {killed_at} of 150 requests are journaled already" in out
    assert error.splitlines()[-1] == "rutter: interrupted; the same command continues it"
    assert processes_of(run_dir) == {}
    interrupted_at = answered(run_dir)
    assert killed_at + 20 <= interrupted_at < N_REQUESTS

    ended = rutter(*words)
    assert ended.status == 0, ended.error
    assert f"collect: continuing, {interrupted_at} of 150 requests are journaled already" in ended.out
    assert processes_of(run_dir) == {}
    rows = journal_rows(run_dir)
    assert {row.cluster_kind for row in rows} == {"emulated"}
    assert {row.dilation for row in rows} == {0.3}
    # Every request was answered once, each with its own lengths.
    assert sum(row.status == "ok" for row in rows) == N_REQUESTS
    lengths = sorted(row.usage_prompt_tokens or 0 for row in rows if row.status == "ok")
    spec = WorkloadSpec("chat", N_REQUESTS, 0, 0, 12.0, 0.3, A40_3B.max_model_len_tokens)
    assert lengths == sorted(requests_of(spec).prompt_tokens.tolist())
    again = rutter(*words)
    assert again.status == 0
    assert "collect: already done, journal in" in again.out

    assert rutter("train", "--run-dir", run_dir, *TRAIN).status == 0
    artifact = run_dir / "rutter.safetensors"
    ended = rutter("export", "--run-dir", run_dir, "--to", artifact, "--held-out", "3")
    assert ended.status == 0, ended.error
    metadata = load(artifact).metadata
    assert (metadata.prefill_engines, metadata.decode_engines, metadata.workload) == (1, 2, "chat")
    assert metadata.journal_rows >= N_REQUESTS - 5
    assert metadata.dilation == 0.3


@pytest.mark.slow
def test_an_existing_cluster_is_collected_from_by_its_urls_and_left_running(tmp_path: Path, rutter: Rutter) -> None:
    run_dir = tmp_path / "run"
    with start_emulated(0, 2, A40_3B, 0.2, model="some-model", folder=tmp_path / "theirs") as theirs:
        urls = set(theirs.decode_urls)
        words = ["collect", "--run-dir", run_dir, "--trace", "chat", "--requests", "100", "--rate", "40"]
        ended = rutter(*words, "--decode-url", *theirs.decode_urls, "--model", "some-model")
        assert ended.status == 0, ended.error
        theirs.require_running()
    rows = journal_rows(run_dir)
    assert {(row.cluster_kind, row.dilation, row.executed, row.status) for row in rows} == {
        ("existing", 1.0, "local", "ok")
    }
    assert {row.executed_decode_engine for row in rows} == urls
    assert len(rows) == 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--policy", "table"), "collect with one of round_robin"),
        (("--policy", "clairvoyant"), "collect with one of"),
        (("--requests", "99"), "at least 100"),
        (("--explore", "1.5"), "must be from 0 to 1"),
        (("--rate", "0"), "--rate 0.0 must be above 0"),
        (("--rate", "nan"), "must be above 0"),
        (("--seed", "-1"), "at least 0"),
        (("--start", "-5"), "at least 0"),
        (("--decode", "0"), "at least one"),
        (("--hardware", "h100"), "unknown hardware profile"),
        (("--trace", "nonsense"), "unknown trace 'nonsense'"),
        (("--trace", "chat", "--rate", "5", "--tight-share", "7"), "tight share"),
    ],
)
def test_wrong_flags_end_with_status_2_and_one_line(
    tmp_path: Path, rutter: Rutter, words: tuple[str, ...], message: str
) -> None:
    ended = rutter("collect", "--run-dir", tmp_path / "run", *words)
    assert ended.status == 2
    assert message in ended.only_line()
    assert processes_of(tmp_path) == {}


def test_a_trace_that_is_no_trace_ends_in_one_line(tmp_path: Path, rutter: Rutter) -> None:
    path = tmp_path / "trace.csv"
    for content in ("", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,1\n"):
        path.write_text(content)
        ended = rutter("collect", "--run-dir", tmp_path / "run", "--trace", f"azure:{path}")
        assert ended.status == 1
        assert str(path) in ended.only_line()
    ended = rutter("collect", "--run-dir", tmp_path / "run", "--trace", f"azure:{tmp_path / 'none.csv'}")
    assert ended.status == 1


def test_engines_that_are_down_end_in_one_line_and_nothing_is_called_done(tmp_path: Path, rutter: Rutter) -> None:
    run_dir = tmp_path / "run"
    dead = ("--decode-url", "http://127.0.0.1:9", "--trace", "chat", "--requests", "100", "--rate", "500")
    ended = rutter("collect", "--run-dir", run_dir, *dead)
    assert ended.status == 1
    assert "http://127.0.0.1:9 does not answer" in ended.only_line()
    assert processes_of(run_dir) == {}
    (record,) = Run(run_dir)._read().stages["collect"].records.values()
    assert record.finished_time is None


def test_the_found_rate_has_round_robin_in_mid_collapse() -> None:
    said: list[str] = []
    topology = Topology(2, 4, A40_3B, 0.003)
    spec = WorkloadSpec("chat", 400, 0, 0, 1.0, 0.3, A40_3B.max_model_len_tokens)
    rate = mid_collapse_rate(spec, topology, said.append)
    traces = [requests_of(WorkloadSpec("chat", 400, seed, 0, rate, 0.3, 16_384)) for seed in range(3)]
    goodput = round_robin_goodput(traces, topology, targets_from_profile(A40_3B), rate)
    assert goodput == pytest.approx(MID_COLLAPSE, abs=0.05)
    assert f"{rate:g} requests/s" in said[-1]
