"""`rutter calibrate`: the engines' constants come back, and what is written can be used."""

import argparse
import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from emulated_engines import FAST, MODEL, emulated_engine, emulated_pair
from measured_points import TRUTH, all_points, spoilt
from small_runs import FAST as FAST_COLLECTION
from small_runs import TRAIN, Rutter, journal_rows, simulated_collection
from sse_stub import stream_tokens, stub_server

from learn.calibration import NAMES
from pipelines import calibrate, cli
from pipelines.calibrate import Target, calibration_of, ready_model, summary, target_from
from pipelines.calibration_client import CalibratedEngine, Prompts, Stream
from pipelines.calibration_measure import Measured, Measurement
from pipelines.calibration_picture import write_picture
from pipelines.calibration_plan import Limits, Task
from pipelines.calibration_start import start_from
from pipelines.cluster_state import ClusterState, EngineRecord, write_state
from pipelines.emulated.cluster import start_emulated
from pipelines.progress import Progress
from pipelines.stages import Run
from serve_table.artifact import load as load_artifact
from serve_table.artifact_metadata import SloMetadata
from serve_table.calibration import Calibration, load, save
from serve_table.errors import ClusterError, ConfigError, EngineError
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

QUICK = ["--rounds", "1", "--max-batch", "8", "--kv-tokens", "24000", "--budget-s", "120", "--dilation", "2"]
TARGET = Target(("http://p",), ("http://d",), "emulated-not-asked", 1.0, "m", A40_3B)


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    calibrate.add_arguments(parser)
    return parser.parse_args(flags)


def made(**changes: Any) -> Calibration:
    """A calibration of points with a known truth, without engines."""
    measured = Measured(spoilt(all_points(2), 0.01, 0.05), 0.0005, 2.0, [])
    return calibration_of(replace(TARGET, kind="existing", **changes), "m", measured, parsed(), 60.0)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file of a quick calibration of an emulated 1P+1D cluster in processes of its own."""
    folder = tmp_path_factory.mktemp("calibrated")
    with start_emulated(1, 1, A40_3B, 2.0, folder=folder / "engines", say=lambda _: None) as cluster:
        urls = ["--prefill-url", *cluster.prefill_urls, "--decode-url", *cluster.decode_urls]
        assert cli.main(["calibrate", *urls, *QUICK, "--to", str(folder / "c.json")]) == 0
    yield folder / "c.json"


@pytest.mark.slow
def test_an_emulated_cluster_s_profile_is_recovered(calibrated: Path) -> None:
    # One round on a machine that runs other tests: what it can tell is that nothing is off by a factor, such as the
    # dilation. How near a calibration comes is measured by `make calibrate`, and the fit's accuracy in tests/learn.
    calibration = load(calibrated)
    step, handoff = calibration.step_time(), calibration.handoff()
    assert 0.6 < step.floor_s / A40_3B.step.floor_s < 1.7
    assert 0.6 < step.per_token_beyond_s / A40_3B.step.per_token_beyond_s < 1.7
    assert 0.3 < step.per_context_token_s / A40_3B.step.per_context_token_s < 3.0
    assert 0.3 < handoff.per_token_s / A40_3B.handoff.per_token_s < 3.0
    assert 0.3 < handoff.latency_s / A40_3B.handoff.latency_s < 3.0
    assert calibration.overhead_s < 0.02
    assert {residual.kind for residual in calibration.residuals} == {"prefill", "decode", "interference", "handoff"}
    assert max(residual.median for residual in calibration.residuals) < 0.7
    assert (calibration.prefill_engines, calibration.decode_engines) == (1, 1)
    assert calibration.duration_s < 120.0
    assert calibration.model == MODEL


@pytest.mark.slow
def test_the_picture_is_beside_the_file(calibrated: Path) -> None:
    assert calibrated.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


async def test_engines_in_this_loop_are_measured_kind_by_kind() -> None:
    """Each task's points on a pair of fast engines, without waiting for a whole round."""
    profile = replace(FAST, step=replace(FAST.step, floor_s=0.004, per_token_beyond_s=0.00002))
    async with emulated_pair(profile=profile) as (prefill, decode):
        engines = [
            CalibratedEngine("prefill 0", prefill.url, MODEL, 1.0),
            CalibratedEngine("decode 0", decode.url, MODEL, 1.0),
        ]
        limits = Limits(4096, 20_000, 8, 2048)
        measurement = Measurement(engines[:1], engines[1:], limits, profile, 1.0, Prompts(0), np.random.default_rng(0))
        assert 0.9 < await measurement.warm_up() < 5.0
        (alone,) = await measurement.measure(Task("prefill", 1000, 0, 1, 0.0))
        assert (alone.engine, alone.prompt_tokens) == ("decode 0", 1000)
        assert 0.95 * 0.024 < alone.measured_s < 3 * 0.024
        (gap,) = await measurement.measure(Task("decode", 50, 4, 0, 0.0))
        assert 0.9 * 0.004 < gap.measured_s < 3 * 0.004
        assert 4 * 50 < gap.context_tokens < 4 * (50 + 40)
        (disturbed,) = await measurement.measure(Task("interference", 1500, 2, 0, 0.0))
        assert 0.9 * 0.034 < disturbed.measured_s < 3 * 0.034
        leg, pulled = await measurement.measure(Task("handoff", 200, 0, 0, 0.0))
        assert (leg.kind, leg.engine, pulled.kind, pulled.engine) == ("prefill", "prefill 0", "handoff", "decode 0")
        assert pulled.measured_s > 0.005
        assert await decode.metric("vllm:nixl_num_failed_transfers_total") == 0.0
        await prefill.until_idle()
        for engine in engines:
            engine.close()


