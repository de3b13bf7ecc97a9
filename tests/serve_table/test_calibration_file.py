"""The calibration file: what was written is read, anything else is refused with a reason."""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sample_artifact import sample_artifact, with_metadata
from sample_calibration import constant, sample_calibration

from serve_table import explain
from serve_table.artifact import parse as parse_artifact
from serve_table.artifact import save as save_artifact
from serve_table.artifact import validated
from serve_table.artifact_metadata import Metadata, SloMetadata
from serve_table.calibration import Calibration, age_text, load, parse, save
from serve_table.errors import ArtifactError, ConfigError
from serve_table.price_params import PriceParams
from serve_table.server import add_arguments, build_router, constants_of_price, slo_targets
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B, Handoff, StepTime


@pytest.fixture
def document() -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(sample_calibration())
    return fields


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "calibration.json"
    save(sample_calibration(), path)
    loaded = load(path)
    assert loaded == sample_calibration()
    assert loaded.step_time() == StepTime(0.012, 0.00003, 140.0, 0.00006, 0.0000002)
    assert loaded.handoff() == Handoff(0.007, 0.000009)
    assert loaded.overhead_s == 0.001
    assert loaded.slo_targets()[1].ttft_target_s(1000) == pytest.approx(0.275)
    assert [entry.name for entry in path.parent.iterdir()] == ["calibration.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save(sample_calibration(), path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="http_s is nan"):
        save(sample_calibration(http_s=float("nan")), path)
    with pytest.raises(ArtifactError):
        save(sample_calibration(), path / "below a file")
    assert path.read_bytes() == before


def test_every_truncation_is_refused() -> None:
    content = msgspec.json.encode(sample_calibration())
    for length in range(len(content)):
        with pytest.raises(ConfigError):
            parse(content[:length])


def test_a_newer_version_is_named_even_with_other_fields(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="version 2, this program reads version 1"):
        parse(json.dumps({"version": 2, "something": "new"}).encode())
    with pytest.raises(ConfigError, match="unknown field"):
        parse(json.dumps({**document, "something": "new"}).encode())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"version": 1, "time": NaN}', "no calibration, or truncated"),
        (b"[]", "no calibration"),
        (b"\xff\xfe", "no calibration"),
        (b"{}", "no calibration"),
        (b" " * 5_000_000, "more than"),
    ],
)
def test_what_is_no_calibration_is_refused(bad: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(bad)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"time": -1.0}, "time is -1"),
        ({"dilation": 0.0}, "dilation is 0"),
        ({"decode_engines": 0}, "at least one decode engine"),
        ({"slo": []}, "must be those of loose and tight"),
        ({"slo": [SloMetadata("loose", 0.1, 0.0, 0.0), SloMetadata("tight", 0.1, 0.0, 0.01)]}, "slo.loose"),
        ({"slo": [SloMetadata("loose", 0.1, -1.0, 0.1), SloMetadata("tight", 0.1, 0.0, 0.01)]}, "slo.loose"),
    ],
)
def test_values_that_cannot_be_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(msgspec.json.encode(sample_calibration(**fields)))


def with_floor(value: float, low: float, high: float) -> Calibration:
    constants = sample_calibration().constants
    floor = msgspec.structs.replace(constant(value), low=low, high=high)
    return sample_calibration(constants=msgspec.structs.replace(constants, floor_s=floor))


@pytest.mark.parametrize(("value", "low", "high"), [(-0.1, -0.2, 0.1), (0.01, 0.02, 0.03), (0.01, 0.0, 0.005)])
def test_a_constant_outside_its_interval_or_below_zero_is_refused(value: float, low: float, high: float) -> None:
    with pytest.raises(ConfigError, match=r"constants\.floor_s"):
        parse(msgspec.json.encode(with_floor(value, low, high)))


def test_an_infinite_number_is_refused(document: dict[str, Any]) -> None:
    text = json.dumps(document).replace('"duration_s": 140.0', '"duration_s": 1e999')
    with pytest.raises(ConfigError):
        parse(text.encode())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the calibration .*none\.json: No such file"):
        load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"bad\.json is refused"):
        load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "within the last two minutes"),
        (-30.0, "within the last two minutes"),
        (-3600.0, "in the future by this machine's clock"),
        (600.0, "10 minutes ago"),
        (7200.0, "2 hours ago"),
        (10 * 86_400.0, "10 days ago"),
    ],
)
def test_ages_are_told_in_a_fitting_unit(seconds: float, text: str) -> None:
    assert age_text(1_700_000_000.0 - seconds, 1_700_000_000.0) == text


def test_serve_takes_targets_from_the_artifact_then_the_calibration_then_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save(sample_calibration(), path)
    calibrated = sample_calibration().slo_targets()
    assert slo_targets(None, load(path), A40_3B) == calibrated
    assert slo_targets(sample_artifact(), load(path), A40_3B) == sample_artifact().slo_targets() != calibrated
    assert slo_targets(None, None, A40_3B) == targets_from_profile(A40_3B) != calibrated


def test_serve_refuses_a_damaged_calibration_even_where_it_is_not_needed(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(b"{}")
    artifact = tmp_path / "rutter.safetensors"
    save_artifact(sample_artifact(), artifact)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for flags in ([], ["--artifact", str(artifact)]):
        given = ["--decode", "http://127.0.0.1:1", "--calibration", str(path), *flags]
        with pytest.raises(ConfigError, match=r"calibration\.json is refused"):
            build_router(parser.parse_args(given))


def test_the_price_takes_its_constants_where_the_targets_come_from() -> None:
    calibration = sample_calibration()
    slo = targets_from_profile(A40_3B)
    profiled = constants_of_price(None, A40_3B, slo)
    assert PriceParams(**profiled) == PriceParams()
    calibrated = constants_of_price(calibration, A40_3B, slo)
    assert calibrated["step_floor_s"] == calibration.step_time().floor_s != profiled["step_floor_s"]
    assert calibrated["overhead_s"] == calibration.overhead_s


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({}, "not calibrated, last journal row 2 hours ago"),
        ({"calibrated_time": 1_700_000_000.0 - 86_400 * 9}, "calibrated 9 days ago, last journal row 2 hours ago"),
        ({"calibrated_time": 1_700_000_000.0, "journal_last_time": None}, "calibrated 2 hours ago"),
    ],
)
def test_explain_shows_how_old_the_constants_are(metadata: dict[str, Any], text: str) -> None:
    assert explain.age_of(with_metadata(**metadata), 1_700_000_000.0 + 7200.0) == text


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_an_artifact_with_an_impossible_calibration_time_is_refused(bad: float) -> None:
    with pytest.raises(ArtifactError, match="calibrated_time"):
        validated(with_metadata(calibrated_time=bad))


def test_an_artifact_from_before_calibrations_is_read_and_keeps_its_time_otherwise() -> None:
    old: dict[str, Any] = msgspec.to_builtins(sample_artifact().metadata)
    del old["calibrated_time"]
    assert msgspec.convert(old, Metadata).calibrated_time is None
    artifact = with_metadata(calibrated_time=1_700_000_000.5)
    assert parse_artifact(artifact.to_bytes()).metadata.calibrated_time == 1_700_000_000.5
