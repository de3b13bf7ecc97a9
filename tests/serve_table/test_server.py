"""`rutter serve` as a process: flags, sockets, signals."""

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from router_bench import CHAT, chat_body
from sample_artifact import sample_artifact
from stub_engines import DONE, Out, StubRequest, chat_event, decode_engine, running

from serve_table import server
from serve_table.artifact import save
from serve_table.errors import ConfigError, RutterError
from serve_table.journal import JournalReader

COMMAND = (
    "import argparse, sys; from serve_table import server; p = argparse.ArgumentParser();"
    "server.add_arguments(p); sys.exit(server.run(p.parse_args()))"
)


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    server.add_arguments(parser)
    return parser.parse_args(flags)


@asynccontextmanager
async def serving(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A router process and the URL that it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        COMMAND,
        "--port",
        "0",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
        assert line.startswith("rutter serve: http://127.0.0.1:")
        yield process, line.split()[2]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_lets_open_streams_finish_and_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    begun = asyncio.Event()

    async def slow(request: StubRequest, out: Out) -> None:
        await out.head()
        await out.piece(chat_event({"content": "a"}))
        begun.set()
        await asyncio.sleep(0.6)
        await out.piece(chat_event({"content": "b"}, "stop") + DONE)
        await out.end()

    async with running(slow) as (d,), serving("--decode", d.url, "--journal", str(tmp_path)) as (process, url):
        async with httpx.AsyncClient(timeout=10) as client:
            answer = asyncio.create_task(client.post(url + CHAT, json=chat_body(stream=True)))
            await begun.wait()
            process.send_signal(number)
            assert (await answer).content.endswith(DONE)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    assert [row.status for row in JournalReader([tmp_path], strict=True)] == ["ok"]


async def test_streams_that_outlast_the_drain_are_cut_and_journaled(tmp_path: Path) -> None:
    async def endless(request: StubRequest, out: Out) -> None:
        await out.head()
        while True:
            await out.piece(chat_event({"content": "a"}))
            await asyncio.sleep(0.05)

    flags = ("--journal", str(tmp_path), "--drain-s", "0")
    async with running(endless) as (d,), serving("--decode", d.url, *flags) as (process, url):
        async with httpx.AsyncClient(timeout=10) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                async with client.stream("POST", url + CHAT, json=chat_body(stream=True)) as response:
                    async for _ in response.aiter_raw():
                        if process.returncode is None:
                            process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    assert [row.status for row in JournalReader([tmp_path], strict=True)] == ["aborted"]


async def test_table_policy_with_an_artifact_serves(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    save(sample_artifact(), path)
    flags = ("--policy", "table", "--artifact", str(path), "--journal", str(tmp_path / "journal"))
    async with running(decode_engine) as (d,), serving("--decode", d.url, *flags) as (process, url):
        async with httpx.AsyncClient(timeout=10) as client:
            response = await client.post(url + CHAT, json=chat_body())
            assert response.status_code == 200
        # The row is written after the answer; the end of the process waits for it.
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 10) == 0
        (row,) = JournalReader([tmp_path / "journal"], strict=True)
    assert (row.policy, row.policy_digest, row.cluster) == ("table", sample_artifact().digest(), 0)
    assert row.predicted_output_tokens == 200.0
    assert row.tpot_target_s == 0.025


DECODE = ("--decode", "http://127.0.0.1:9")
WRONG_FLAGS = [
    ((), "at least one --decode"),
    (("--decode", "127.0.0.1:9"), "must look like http://HOST:PORT"),
    (("--decode", "http://127.0.0.1:x"), "engine URL 'http://127.0.0.1:x'"),
    ((*DECODE, *DECODE), "names the same engine twice"),
    ((*DECODE, "--policy", "best"), "unknown policy 'best'"),
    ((*DECODE, "--policy", "table"), "needs --artifact"),
    ((*DECODE, "--policy-params", "{"), "--policy-params is not JSON"),
    ((*DECODE, "--policy-params", "3"), "--policy-params must be a JSON object"),
    ((*DECODE, "--policy-params", '{"x": 1}'), "has no parameter 'x'"),
    ((*DECODE, "--explore", "1.5"), "--explore 1.5 must be from 0 to 1"),
    ((*DECODE, "--explore", "nan"), "--explore nan"),
    ((*DECODE, "--dilation", "0"), "--dilation 0.0 must be greater than 0"),
    ((*DECODE, "--gap-timeout-s", "inf"), "--gap-timeout-s inf"),
    ((*DECODE, "--cluster-kind", "cloud"), "--cluster-kind 'cloud'"),
    ((*DECODE, "--hardware", "h100"), "unknown hardware profile 'h100'; known: a40-3b"),
    ((*DECODE, "--default-slo-class", "gold"), "unknown SLO class 'gold'"),
    ((*DECODE, "--log-level", "loud"), "--log-level 'loud'"),
    ((*DECODE, "--port", "70000"), "--port 70000"),
    ((*DECODE, "--drain-s", "-1"), "--drain-s -1"),
    ((*DECODE, "--tokenizer", "/nowhere"), "no tokenizer.json there"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG_FLAGS)
def test_wrong_flags_are_named_in_one_line(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        server.run(parsed(*flags))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_port_in_use_is_named_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RutterError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use"):
            server.run(parsed(*DECODE, "--port", str(port)))


def test_several_urls_and_repeated_flags_add_up() -> None:
    flags = ("--prefill", "http://a:1", "http://b:1/", "--prefill", "http://c:1", "--decode", "http://d:1/x/v1")
    router = server.build_router(parsed(*flags))
    assert router.context.config.prefill_urls == ("http://a:1", "http://b:1", "http://c:1")
    address = router.context.fleet.decode[0].client.address
    assert (address.host, address.port, address.base_path, address.authority) == ("d", 1, "/x", "d:1")


def test_starting_imports_nothing_of_the_pipeline() -> None:
    heavy = {"pandas", "sklearn", "optuna", "numba", "pyarrow", "learn", "pipelines", "tokenizers", "httpx"}
    code = "import json, sys, serve_table.server, serve_table.explain; print(json.dumps(list(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert not heavy & set(json.loads(output))
