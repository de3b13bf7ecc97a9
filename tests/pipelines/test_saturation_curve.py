"""The search for a saturation rate, on curves whose crossing is known."""

from collections.abc import Callable
from math import exp, log
from pathlib import Path

import numpy as np
import pytest

from pipelines.saturation_curve import (
    CurveFile,
    Probe,
    bracket,
    curve_lines,
    goodput_interval,
    next_rate,
    rate_at,
    smoothed,
)
from serve_table.errors import RunError

TARGET = 0.78


def probe(rate: float, goodput: float, **given: object) -> Probe:
    values: dict[str, object] = {
        "workload": "mixed",
        "requests_per_s": rate,
        "goodput": goodput,
        "goodput_low": max(goodput - 0.05, 0.0),
        "goodput_high": min(goodput + 0.05, 1.0),
        "kept_pace": True,
        "kept_schedule": True,
        "requests": 200,
        "failed": 0,
        "seed": 7,
        "start": 0,
        "cluster_kind": "emulated",
        "prefill_engines": 1,
        "decode_engines": 1,
        "dilation": 1.0,
    }
    return Probe(**{**values, **given})  # type: ignore[arg-type]


def collapse(at: float) -> Callable[[float], float]:
    """Goodput that falls through TARGET at a rate, as round robin's does."""
    slope = 3.0
    shift = log(1.0 / TARGET - 1.0)
    return lambda rate: 1.0 / (1.0 + exp(slope * (log(rate) - log(at)) + shift))


def searched(goodput: Callable[[float], float], first: float, n: int) -> list[Probe]:
    probes: list[Probe] = []
    while len(probes) < n and not bracket(probes, TARGET).settled(TARGET):
        rate = next_rate(probes, TARGET, first)
        probes.append(probe(rate, goodput(rate)))
    return probes


@pytest.mark.parametrize("first", [2.0, 6.0, 9.9, 10.0, 10.5, 15.0, 40.0])
def test_the_crossing_is_found_within_eight_probes_from_a_start_far_off(first: float) -> None:
    probes = searched(collapse(10.0), first, 8)
    assert rate_at(probes, TARGET) == pytest.approx(10.0, rel=0.03)


def test_the_crossing_is_found_where_goodput_is_measured_with_noise() -> None:
    rng = np.random.default_rng(3)
    found = []
    for _ in range(40):
        curve = collapse(10.0)
        probes = searched(lambda rate, curve=curve: float(np.clip(curve(rate) + rng.normal(0, 0.02), 0, 1)), 8.0, 8)
        found.append(rate_at(probes, TARGET))
    assert all(rate is not None for rate in found)
    # A goodput off by 0.02 moves the rate by 4 % here.
    assert np.median(np.abs(np.array(found, float) / 10.0 - 1.0)) < 0.05


def test_a_probe_that_does_not_count_changes_nothing() -> None:
    good = [probe(8.0, 0.9), probe(12.0, 0.6)]
    spoilt = [probe(9.0, 0.1, kept_pace=False), probe(10.0, 0.1, kept_schedule=False)]
    assert bracket([*good, *spoilt], TARGET) == bracket(good, TARGET)
    assert next_rate([*spoilt, *good], TARGET, 1.0) == next_rate(good, TARGET, 1.0)
    assert next_rate(spoilt, TARGET, 7.0) == 7.0
    assert probe(9.0, 0.5, kept_pace=None).counted


def test_goodput_that_rises_with_the_rate_is_smoothed_before_it_is_bracketed() -> None:
    probes = [probe(8.0, 0.95), probe(9.0, 0.74), probe(10.0, 0.80), probe(12.0, 0.5)]
    rates, smooth = smoothed(probes)
    assert rates.tolist() == [8.0, 9.0, 10.0, 12.0]
    assert smooth.tolist() == pytest.approx([0.95, 0.77, 0.77, 0.5])
    found = bracket(probes, TARGET)
    assert (found.low, found.high) == (8.0, 9.0)


def test_without_a_crossing_there_is_no_rate_and_the_search_goes_outward() -> None:
    assert rate_at([], TARGET) is None
    above = [probe(8.0, 0.99)]
    assert rate_at(above, TARGET) is None
    assert next_rate(above, TARGET, 8.0) == pytest.approx(8.0 * 1.6)
    assert next_rate([probe(8.0, 0.80)], TARGET, 8.0) == pytest.approx(8.0 * 1.2)
    assert next_rate([probe(8.0, 0.20)], TARGET, 8.0) == pytest.approx(8.0 / 1.6)
    assert next_rate([probe(8.0, 0.75)], TARGET, 8.0) == pytest.approx(8.0 / 1.2)


def test_an_end_at_the_goodput_settles_a_bracket_but_not_a_curve_without_one() -> None:
    wide = [probe(8.0, 0.90), probe(12.0, 0.60)]
    assert not bracket(wide, TARGET).settled(TARGET)
    assert bracket([*wide, probe(9.0, 0.785)], TARGET).settled(TARGET)
    assert bracket([probe(8.0, 0.82), probe(8.3, 0.70)], TARGET).settled(TARGET)
    assert not bracket([probe(8.0, 0.78)], TARGET).settled(TARGET)


def test_the_file_keeps_probes_and_names_a_damaged_line(tmp_path: Path) -> None:
    file = CurveFile(tmp_path / "curve.jsonl")
    assert file.probes() == []
    probes = [probe(8.0, 0.9), probe(12.0, 0.6, kept_pace=None)]
    for one in probes:
        file.append(one)
    assert file.probes() == probes
    file.path.write_bytes(file.path.read_bytes()[:-20])
    with pytest.raises(RunError, match=r"curve\.jsonl line 2 is damaged"):
        file.append(probe(9.0, 0.8))


def test_the_curve_is_shown_by_rate_with_what_does_not_count() -> None:
    lines = curve_lines([probe(12.0, 0.6), probe(8.0, 0.9), probe(9.0, 0.7, kept_pace=False, failed=3)], TARGET)
    assert [line.split()[0] for line in lines[1:]] == ["8", "9", "12"]
    assert lines[2].endswith("late engines: does not count")
    assert "3" in lines[2].split()
    assert lines[1].count("#") > lines[3].count("#")


def test_the_interval_of_a_share_is_wilsons() -> None:
    # Newcombe 1998, Statistics in Medicine 17, table I: 81 of 263.
    assert goodput_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    low, high = goodput_interval(200, 200)
    assert (0.97 < low < 1.0, high) == (True, pytest.approx(1.0))
