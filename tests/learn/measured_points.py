"""Calibration points with known constants behind them."""

from collections.abc import Sequence

import numpy as np

from learn.calibration import steps_of
from learn.table import Costs
from serve_table.calibration import Kind, Point
from serve_table.step_time import A40_3B, Handoff, StepTime, handoff_time_s, step_time_s

TRUTH = Costs(StepTime(0.014, 0.000035, 220.0, 0.00008, 0.0000004), Handoff(0.009, 0.000012), 0.0017)
PREFILL_TOKENS = (32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
CHUNK = A40_3B.max_num_batched_tokens


def true_s(point: Point, costs: Costs = TRUTH) -> float:
    """The point's time by the step-time model, written out."""
    step = costs.step_time.as_list()
    time_s = sum(step_time_s(step, tokens, context) for tokens, context in steps_of(point, CHUNK))
    if point.kind == "handoff":
        time_s += handoff_time_s(costs.handoff.as_list(), point.prompt_tokens)
    return time_s + (costs.overhead_s if point.kind in ("prefill", "handoff") else 0.0)


def point(
    kind: Kind,
    prompt_tokens: int = 0,
    batch: int = 0,
    context_tokens: int = 0,
    engine: str = "decode 0",
    costs: Costs = TRUTH,
) -> Point:
    bare = Point(kind, engine, prompt_tokens, batch, context_tokens, 1.0, 1.0)
    return Point(kind, engine, prompt_tokens, batch, context_tokens, true_s(bare, costs), 1.0)


def all_points(repeats: int = 4) -> list[Point]:
    """What a calibration measures, without noise."""
    points = [
        point("prefill", length, engine=engine) for engine in ("prefill 0", "decode 0") for length in PREFILL_TOKENS
    ]
    points += [
        point("decode", batch=n, context_tokens=n * context)
        for n in (1, 2, 4, 8, 16, 32, 64)
        for context in (100, 1000, 4000)
        if n * context <= 40_000
    ]
    points += [point("interference", length, 4, 4 * 150) for length in (256, 512, 1024, 1800)]
    points += [point("handoff", length) for length in (64, 256, 1000, 4000, 8000)]
    return points * repeats


def spoilt(points: Sequence[Point], sigma: float, outliers: float, seed: int = 0) -> list[Point]:
    """The same with log-normal noise, and a share of points 1.5 to 5 times too long."""
    rng = np.random.default_rng(seed)
    factors = rng.lognormal(0.0, sigma, len(points))
    factors *= np.where(rng.random(len(points)) < outliers, rng.uniform(1.5, 5.0, len(points)), 1.0)
    return [
        Point(p.kind, p.engine, p.prompt_tokens, p.batch, p.context_tokens, p.measured_s * factor, 1.0)
        for p, factor in zip(points, factors.tolist(), strict=True)
    ]
