"""Fitting constants to measured points: known ones are recovered, unknowable ones are said to be so."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from measured_points import PREFILL_TOKENS, TRUTH, all_points, point, spoilt

from learn.calibration import NAMES, CalibrationFit, fit_calibration, profile_values, residuals_of, uneven_engines
from serve_table.calibration import Kind, Point
from serve_table.errors import ConfigError
from serve_table.step_time import A40_3B

TRUE_VALUES = dict(
    zip(
        NAMES,
        [*TRUTH.step_time.as_list(), *TRUTH.handoff.as_list(), TRUTH.overhead_s],
        strict=True,
    )
)


def value(fit: CalibrationFit, name: str) -> float:
    return float(fit.values[NAMES.index(name)])


def measured(fit: CalibrationFit) -> set[str]:
    return {name for name, known in zip(NAMES, fit.measured.tolist(), strict=True) if known}


def of_kinds(*kinds: Kind) -> list[Point]:
    return [point for point in all_points() if point.kind in kinds]


def assert_close(fit: CalibrationFit, names: Sequence[str], rel: float) -> None:
    assert {name: value(fit, name) for name in names} == pytest.approx(
        {name: TRUE_VALUES[name] for name in names}, rel=rel
    )


def test_exact_times_give_the_exact_constants() -> None:
    fit = fit_calibration(all_points(1), A40_3B, seed=0)
    assert_close(fit, NAMES, 1e-4)
    assert measured(fit) == set(NAMES)
    assert fit.notes == ()
    assert fit.costs().handoff.latency_s == pytest.approx(TRUTH.handoff.latency_s, rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_noise_and_outliers_move_the_constants_by_a_few_percent(seed: int) -> None:
    fit = fit_calibration(spoilt(all_points(), sigma=0.02, outliers=0.1, seed=seed), A40_3B, seed)
    main = ("floor_s", "per_token_beyond_s", "per_context_token_s", "handoff_per_token_s")
    assert_close(fit, main, 0.06)
    assert_close(fit, NAMES, 0.3)
    residuals = {residual.kind: residual for residual in residuals_of(with_fit(all_points(), fit))}
    assert max(residual.median for residual in residuals.values()) < 0.03


def with_fit(points: Sequence[Point], fit: CalibrationFit) -> list[Point]:
    return [
        Point(p.kind, p.engine, p.prompt_tokens, p.batch, p.context_tokens, p.measured_s, fitted_s)
        for p, fitted_s in zip(points, fit.fitted_s.tolist(), strict=True)
    ]


def test_least_squares_without_robustness_would_be_far_off() -> None:
    """The outliers of these tests are worth resisting: the plain mean of their factors is far from 1."""
    clean = np.array([point.measured_s for point in all_points()])
    wrong = np.array([point.measured_s for point in spoilt(all_points(), 0.02, 0.1)])
    assert (wrong / clean).mean() > 1.15


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    covered = []
    for seed in range(8):
        fit = fit_calibration(spoilt(all_points(2), sigma=0.02, outliers=0.0, seed=seed), A40_3B, seed)
        truth = np.array([TRUE_VALUES[name] for name in NAMES])
        covered.append((fit.low <= truth) & (truth <= fit.high))
        assert np.all(fit.low <= fit.values)
        assert np.all(fit.values <= fit.high)
    assert 0.8 <= np.mean(covered) <= 1.0


def test_equal_points_and_seed_give_an_equal_fit() -> None:
    points = spoilt(all_points(1), 0.02, 0.1)
    first, second = (fit_calibration(points, A40_3B, 3) for _ in range(2))
    assert first.values.tolist() == second.values.tolist()
    assert first.low.tolist() == second.low.tolist()


def test_without_handoffs_the_profile_s_stand_and_it_is_said() -> None:
    fit = fit_calibration(of_kinds("prefill", "decode", "interference"), A40_3B, 0)
    assert measured(fit) == set(NAMES) - {"handoff_latency_s", "handoff_per_token_s"}
    assert fit.costs().handoff == A40_3B.handoff
    assert len(fit.notes) == 2
    assert "handoff_latency_s could not be measured: the profile's stands" in fit.notes
    constants = fit.constants()
    assert constants.handoff_latency_s.source == "profile"
    assert constants.floor_s.source == "measured"
    assert_close(fit, sorted(measured(fit)), 1e-3)


def test_one_batch_alone_tells_no_slope() -> None:
    fit = fit_calibration([point("decode", batch=4, context_tokens=400)] * 10, A40_3B, 0)
    assert measured(fit) == {"floor_s"}
    assert fit.costs().step_time.knee_tokens == A40_3B.step.knee_tokens
    assert fit.fitted_s == pytest.approx([point("decode", batch=4, context_tokens=400).measured_s] * 10, rel=1e-3)


def test_decodes_alone_leave_the_slope_beyond_the_knee_to_the_profile() -> None:
    fit = fit_calibration(of_kinds("decode"), A40_3B, 0)
    assert {"floor_s", "per_token_s", "per_context_token_s"} <= measured(fit)
    assert "overhead_s" not in measured(fit)
    assert not {"per_token_beyond_s", "knee_tokens"} & measured(fit)
    assert value(fit, "per_token_beyond_s") == A40_3B.step.per_token_beyond_s
    assert_close(fit, ("floor_s", "per_token_s", "per_context_token_s"), 0.02)


def test_engines_without_a_knee_get_one_slope_and_the_profile_s_knee() -> None:
    straight = replace(TRUTH, step_time=replace(TRUTH.step_time, per_token_s=TRUTH.step_time.per_token_beyond_s))
    points = [point(p.kind, p.prompt_tokens, p.batch, p.context_tokens, costs=straight) for p in all_points()]
    fit = fit_calibration(spoilt(points, 0.01, 0.0), A40_3B, 0)
    assert "knee_tokens" not in measured(fit)
    assert value(fit, "knee_tokens") == A40_3B.step.knee_tokens
    assert value(fit, "per_token_s") == pytest.approx(value(fit, "per_token_beyond_s"), rel=0.2)


def test_a_single_prompt_length_tells_less_than_many() -> None:
    fit = fit_calibration([point("prefill", 512)] * 5 + of_kinds("decode"), A40_3B, 0)
    assert_close(fit, ("floor_s", "per_context_token_s"), 0.05)
    many = fit_calibration(of_kinds("prefill", "decode"), A40_3B, 0)
    assert measured(fit) < measured(many)


def test_constants_are_never_negative() -> None:
    """Times that fall with length: the best line has a negative slope, the best allowed one none."""
    falling = [
        Point("prefill", "decode 0", length, 0, 0, 0.2 - length * 1e-5, 1.0) for length in PREFILL_TOKENS[:9]
    ] * 3
    fit = fit_calibration(falling, A40_3B, 0)
    assert np.all(fit.values >= 0.0)
    assert np.all(np.isfinite(fit.values))


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nothing was measured"):
        fit_calibration([], A40_3B, 0)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_an_error(bad: float) -> None:
    with pytest.raises(ConfigError, match="cannot be fitted"):
        fit_calibration([*all_points(1), Point("decode", "decode 0", 0, 1, 100, bad, 1.0)], A40_3B, 0)


def test_an_engine_that_prefills_slower_than_the_others_is_named() -> None:
    points = [
        Point(p.kind, p.engine, p.prompt_tokens, p.batch, p.context_tokens, p.measured_s, p.measured_s * factor)
        for p in all_points(1)
        for factor in [1.0 / 1.3 if p.engine == "prefill 0" else 1.0]
    ]
    (line,) = uneven_engines(points)
    assert line.startswith("prefill 0 takes 1.30 times as long")


def test_residuals_are_by_kind_and_relative() -> None:
    points = [
        Point("prefill", "decode 0", 64, 0, 0, 0.1, 0.11),
        Point("prefill", "decode 0", 64, 0, 0, 0.1, 0.08),
        Point("decode", "decode 0", 0, 1, 64, 0.1, 0.1),
    ]
    prefill, decode = residuals_of(points)
    assert (prefill.kind, prefill.points) == ("prefill", 2)
    assert prefill.median == pytest.approx(0.15)
    assert prefill.max == pytest.approx(0.2)
    assert (decode.kind, decode.max) == ("decode", 0.0)


def test_the_profile_s_values_are_in_the_order_of_the_names() -> None:
    values = dict(zip(NAMES, profile_values(A40_3B).tolist(), strict=True))
    assert values["per_context_token_s"] == A40_3B.step.per_context_token_s
    assert values["handoff_per_token_s"] == A40_3B.handoff.per_token_s