async def test_the_time_ends_a_calibration_and_what_was_measured_stands() -> None:
    async with emulated_engine() as engine:
        decode = CalibratedEngine("decode 0", engine.url, MODEL, 1.0)
        limits = Limits(600, 20_000, 2, 2048)
        measurement = Measurement([], [decode], limits, FAST, 1.0, Prompts(0), np.random.default_rng(0))
        measured = await measurement.run(3.0, 1000, Progress("calibrate"))
        decode.close()
    assert 1.0 < measured.rounds < 1000.0
    assert {point.kind for point in measured.points} == {"prefill", "decode", "interference"}
    assert measured.http_s > 0.0


async def test_a_busy_engine_is_refused() -> None:
    async with emulated_engine() as engine:
        target = replace(TARGET, prefill_urls=(), decode_urls=(engine.url,), model=None)
        assert await ready_model(target) == (MODEL, FAST.max_model_len_tokens)
        body = {"prompt": [20] * 100, "max_tokens": 2000, "ignore_eos": True}
        running = asyncio.create_task(engine.post("/v1/completions", body))
        await engine.until(running=1)
        with pytest.raises(ClusterError, match="has other requests"):
            await ready_model(target)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_model_that_an_engine_does_not_serve_is_named() -> None:
    async with emulated_engine() as engine:
        target = replace(TARGET, prefill_urls=(), decode_urls=(engine.url,), model="another")
        with pytest.raises(ClusterError, match=f"does not serve 'another' but {MODEL}: give --model"):
            await ready_model(target)


