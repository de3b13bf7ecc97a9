"""`rutter bench-router`: its result file, its parts, and that nothing of it stays behind."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from small_runs import ROOT, Rutter, started, wait_for
from sse_stub import SSE_HEAD, chunk, stub_server

from pipelines import bench_router
from pipelines.bench_report import Target
from pipelines.bench_router_report import (
    TARGETS,
    Conditions,
    LoadFigures,
    Report,
    Round,
    Side,
    report_of,
    text_lines,
)
from pipelines.bench_timing import this_machine
from pipelines.cpu_affinity import core_shares, on_cores
from pipelines.idle_answers import n_events
from pipelines.idle_engine import IdleEngines
from pipelines.peer_router import PeerRouter, peer_program, peer_version
from pipelines.process_cost import process_cost
from pipelines.stream_client import Counted, StreamKind, StreamLoad
from serve_table.errors import ConfigError, RunError

TINY = bench_router.Sizes(rounds=2, streams=4, turn_s=0.1, warm_s=0.05, first_events=5, limit_s=0.1)
"""A second round would take too long."""
KEYS = (*TARGETS, "cpu_per_paced_event_ratio")

# Rutter itself under the peer's flags: round robin, both legs for each request.
STAND_IN = """#!{python}
import sys
sys.path.insert(0, {root!r})
from pipelines import cli
words = sys.argv[1:]
def values(flag):
    return [words[i + 1] for i, word in enumerate(words) if word == flag]
sys.exit(cli.main([
    "serve", "--exit-with-stdin", "--policy", "round_robin", "--port", *values("--port"),
    "--prefill", *values("--prefill"), "--decode", *values("--decode"),
]))
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "stand-in"
    path.write_text(STAND_IN.format(python=sys.executable, root=str(ROOT)))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[IdleEngines]:
    with IdleEngines(1, 1, tmp_path / "engines.log", 8) as running:
        yield running


