"""The parts of a live run: which cluster is asked for, and how it is interrupted."""

import argparse
import asyncio
import os
import signal
from pathlib import Path
from typing import cast

import pytest

from pipelines.cluster_state import ClusterState, EngineRecord, known_kv_events, write_state
from pipelines.live_run import (
    DEFAULT_DILATION,
    ClusterConfig,
    add_cluster_arguments,
    cluster_from,
    engines_of,
    interruptible,
)
from pipelines.load_report import LoadReport
from serve_table.errors import ConfigError


def cluster_of(*words: str) -> ClusterConfig:
    parser = argparse.ArgumentParser()
    add_cluster_arguments(parser)
    return cluster_from(parser.parse_args(words))


def test_the_default_is_the_embedded_cluster_with_dilated_time() -> None:
    found = cluster_of()
    assert (found.kind, found.prefill_engines, found.decode_engines) == ("emulated", 2, 4)
    assert (found.dilation, found.prefill_urls, found.decode_urls) == (DEFAULT_DILATION, (), ())
    assert cluster_of("--dilation", "0.5").dilation == 0.5


def test_urls_are_an_existing_cluster_in_its_own_time() -> None:
    found = cluster_of("--prefill-url", "http://p0", "--decode-url", "http://d0", "http://d1", "--model", "m")
    assert (found.kind, found.prefill_engines, found.decode_engines) == ("existing", 1, 2)
    assert (found.dilation, found.model) == (1.0, "m")
    assert cluster_of("--decode-url", "http://d0").prefill_engines == 0


def test_existing_engines_are_asked_whether_they_are_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(url: str, method: str, path: str) -> bytes:
        asked.append(f"{method} {url}{path}")
        return b""

    monkeypatch.setattr("pipelines.live_run.ask", ask)
    found = cluster_of("--prefill-url", "http://p0", "--decode-url", "http://d0", "http://d1")
    said: list[str] = []
    with engines_of(found, tmp_path, said.append) as engines:
        assert engines.prefill_urls == ("http://p0",)
        assert engines.decode_urls == ("http://d0", "http://d1")
        assert engines.kept_pace
    assert said == []
    assert asked == ["GET http://p0/health", "GET http://d0/health", "GET http://d1/health"]


def test_kv_events_of_clusters_started_here_are_known_by_url(tmp_path: Path) -> None:
    assert known_kv_events(tmp_path) == {}
    engines = [
        EngineRecord(name="decode-0", role="decode", url="http://d0", log="", kv_events="tcp://d0:1,tcp://d0:2"),
        EngineRecord(name="decode-1", role="decode", url="http://d1", log=""),
    ]
    settings = {"kind": "vllm-cpu", "hardware": "a40-3b", "dilation": 8.0, "kv_tokens": 60_000, "model": "m"}
    state = ClusterState(name="one", started="now", ready=True, engines=engines, **settings)  # type: ignore[arg-type]
    (tmp_path / "one").mkdir()
    write_state(state, tmp_path / "one")
    assert known_kv_events(tmp_path) == {"http://d0": "tcp://d0:1,tcp://d0:2"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prefill-url", "http://p0"), "needs --decode-url"),
        (("--prefill", "0"), "at least one --prefill"),
        (("--decode", "0"), "one --decode"),
        (("--dilation", "0"), "--dilation 0.0 must be above 0"),
        (("--dilation", "-1"), "must be above 0"),
        (("--dilation", "nan"), "must be above 0"),
        (("--dilation", "inf"), "must be above 0"),
        (("--hardware", "h100"), "unknown hardware profile 'h100'"),
    ],
)
def test_clusters_that_cannot_be_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster_of(*words)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_load_whose_report_is_kept(number: signal.Signals) -> None:
    async def load() -> LoadReport:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), number)
        try:
            await asyncio.sleep(30.0)
        except asyncio.CancelledError:
            return cast(LoadReport, "incomplete")
        return cast(LoadReport, "complete")

    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert asyncio.run(interruptible(load())) == "incomplete"
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
