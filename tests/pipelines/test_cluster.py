"""`rutter cluster` and the embedded cluster, with real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from pipelines import cluster
from pipelines.cli import main
from pipelines.cluster_state import (
    ClusterState,
    EngineRecord,
    end_engines,
    is_alive,
    process_identity,
    read_state,
    remove_state,
    write_state,
)
from pipelines.emulated import cluster as emulated_cluster
from pipelines.emulated.cluster import ClusterPlan
from serve_table.errors import ClusterError, ConfigError
from serve_table.step_time import A40_3B

FAST_ENOUGH = ["--dilation", "0.1"]
FOLDER = Path("build/clusters")
SOURCES = str(Path(cluster.__file__).resolve().parents[1])


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def up(*words: str) -> int:
    return main(["cluster", "up", "emulated", *FAST_ENOUGH, *words])


def state_of(name: str = "emulated") -> ClusterState:
    state = read_state(FOLDER / name)
    assert state is not None
    return state


def wait_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + 10
    while process_identity(pid) is not None:
        assert time.monotonic() < deadline_s, f"process {pid} is still there"
        time.sleep(0.02)


def test_up_serves_and_down_ends_exactly_that_also_after_a_kill(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert up("--prefill", "1", "--decode", "1", "--kv-tokens", "4096") == 0
        out = capsys.readouterr().out
        state = state_of()
        prefill, decode = state.engines
        assert f"rutter serve --prefill {prefill.url} --decode {decode.url} --cluster-kind emulated" in out
        assert json.loads((FOLDER / "emulated" / "cluster.json").read_text())["ready"] is True
        models = httpx.get(f"{decode.url}/v1/models", trust_env=False).json()
        assert models["data"][0]["max_model_len"] == 4096

        assert up() == 1
        assert "running already (2 of 2 engines)" in capsys.readouterr().err
        assert main(["cluster", "status"]) == 0
        assert capsys.readouterr().out.count("healthy") == 2

        os.kill(decode.pid, signal.SIGKILL)
        wait_until_gone(decode.pid)
        assert main(["cluster", "status"]) == 1
        assert "gone" in capsys.readouterr().out
        assert httpx.get(f"{prefill.url}/health", trust_env=False).status_code == 200
    finally:
        assert main(["cluster", "down"]) == 0
    assert "ended 1 engines; 1 had ended before" in capsys.readouterr().out
    assert not is_alive(prefill)
    assert main(["cluster", "down"]) == 0
    assert "no cluster is running" in capsys.readouterr().out
    assert main(["cluster", "down", "emulated"]) == 0


def test_a_port_in_use_is_named_with_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert up("--prefill", "0", "--decode", "1", "--base-port", str(port)) == 1
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert f"port {port} for decode-0 cannot be used" in error
    assert "--base-port" in error
    assert read_state(FOLDER / "emulated") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--decode", "0"], "at least one --decode"),
        (["--dilation", "0"], "dilation is 0.0"),
        (["--hardware", "abacus"], "unknown hardware profile 'abacus'"),
        (["--kv-tokens", "0"], "--kv-tokens 0"),
        (["--kv-tokens", "20"], "KV of 20 tokens"),
        (["--lease-s", "-1"], "lease is -1.0"),
        (["--base-port", "65534"], "--base-port 65534"),
        (["--name", "../x"], "cluster name '../x'"),
    ],
)
def test_wrong_flags_start_nothing(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert up(*words) == 2
    assert message in capsys.readouterr().err
    assert not list(Path().rglob("*.log"))


def test_an_engine_that_does_not_start_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[EngineRecord] = []
    real = emulated_cluster.start_engine

    def break_the_second(config, listening, folder):  # type: ignore[no-untyped-def]
        process = real(config, listening, folder)
        started.append(process.record)
        if len(started) == 2:
            os.kill(process.record.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(emulated_cluster, "start_engine", break_the_second)
    assert up("--prefill", "1", "--decode", "1") == 1
    assert "decode-0 was killed by signal 9" in capsys.readouterr().err
    assert not any(map(is_alive, started))
    assert read_state(FOLDER / "emulated") is None


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_up_that_is_interrupted_leaves_no_engine(how: signal.Signals) -> None:
    # Health is never reached: the command is caught while it waits.
    program = (
        "import sys; from pipelines import engine_cluster; engine_cluster.is_healthy = lambda *_, **__: False\n"
        "from pipelines.cli import main\n"
        "sys.exit(main(['cluster', 'up', 'emulated', '--prefill', '0', '--decode', '2']))"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": SOURCES}, stderr=subprocess.PIPE, text=True
    )
    with command:
        deadline_s = time.monotonic() + 30
        while (state := read_state(FOLDER / "emulated")) is None or len(state.engines) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        command.send_signal(how)
        errors = command.communicate(timeout=20)[1]
    for engine in state.engines:
        wait_until_gone(engine.pid)
    if how == signal.SIGINT:
        assert command.returncode == 130
        assert errors.strip().splitlines()[-1] == "rutter: interrupted"
        assert read_state(FOLDER / "emulated") is None
    else:
        assert main(["cluster", "down"]) == 0  # a state file is left, its engines are not


def test_an_embedded_cluster_serves_reports_and_ends_with_its_block(tmp_path: Path) -> None:
    starting = cluster.start_emulated(1, 1, A40_3B, 0.5, folder=tmp_path / "engines", say=lambda _: None)
    with pytest.raises(RuntimeError, match="the run failed"), starting as running:
        engines = running.engines
        assert len(running.prefill_urls) == len(running.decode_urls) == 1
        body = {"prompt": "x" * 64, "max_tokens": 5}
        answer = httpx.post(f"{running.decode_urls[0]}/v1/completions", json=body, trust_env=False)
        assert answer.json()["usage"]["completion_tokens"] == 5
        reports = running.pacing()
        assert list(reports) == running.prefill_urls + running.decode_urls
        assert [report.steps for report in reports.values()] == [0, 5]
        assert "2 of 2 engines kept" in running.pacing_lines()[0]
        running.reset_pacing()
        assert sum(report.steps for report in running.pacing().values()) == 0
        os.kill(engines[1].pid, signal.SIGKILL)
        wait_until_gone(engines[1].pid)
        with pytest.raises(ClusterError, match="decode-0 was killed by signal 9"):
            running.require_running()
        raise RuntimeError("the run failed")
    assert not any(map(is_alive, engines))


def test_embedded_engines_end_by_themselves_when_their_starter_is_killed() -> None:
    program = (
        "import time; from pathlib import Path; from pipelines.cluster import start_emulated\n"
        "from serve_table.step_time import A40_3B\n"
        "with start_emulated(0, 1, A40_3B, folder=Path('engines')) as cluster:\n"
        "    print(cluster.engines[0].pid, flush=True); time.sleep(60)\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": SOURCES},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.kill()
    wait_until_gone(pid)


def record(pid: int, identity: str) -> EngineRecord:
    return EngineRecord(name="decode-0", role="decode", url="http://127.0.0.1:1", pid=pid, identity=identity, log="x")


def test_a_recycled_pid_is_never_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        assert end_engines([record(stranger.pid, "another boot:1")]) == []
        assert stranger.poll() is None
        identity = process_identity(stranger.pid)
        assert identity is not None
        assert end_engines([record(stranger.pid, identity)]) == [record(stranger.pid, identity)]


def test_an_engine_that_ignores_sigterm_is_killed_after_a_grace() -> None:
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        identity = process_identity(stubborn.pid)
        assert identity is not None
        end_engines([record(stubborn.pid, identity)], grace_s=0.2)
        assert stubborn.wait(5) == -signal.SIGKILL


def test_state_survives_and_damage_is_told(tmp_path: Path) -> None:
    state = ClusterState(
        name="c",
        kind="emulated",
        hardware="a40-3b",
        dilation=2.0,
        kv_tokens=60_000,
        model="a40-3b",
        started="2026-01-01T00:00:00+00:00",
        ready=False,
        engines=[record(1, "x")],
    )
    assert read_state(tmp_path) is None
    write_state(state, tmp_path)
    assert read_state(tmp_path) == state
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode(state)[:-5])
    with pytest.raises(ClusterError, match="is damaged"):
        read_state(tmp_path)
    remove_state(tmp_path)
    remove_state(tmp_path)
    assert read_state(tmp_path) is None


def test_a_plan_needs_room_for_its_ports() -> None:
    with pytest.raises(ConfigError, match="--base-port 65535"):
        ClusterPlan(1, 1, A40_3B, base_port=65_535)
    assert ClusterPlan(2, 1, replace(A40_3B, name="mine")).names == ["prefill-0", "prefill-1", "decode-0"]
    assert ClusterPlan(0, 1, replace(A40_3B, name="mine")).model_name == "mine"