def test_the_result_file_has_every_figure_with_its_conditions(
    stand_in: Path, tmp_path: Path, rutter: Rutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_router, "QUICK", TINY)
    result_path = tmp_path / "bench-router.json"
    artifact = ROOT / "artifacts" / "default.safetensors"
    ended = rutter("bench-router", "--quick", "--json", result_path, "--peer", stand_in, "--artifact", artifact)
    assert ended.status == 0, ended.error
    result = json.loads(result_path.read_text(), parse_constant=pytest.fail)
    assert [key for key in KEYS if key not in result] == []
    assert all(result[key] is None or result[key] > 0.0 for key in KEYS)
    assert result["peak_memory_ratio"] == pytest.approx(1.0, abs=0.5)  # both are Rutter here
    (only,) = result["rounds"]
    assert only["turns"] == ["rutter", "peer", "peer", "rutter"]
    for side in (only["rutter"], only["peer"]):
        assert all(load["events_per_s"] > 0.0 for load in side["loads"].values())
        assert side["first_event_s"] > only["direct_first_event_s"] > 0.0
    assert set(only["local_shares"]) == {"256", "32", "paced", "first_event"}
    assert result["conditions"]["policy"] == "rutter"
    assert result["conditions"]["rounds"] == 2
    assert "ends after 1 rounds: one more would end later than 0 s" in ended.error
    assert ended.out.count("; target: ") == len(TARGETS) - (result["added_ttft_ratio"] is None)
    assert "with one leg where the peer always sends two: 256 " in ended.out


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_all_that_it_started(stand_in: Path, tmp_path: Path, number: int, status: int) -> None:
    artifact = ROOT / "artifacts" / "default.safetensors"
    words = ("bench-router", "--peer", stand_in, "--artifact", artifact, "--json", tmp_path / "x.json")
    with started(*words) as bench:
        wait_for(lambda: len(children_of(bench.pid)) == 3)
        children = children_of(bench.pid)
        time.sleep(1.0)  # within a load, as like as not
        bench.send_signal(number)
        assert bench.wait(30) == status
        assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert not (tmp_path / "x.json").exists()


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def test_a_missing_peer_is_told_with_how_to_get_it(
    tmp_path: Path, rutter: Rutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUTTER_VLLM_ROUTER", raising=False)
    ended = rutter("bench-router", "--peer", tmp_path / "absent")
    assert ended.status == 2
    assert "absent: no such program; `make vllm-router-env` installs vllm-router==0.1.17" in ended.only_line()
    monkeypatch.setenv("RUTTER_VLLM_ROUTER", str(tmp_path / "named"))
    with pytest.raises(ConfigError, match="named: no such program"):
        peer_program(None)


def test_the_peer_is_told_to_hand_off_over_nixl(tmp_path: Path) -> None:
    peer = PeerRouter(Path("vllm-router"), ["http://p0", "http://p1"], ["http://d0"], tmp_path / "log")
    words = peer.command(1234)
    text = " ".join(words)
    assert "--port 1234 --vllm-pd-disaggregation --kv-connector nixl --policy round_robin" in text
    assert "--prefill http://p0 --prefill http://p1 --decode http://d0" in text
    assert "version unknown" in peer_version(tmp_path / "no-python-here")


def figures(events_per_s: float, cpu_s: float) -> LoadFigures:
    return LoadFigures(events_per_s, events_per_s / 32, cpu_s, cpu_s)


def one_round(ours: float, theirs: float, added: tuple[float, float] = (0.4e-3, 0.8e-3)) -> Round:
    def side(scale: float, added_s: float) -> Side:
        loads = {name: figures(1000.0 * scale, 0.01 / scale) for name in bench_router.LOADS}
        return Side(loads, 0.001 + added_s, int(1e6 * scale))

    return Round(("rutter", "peer"), side(ours, added[0]), side(theirs, added[1]), 0.001, {"256": 1.0, "32": 0.5})


def reported(*rounds: Round) -> Report:
    conditions = Conditions("peer 1", "rutter", "a", "d", "2P+4D", 8, 32, 800, 0.005, 1.0, 10, len(rounds), "none")
    return report_of(rounds, this_machine(), conditions)


def test_ratios_are_medians_of_the_rounds_own_ratios() -> None:
    report = reported(one_round(2.0, 1.0), one_round(30.0, 10.0), one_round(1.0, 4.0))
    assert report.events_ratio_256 == report.events_ratio_32 == report.peak_memory_ratio == 2.0
    assert report.cpu_per_event_ratio == report.cpu_per_paced_event_ratio == 0.5
    assert report.added_ttft_ratio == pytest.approx(0.5)
    assert report.ratios["events_ratio_256"].max == 3.0
    assert report.local_shares == {"256": 1.0, "32": 0.5}
    text = "\n".join(text_lines(report))
    assert (
        "2 times the peer's (0.25 to 3 over 3 rounds; 2,000 against 4,000 events/s); target: at least 1.3, met" in text
    )
    assert "target: at most 1.5, missed" in text
    assert "256 100%, 32 50%" in text


def test_an_added_time_below_the_noise_is_no_ratio() -> None:
    report = reported(one_round(1.0, 1.0, (0.4e-3, -0.1e-3)))
    assert report.added_ttft_ratio is None
    assert "added TTFT, one stream: not told, the machine was too noisy" in text_lines(report)


def test_targets_and_their_bounds() -> None:
    assert {name: (target.bound, target.limit) for name, target in TARGETS.items()} == {
        "events_ratio_256": ("at least", 1.3),
        "events_ratio_32": ("at least", 1.5),
        "added_ttft_ratio": ("at most", 0.8),
        "cpu_per_event_ratio": ("at most", 0.8),
        "peak_memory_ratio": ("at most", 1.5),
    }
    assert isinstance(TARGETS["events_ratio_256"], Target)


def test_idle_engines_answer_both_legs(engines: IdleEngines) -> None:
    (decode,), (prefill,) = engines.decode_urls, engines.prefill_urls
    body = {"model": "idle", "messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
    with httpx.Client(trust_env=False) as client:
        answer = client.post(f"{prefill}/v1/chat/completions", json={**body, "max_tokens": 1, "stream": False}).json()
        assert answer["kv_transfer_params"]["do_remote_prefill"] is True
        events = stream_of(client, decode, {**body, "stream": True})
        assert len(events) == n_events(20)
        assert [json.loads(event[6:])["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * 20 + [
            "length"
        ]
        counted = stream_of(client, decode, {**body, "stream": True, "stream_options": {"include_usage": True}})
        assert json.loads(counted[-2][6:])["usage"]["completion_tokens"] == 20
        assert stream_of(client, decode, {**body, "stream": True, "pace_s": 0.001}) == events
        for path in ("/health", "/v1/models", "/metrics"):
            assert client.get(f"{decode}{path}").status_code == 200
        assert client.get(f"{decode}/other").status_code == 404
        assert client.post(f"{decode}/v1/chat/completions", content=b"{").status_code == 400


def stream_of(client: httpx.Client, url: str, body: dict[str, Any]) -> list[str]:
    text = client.post(f"{url}/v1/chat/completions", json=body).text
    assert text.endswith("data: [DONE]\n\n")
    return text.split("\n\n")[:-1]


def test_idle_engines_wait_for_a_reader_that_takes_no_more(engines: IdleEngines) -> None:
    body = {"messages": [], "max_tokens": 60_000, "stream": True}
    url = engines.decode_urls[0]
    with (
        httpx.Client(trust_env=False, timeout=30.0) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as slow,
    ):
        time.sleep(0.3)
        assert len(stream_of(client, url, {"max_tokens": 3, "stream": True})) == n_events(3)
        assert slow.read().count(b"\n\n") == n_events(60_000)


async def counted(url: str, kind: StreamKind, n_streams: int = 3) -> Counted:
    async with StreamLoad(url, n_streams, kind) as load:
        return await load.run(0.05, 0.2, time.process_time)


async def test_the_client_counts_events_and_requests(engines: IdleEngines) -> None:
    result = await counted(engines.decode_urls[0], StreamKind(50))
    assert result.wall_s == pytest.approx(0.2, abs=0.1)
    assert result.requests > 3
    assert result.events == pytest.approx(result.requests * n_events(50), abs=3 * n_events(50))
    async with StreamLoad(engines.decode_urls[0], 1, StreamKind(50)) as load:
        assert 0.0 < await load.first_event_s() < 1.0
        assert load.requests == 1


@pytest.mark.parametrize("cut", [1, 2, 7])
async def test_the_client_counts_across_reads(cut: int) -> None:
    async def answer(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        whole = SSE_HEAD + b"".join(chunk(b"data: %d\n\n" % i) for i in range(body["max_tokens"] + 2)) + b"0\r\n\r\n"
        for start in range(0, len(whole), cut):
            writer.write(whole[start : start + cut])
            await asyncio.sleep(0)

    async with stub_server(answer) as (url, _):
        async with StreamLoad(url, 1, StreamKind(2)) as load:
            await load.first_event_s()
            assert load.requests == 1
        await asyncio.sleep(0.02)  # the stub sees that we left


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy", "was answered with b'HTTP/1.1 503"),
        (SSE_HEAD + chunk(b"data: 1\n\n") + b"0\r\n\r\n", "a stream had 1 events instead of 4"),
        (SSE_HEAD + chunk(b"data: 1\n\n"), "the connection was lost within a stream"),
    ],
)
async def test_a_stream_that_fails_ends_the_load(answer: bytes, why: str) -> None:
    async def serve(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with stub_server(serve) as (url, _):
        with pytest.raises(RunError, match=why):
            await counted(url, StreamKind(2))
        await asyncio.sleep(0.02)


async def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(RunError, match="cannot be reached"):
        await counted("http://127.0.0.1:1", StreamKind(2))


def test_the_cost_of_a_process_counts_its_children() -> None:
    program = """
import subprocess, sys
work = "x = bytearray(30_000_000)\\nfor i in range(3_000_000): pass\\nprint('ready', flush=True)\\ninput()"
child = subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
input()
"""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            cost = process_cost(process.pid)
            assert cost.peak_memory_bytes > 35_000_000
            assert cost.cpu_s > 0.03
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="the cost of process"):
        process_cost(process.pid)


def test_cores_are_shared_out_and_given_back() -> None:
    before = os.sched_getaffinity(0)
    shares = core_shares()
    assert shares.router | shares.rest in (before, frozenset())
    assert not shares.router & shares.rest
    with on_cores(shares.router):
        assert os.sched_getaffinity(0) == (shares.router or before)
    assert os.sched_getaffinity(0) == before