async def test_an_engine_that_counts_other_tokens_is_refused() -> None:
    async def seven(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        await stream_tokens(writer, {**body, "prompt": [1] * 7})

    async with stub_server(seven) as (url, _):
        engine = CalibratedEngine("decode 0", url, "m", 1.0)
        measurement = Measurement(
            [], [engine], Limits(600, 20_000, 2, 2048), FAST, 1.0, Prompts(0), np.random.default_rng(0)
        )
        with pytest.raises(ClusterError, match="decode 0 counts 7 tokens in a prompt of 300 token ids"):
            await measurement.warm_up()
        engine.close()


async def test_an_engine_without_a_connector_is_told() -> None:
    async with emulated_engine() as engine:
        client = CalibratedEngine("prefill 0", engine.url, MODEL, 1.0)
        with pytest.raises(EngineError, match=r"prefill 0 .* answered 404"):
            await CalibratedEngine("prefill 0", engine.url, "another", 1.0).prefill_leg([20] * 10)
        leg = await client.prefill_leg([20] * 10)
        decode = CalibratedEngine("decode 0", engine.url, MODEL, 1.0)
        await decode.stream([20] * 10, 2, Stream(), leg.handle)
        with pytest.raises(EngineError, match="decode 0"):
            await decode.stream([20] * 10, 2, Stream(), leg.handle)
        client.close()
        decode.close()


def test_targets_are_multiples_of_the_unloaded_times_with_the_overhead_of_both_legs() -> None:
    calibration = made()
    loose, tight = calibration.slo_targets().loose, calibration.slo_targets().tight
    costs = calibration.step_time(), calibration.handoff()
    bare = targets_from_profile(replace(A40_3B, step=costs[0], handoff=costs[1]))
    assert tight.ttft_base_s == pytest.approx(bare.tight.ttft_base_s + 2.5 * 2 * calibration.overhead_s)
    assert loose.ttft_base_s == pytest.approx(2 * tight.ttft_base_s)
    assert loose.tpot_s == pytest.approx(2.0 / 1.5 * tight.tpot_s)
    assert tight.tpot_s == pytest.approx(1.5 * (TRUTH.step_time.floor_s + 0.000035 + 0.0004), rel=0.03)


def test_the_summary_shows_every_constant_and_what_was_not_measured() -> None:
    measured = Measured([point for point in all_points(2) if point.kind != "handoff"], 0.0005, 2.0, ["a note"])
    calibration = calibration_of(replace(TARGET, kind="existing", dilation=8.0), "m", measured, parsed(), 60.0)
    text = "\n".join(summary(calibration, A40_3B))
    assert all(name in text for name in NAMES)
    assert text.count("not measured") == 2
    assert "times divided by the dilation 8" in text
    assert "note: a note" in text
    assert "note: handoff_latency_s could not be measured" in text
    assert "prefill         48 points, off by 0.0% in the median" in text


def test_a_picture_is_drawn_without_any_handoffs_and_twice_the_same(tmp_path: Path) -> None:
    calibration = made()
    few = replace_points(calibration)
    for name in ("a.png", "b.png"):
        write_picture(few, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    write_picture(calibration, tmp_path / "whole.png")
    assert (tmp_path / "whole.png").read_bytes() != (tmp_path / "a.png").read_bytes()


def replace_points(calibration: Calibration) -> Calibration:
    points = [point for point in calibration.points if point.kind != "handoff"]
    return msgspec.structs.replace(calibration, points=points)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--decode-url", "http://x:1", "--budget-s", "0"], "--budget-s 0.0 must be above 0"),
        (["--decode-url", "http://x:1", "--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--decode-url", "http://x:1", "--seed", "-1"], "--seed -1"),
        (["--decode-url", "http://x:1", "--tight", "0.5", "1.5"], "--tight: multiples"),
        (["--decode-url", "http://x:1", "--tight", "6", "1.5"], "--tight must not be above --loose"),
        (["--decode-url", "http://x:1", "--to", "c.png"], "this is the picture's name"),
        (["--decode-url", "http://x:1", "--cluster-kind", "mine"], "--cluster-kind 'mine'"),
        (["--prefill-url", "http://x:1"], "--decode-url is missing"),
        (["--decode-url", "http://x:1", "--hardware", "h100"], "unknown hardware profile"),
    ],
)
def test_a_flag_that_cannot_be_used_is_one_line_and_status_2(rutter: Rutter, flags: list[str], message: str) -> None:
    ended = rutter("calibrate", *flags)
    assert ended.status == cli.USAGE
    assert message in ended.only_line()


