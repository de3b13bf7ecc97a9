"""An emulated engine keeps its planned times, and says when it could not."""

import asyncio
import json
import logging
import time
from dataclasses import replace

import pytest
from emulated_engines import FAST, emulated_engine, leaving_client

from pipelines.emulated import engine_loop
from pipelines.pacing import Pacing

PACED = replace(FAST, step=replace(FAST.step, floor_s=0.01))


def test_a_pace_that_is_kept() -> None:
    pacing = Pacing(1.0)
    for _ in range(1000):
        pacing.step(0.0005, 0.010)
    pacing.step(0.008, 0.010)
    report = pacing.report()
    assert report.kept
    assert (report.steps, report.steps_late, report.steps_very_late) == (1001, 1, 1)
    assert report.lateness_p50_s == pytest.approx(0.0005)
    assert report.lateness_max_s == pytest.approx(0.008)


def test_a_pace_that_is_not_kept_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pacing = Pacing(1.0)
    for _ in range(200):
        pacing.step(0.006, 0.010)
    assert not pacing.report().kept
    assert len(caplog.records) == 1
    assert "does not keep the asked step times" in caplog.text
    pacing.reset()
    assert pacing.report().kept
    assert pacing.report().steps == 0
    assert pacing.report().lateness_p50_s is None


def test_a_plan_given_up_once_is_not_kept() -> None:
    pacing = Pacing(2.0)
    pacing.re_anchor(1.5)
    report = pacing.report()
    assert (report.kept, report.re_anchored, report.re_anchored_s) == (False, 1, 1.5)


async def test_lateness_does_not_add_up() -> None:
    async with emulated_engine(profile=PACED) as engine:
        loop = asyncio.get_running_loop()

        def disturb() -> None:
            time.sleep(0.008)
            loop.call_later(0.002, disturb)

        loop.call_later(0.002, disturb)
        body = {"prompt": "x", "max_tokens": 61, "ignore_eos": True, "stream": True}
        async with leaving_client(engine, body) as reader:
            await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"\n\n")
            began_s = time.monotonic()
            await reader.readuntil(b"[DONE]")
            # 60 steps of 10 ms, however late each wake-up was: with the 8 ms added up it would be more than a second.
            assert 0.55 < time.monotonic() - began_s < 0.95


async def test_an_engine_that_cannot_keep_its_times_says_so(caplog: pytest.LogCaptureFixture) -> None:
    profile = replace(FAST, step=replace(FAST.step, floor_s=0.00001, per_token_beyond_s=0.0))
    async with emulated_engine(profile=profile) as engine:
        assert (await engine.client.get("/emulator/pacing")).json()["kept"] is True
        await engine.post("/v1/completions", {"prompt": "x", "max_tokens": 400, "ignore_eos": True})
        report = (await engine.client.get("/emulator/pacing")).json()
        assert report["kept"] is False
        assert report["steps_very_late"] > 4
        assert report["lateness_p99_s"] > 0
        assert await engine.metric("rutter_emulator_pace_kept") == 0
        await engine.client.post("/emulator/pacing/reset")
        assert (await engine.client.get("/emulator/pacing")).json()["steps"] == 0
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1


async def test_an_engine_far_behind_begins_its_plan_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "BEHIND_LIMIT_S", 0.1)
    async with emulated_engine(profile=PACED) as engine:
        body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
        asyncio.get_running_loop().call_later(0.05, time.sleep, 0.3)
        events = await engine.events("/v1/completions", body)
        assert len(events) == 21
        report = json.loads((await engine.client.get("/emulator/pacing")).text)
        assert report["re_anchored"] >= 1
        assert report["re_anchored_s"] > 0.1
        assert report["kept"] is False


async def test_dilation_stretches_engine_time() -> None:
    async with emulated_engine(profile=PACED, dilation=2.0) as engine:
        began_s = time.monotonic()
        await engine.post("/v1/completions", {"prompt": "x", "max_tokens": 20, "ignore_eos": True})
        assert 0.4 <= time.monotonic() - began_s < 3.0
