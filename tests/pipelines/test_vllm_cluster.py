"""`rutter cluster up vllm-cpu` with real processes and a stand-in for vLLM's server."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines import cluster
from pipelines.cli import main
from pipelines.cluster_state import ClusterState, is_alive, read_state, session_members
from pipelines.vllm_cpu import room
from pipelines.vllm_cpu.cluster import start_vllm_cpu
from pipelines.vllm_cpu.environment import PYTHON_VARIABLE
from serve_table.errors import ClusterError
from serve_table.step_time import A40_3B

FOLDER = Path("build/clusters/vllm-cpu")
STUB = Path(__file__).parent / "stub_vllm"


@pytest.fixture(autouse=True)
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(STUB))
    monkeypatch.setattr("pipelines.vllm_cpu.cluster.VllmCpuCluster.poll_s", 0.02)


def up(*words: str) -> int:
    return main(["cluster", "up", "vllm-cpu", *words])


def state_now() -> ClusterState:
    state = read_state(FOLDER)
    assert state is not None
    return state


def wait_for(condition, what: str) -> None:  # type: ignore[no-untyped-def]
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def processes(state: ClusterState):  # type: ignore[no-untyped-def]
    return [process for engine in state.engines for process in engine.processes]


def requests_in(log: str) -> list[dict[str, object]]:
    lines = Path(log).read_text().splitlines()
    return [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("/v1/completions ")]


def test_up_warms_every_pair_and_down_leaves_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert up("--prefill", "2", "--decode", "3") == 0
        out = capsys.readouterr().out
        state = state_now()
        assert (state.kind, state.dilation, state.ready) == ("vllm-cpu", 8.0, True)
        assert "--cluster-kind vllm-cpu --hardware a40-3b --dilation 8" in out
        prefill, decode = state.engines[:2], state.engines[2:]
        for engine in decode:
            sources = {str(request.get("kv_transfer_params")) for request in requests_in(engine.log)} - {"None"}
            assert len(sources) == len(prefill)
            assert engine.kv_events is not None
            assert engine.kv_events.startswith("tcp://127.0.0.1:")
        assert len(processes(state)) == 10
        assert all(process.is_alive for process in processes(state))
        own = os.getpriority(os.PRIO_PROCESS, 0)
        # The router and the load generator, which measure, go before the engines.
        assert {os.getpriority(os.PRIO_PROCESS, engine.pid) for engine in state.engines} == {min(own + 5, 19)}

        assert main(["cluster", "status"]) == 0
        out = capsys.readouterr().out
        assert out.count("healthy") == 5
        assert "5 of 5 engines kept their step times" in out
        assert all(report.kept for report in cluster.vllm_pacing().values())
    finally:
        assert main(["cluster", "down"]) == 0
    assert not any(process.is_alive for process in processes(state))


def test_down_ends_what_a_killed_engine_left(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert up("--prefill", "0", "--decode", "1") == 0
        state = state_now()
        (engine,) = state.engines
        (core,) = engine.children
        os.kill(engine.pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(engine), "the killed engine is still there")
        assert core.is_alive
    finally:
        assert main(["cluster", "down"]) == 0
    assert not core.is_alive


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_up_that_is_interrupted_leaves_no_process(how: signal.Signals) -> None:
    program = (
        "import sys; from pipelines import engine_cluster; engine_cluster.is_healthy = lambda *_, **__: False\n"
        "from pipelines.cli import main\n"
        "sys.exit(main(['cluster', 'up', 'vllm-cpu', '--prefill', '0', '--decode', '2']))"
    )
    sources = str(Path(cluster.__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": f"{sources}{os.pathsep}{STUB}"}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True
    ) as command:
        wait_for(lambda: (state := read_state(FOLDER)) is not None and len(state.engines) == 2, "engines do not start")
        state = state_now()
        wait_for(lambda: all(session_members(engine.pid) for engine in state.engines), "the engines have no children")
        children = [child for engine in state.engines for child in session_members(engine.pid)]
        command.send_signal(how)
        command.communicate(timeout=30)
    wait_for(lambda: not any(process.is_alive for process in [*processes(state), *children]), "processes are left")


def test_an_engine_that_fails_names_its_log_and_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = next(port for port in range(21_000, 30_000, 10) if room._refusal(port) is None)
    monkeypatch.setenv("STUB_FAILS", str(first + 3))  # the side channel of the second of two engines
    assert up("--prefill", "1", "--decode", "1", "--base-port", str(first)) == 1
    error = capsys.readouterr().err
    assert "decode-0 ended with status 1" in error
    assert "ValueError: the stub was told to fail" in error
    assert read_state(FOLDER) is None
    assert room._refusal(first) is None


def test_a_port_in_use_is_named_with_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert up("--prefill", "0", "--decode", "1", "--base-port", str(port)) == 1
    error = capsys.readouterr().err
    assert f"port {port} cannot be used (Address already in use)" in error
    assert "--base-port" in error


def test_too_little_memory_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(room, "ENGINE_BYTES", 10**15)
    assert up() == 1
    assert "6 engines need about 6000000.0 GB of memory" in capsys.readouterr().err
    assert not list(Path().rglob("*.log"))


def test_without_an_environment_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE)
    assert up() == 2
    assert "make vllm-env" in capsys.readouterr().err


def test_an_embedded_cluster_ends_with_its_block(tmp_path: Path) -> None:
    starting = start_vllm_cpu(1, 1, A40_3B, 4.0, model="m", folder=tmp_path / "engines", say=lambda _: None)
    with starting as running:
        engines = running.engines
        assert (running.model, running.kv_tokens) == ("m", 60_000)
        assert list(running.kv_event_endpoints) == running.prefill_urls + running.decode_urls
        assert [report.steps for report in running.pacing().values()] == [10, 10]
        assert "2 of 2 engines kept" in running.pacing_lines()[0]
        os.kill(engines[1].pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match="decode-0 was killed by signal 9"):
            wait_for(running.require_running, "the killed engine is not missed")
    assert not any(process.is_alive for engine in engines for process in engine.processes)


def test_a_killed_engine_comes_back_on_its_port(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert up("--prefill", "0", "--decode", "2") == 0
        before = state_now()
        old = before.engines[1]
        os.kill(old.pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(old), "the killed engine is still there")
        assert main(["cluster", "restart", "decode-9"]) == 2
        assert "known are decode-0, decode-1" in capsys.readouterr().err
        assert main(["cluster", "restart", "decode-1"]) == 0
        after = state_now()
        assert after.engines[0] == before.engines[0]
        assert (after.engines[1].url, after.engines[1].kv_events) == (old.url, old.kv_events)
        assert is_alive(after.engines[1])
        assert not any(process.is_alive for process in old.processes)
    finally:
        assert main(["cluster", "down"]) == 0
    assert not any(process.is_alive for process in processes(after))
    assert main(["cluster", "restart", "decode-1"]) == 1