def test_engines_that_are_not_there_are_one_line(rutter: Rutter, tmp_path: Path) -> None:
    ended = rutter("calibrate", "--decode-url", "http://127.0.0.1:1", "--to", tmp_path / "c.json")
    assert ended.status == cli.FAILED
    assert "127.0.0.1:1" in ended.only_line()
    assert not (tmp_path / "c.json").exists()


def test_a_named_cluster_tells_all_about_itself(tmp_path: Path) -> None:
    engines = [
        EngineRecord(name=f"{role}-0", role=role, url=f"http://{role}", pid=1, identity="x", log="log")
        for role in ("prefill", "decode")
    ]
    state = ClusterState(
        name="mine",
        kind="emulated",
        hardware="a40-3b",
        dilation=4.0,
        kv_tokens=12_345,
        model="served",
        started="now",
        ready=True,
        engines=engines,
    )
    write_state(state, tmp_path / "mine")
    target = target_from(parsed(), tmp_path)
    assert target == Target(
        ("http://prefill",), ("http://decode",), "emulated", 4.0, "served", replace(A40_3B, kv_tokens=12_345)
    )
    assert target_from(parsed("--cluster", "mine", "--kv-tokens", "99"), tmp_path).profile.kv_tokens == 99
    with pytest.raises(ConfigError, match="are known of the cluster 'mine'"):
        target_from(parsed("--dilation", "2"), tmp_path)


def test_training_starts_from_a_calibration() -> None:
    calibration = made()
    start = start_from("a40-3b", calibration)
    assert start.profile == replace(A40_3B, step=calibration.step_time(), handoff=calibration.handoff())
    assert (start.overhead_s, start.slo) == (calibration.overhead_s, calibration.slo_targets())
    assert start.calibrated_time == calibration.time
    bare = start_from("a40-3b", None)
    assert (bare.profile, bare.slo, bare.calibrated_time) == (A40_3B, targets_from_profile(A40_3B), None)


def test_train_puts_the_calibration_into_the_artifact_and_trains_anew_for_another(
    rutter: Rutter, tmp_path: Path
) -> None:
    folder, path = tmp_path / "run", tmp_path / "calibration.json"
    run = simulated_collection(folder)
    save(made(), path)
    ended = rutter("train", "--run-dir", folder, *TRAIN, "--calibration", path)
    assert ended.status == 0, ended.error
    assert "costs start from a calibration made within the last two minutes" in ended.out
    assert "beware: it is of a cluster 'existing'" in ended.out
    artifact = load_artifact(candidate(run))
    assert artifact.metadata.calibrated_time == load(path).time
    assert artifact.slo_targets() == load(path).slo_targets()
    assert artifact.step_time().knee_tokens == load(path).step_time().knee_tokens
    assert "already done" in rutter("train", "--run-dir", folder, *TRAIN, "--calibration", path).out
    path.write_bytes(b"{}")
    ended = rutter("train", "--run-dir", folder, *TRAIN, "--calibration", path)
    assert ended.status == cli.USAGE
    assert "calibration.json is refused" in ended.only_line()


def candidate(run: Run) -> Path:
    return run.output_path(run.latest("train"), "candidate")


@pytest.mark.slow
def test_collect_hands_the_calibration_s_targets_to_its_router(rutter: Rutter, tmp_path: Path) -> None:
    impossible = [SloMetadata(name, 0.0, 1e-9, 1e-9) for name in ("loose", "tight")]
    save(msgspec.structs.replace(made(), slo=impossible), tmp_path / "calibration.json")
    words = ["--run-dir", tmp_path / "run", *FAST_COLLECTION, "--calibration", tmp_path / "calibration.json"]
    ended = rutter("collect", *words)
    assert ended.status == 0, ended.error
    answered = [row for row in journal_rows(tmp_path / "run") if row.status == "ok"]
    assert len(answered) > 100
    assert not any(row.slo_met for row in answered)
