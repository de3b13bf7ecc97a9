"""The router as a child: ready when it is said to be, ended in good order, and gone when its starter is."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from small_runs import ROOT, processes_of, wait_for

from pipelines.router_process import RouterProcess
from pipelines.server_process import last_line
from serve_table.errors import ClusterError


class Healthy(BaseHTTPRequestHandler):
    """An engine as far as a probe can tell."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def engine_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_it_is_ready_inside_the_block_and_gone_after_it(engine_url: str, tmp_path: Path) -> None:
    router = RouterProcess([], [engine_url], tmp_path / "journal", "always_local", tmp_path / "logs" / "router.log")
    with router:
        assert httpx.get(f"{router.url}/ready", trust_env=False).status_code == 200
        assert len(processes_of(tmp_path)) == 1
        assert "policy always_local, 0 prefill and 1 decode engines" in router.log.read_text()
    assert processes_of(tmp_path) == {}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{router.url}/ready", trust_env=False)


def test_an_error_in_the_block_ends_it_too(engine_url: str, tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        RouterProcess([], [engine_url], tmp_path / "journal", "round_robin", tmp_path / "router.log"),
    ):
        raise KeyboardInterrupt
    assert processes_of(tmp_path) == {}


def test_a_router_that_does_not_start_says_why(engine_url: str, tmp_path: Path) -> None:
    router = RouterProcess([], [engine_url], tmp_path / "journal", "clairvoyant", tmp_path / "router.log")
    with pytest.raises(ClusterError, match="the router did not start: rutter: unknown policy 'clairvoyant'"), router:
        pass
    assert processes_of(tmp_path) == {}


def test_a_killed_starter_takes_the_router_along(engine_url: str, tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from pipelines.router_process import RouterProcess
folder = Path({str(tmp_path)!r})
with RouterProcess([], [{engine_url!r}], folder / "journal", "round_robin", folder / "router.log"):
    print("ready", flush=True)
    time.sleep(60)
"""
    starter = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "ready\n"
        assert any("serve" in words for words in processes_of(tmp_path / "journal").values())
        os.killpg(starter.pid, signal.SIGKILL)
    wait_for(lambda: processes_of(tmp_path / "journal") == {}, timeout_s=10.0)


def test_its_command_line_carries_everything_it_was_given(tmp_path: Path) -> None:
    router = RouterProcess(
        ["http://p0", "http://p1"],
        ["http://d0"],
        tmp_path / "journal",
        "length_threshold",
        tmp_path / "router.log",
        policy_params={"threshold_tokens": 100.0},
        artifact=tmp_path / "a.safetensors",
        explore=0.25,
        seed=9,
        cluster_kind="emulated",
        dilation=2.0,
        kv_events={"http://p1": "tcp://p1:1,tcp://p1:2", "http://d0": "tcp://d0:1", "http://other": "tcp://x:1"},
        arguments=["--hardware", "a40-3b"],
    )
    words = router.command(1234)
    for flag, *values in (
        ("--port", "1234"),
        ("--policy", "length_threshold"),
        ("--prefill", "http://p0", "http://p1"),
        ("--decode", "http://d0"),
        ("--prefill-kv-events", "-", "tcp://p1:1,tcp://p1:2"),
        ("--decode-kv-events", "tcp://d0:1"),
        ("--journal", str(tmp_path / "journal")),
        ("--policy-params", '{"threshold_tokens": 100.0}'),
        ("--artifact", str(tmp_path / "a.safetensors")),
        ("--explore", "0.25"),
        ("--seed", "9"),
        ("--cluster-kind", "emulated"),
        ("--dilation", "2.0"),
        ("--hardware", "a40-3b"),
    ):
        at = words.index(flag)
        assert words[at + 1 : at + 1 + len(values)] == values
    assert "--exit-with-stdin" in words


def test_the_last_line_of_a_log_or_that_there_is_none(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    log.write_text("first\nrutter: why\n\n")
    assert last_line(log) == "rutter: why"
    log.write_text("")
    assert last_line(log) == f"it wrote nothing to {log}"
