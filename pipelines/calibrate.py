"""`rutter calibrate`: measure a cluster's step and hand-off times, fit the constants, set the SLO targets."""

import argparse
import asyncio
import secrets
import time
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import uvloop

from learn.calibration import NAMES, fit_calibration, profile_values, residuals_of, uneven_engines
from pipelines.calibration_client import CalibratedEngine, Prompts
from pipelines.calibration_measure import Measured, Measurement, with_fitted
from pipelines.calibration_picture import write_picture
from pipelines.calibration_plan import Limits
from pipelines.cluster import VLLM_CPU
from pipelines.cluster_state import CLUSTERS_FOLDER, read_state
from pipelines.emulated import cluster as emulated_cluster
from pipelines.engine_probe import EngineProbe
from pipelines.engine_process import ask
from pipelines.engine_urls import engine_urls
from pipelines.live_run import EMULATED, EXISTING
from pipelines.progress import Progress
from pipelines.vllm_cpu import cluster as vllm_cluster
from serve_table.artifact_metadata import SloMetadata
from serve_table.calibration import Calibration, save
from serve_table.context import CLUSTER_KINDS
from serve_table.errors import ClusterError, ConfigError
from serve_table.slo import SloTargets, targets_from_profile
from serve_table.step_time import HardwareProfile, hardware_profile

DEFAULT_PATH = Path("build/calibration.json")
BUDGET_S = 300.0
ROUNDS = 5
MAX_BATCH = 64
ASK_TIMEOUT_S = 10.0
UNITS = {
    "floor_s": (1e3, "ms"),
    "per_token_s": (1e6, "us a token"),
    "knee_tokens": (1.0, "tokens"),
    "per_token_beyond_s": (1e6, "us a token"),
    "per_context_token_s": (1e9, "ns a context token"),
    "handoff_latency_s": (1e3, "ms"),
    "handoff_per_token_s": (1e6, "us a token"),
    "overhead_s": (1e3, "ms a leg"),
}


@dataclass(frozen=True)
class Target:
    """The cluster to measure, as far as the command line and `rutter cluster` know it. model: None for the first."""

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    kind: str
    dilation: float
    model: str | None
    profile: HardwareProfile

    @property
    def urls(self) -> tuple[str, ...]:
        return (*self.prefill_urls, *self.decode_urls)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cluster", metavar="NAME", help="a cluster that `rutter cluster up` started; not needed where it is alone")
    add("--prefill-url", action="extend", nargs="+", default=[], metavar="URL", help="an existing cluster's engines")
    add("--decode-url", action="extend", nargs="+", default=[], metavar="URL", help="an existing cluster's engines")
    add("--cluster-kind", help=f"of engines given by URL: {', '.join(CLUSTER_KINDS)}; default {EXISTING}")
    add("--dilation", type=float, help="of engines given by URL: measured times are divided by it (1)")
    add("--model", help="served model; default: the first that the first decode engine serves")
    add("--hardware", help="profile of limits, and of constants that cannot be measured (the cluster's, or a40-3b)")
    add("--kv-tokens", type=int, metavar="N", help="KV budget of one engine; default: the cluster's or the hardware's")
    add("--max-batch", type=int, default=MAX_BATCH, metavar="N", help="sequences at once, at most (%(default)s)")
    add("--budget-s", type=float, default=BUDGET_S, help="engine time to take at most, so wall at dilation 1 (300)")
    add("--rounds", type=int, default=ROUNDS, help="times that every point is measured, at most (%(default)s)")
    add("--tight", type=float, nargs=2, default=(2.5, 1.5), metavar=("TTFT", "TPOT"), help="multiples (2.5 1.5)")
    add("--loose", type=float, nargs=2, default=(5.0, 2.0), metavar=("TTFT", "TPOT"), help="multiples (5 2)")
    add("--seed", type=int, default=0, help="seed of the points' order and of the intervals (%(default)s)")
    add(
        "--to", type=Path, default=DEFAULT_PATH, metavar="FILE", help="where it goes, a picture beside it (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, fit and write; nothing is written before all is done."""
    _check(args)
    target = target_from(args)
    started_s = time.monotonic()
    reset_pace(target)
    measured, model = uvloop.run(measure(target, args))
    calibration = calibration_of(target, model, measured, args, time.monotonic() - started_s)
    save(calibration, args.to)
    picture = args.to.with_suffix(".png")
    write_picture(calibration, picture)
    for line in summary(calibration, target.profile):
        print(line)
    print(f"calibration: {args.to}, picture: {picture}")
    return 0


def _check(args: argparse.Namespace) -> None:
    for name in ("budget_s", "dilation"):
        value = getattr(args, name)
        if value is not None and not 0.0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be above 0")
    for name in ("rounds", "max_batch", "kv_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} must be at least 0")
    for name in ("tight", "loose"):
        if not all(1.0 <= multiple < float("inf") for multiple in getattr(args, name)):
            raise ConfigError(f"--{name}: multiples of the unloaded times must be at least 1")
    if any(tight > loose for tight, loose in zip(args.tight, args.loose, strict=True)):
        raise ConfigError("--tight must not be above --loose")
    if args.to.suffix == ".png":
        raise ConfigError(f"--to {args.to}: this is the picture's name; give the calibration's, as FILE.json")


def target_from(args: argparse.Namespace, root: Path = CLUSTERS_FOLDER) -> Target:
    """The cluster of the flags. Raises ConfigError, and ClusterError where it is not there."""
    urls = engine_urls(args, root)
    if urls.name is None:
        kind, dilation, hardware, kv_tokens = args.cluster_kind or EXISTING, args.dilation or 1.0, "a40-3b", None
        if kind not in CLUSTER_KINDS:
            raise ConfigError(f"--cluster-kind {kind!r}: known are {', '.join(CLUSTER_KINDS)}")
    else:
        state = read_state(root / urls.name)
        if state is None:
            raise ClusterError(f"cluster {urls.name!r} has just ended")
        if args.dilation is not None or args.cluster_kind is not None:
            raise ConfigError(f"--dilation and --cluster-kind are known of the cluster {urls.name!r}: leave them out")
        kind, dilation, hardware, kv_tokens = state.kind, state.dilation, state.hardware, state.kv_tokens
    profile = hardware_profile(args.hardware or hardware)
    profile = replace(profile, kv_tokens=args.kv_tokens or kv_tokens or profile.kv_tokens)
    return Target(urls.prefill_urls, urls.decode_urls, kind, dilation, args.model or urls.model, profile)


async def measure(target: Target, args: argparse.Namespace) -> tuple[Measured, str]:
    """Everything that needs the engines; also the model's name."""
    model, max_model_len = await ready_model(target)
    profile = target.profile
    limits = Limits(
        max_model_len_tokens=min(max_model_len or profile.max_model_len_tokens, profile.max_model_len_tokens),
        kv_tokens=profile.kv_tokens,
        max_batch=min(args.max_batch, profile.max_num_seqs),
        max_num_batched_tokens=profile.max_num_batched_tokens,
    )
    engines = {
        role: [CalibratedEngine(f"{role} {i}", url, model, target.dilation) for i, url in enumerate(urls)]
        for role, urls in (("prefill", target.prefill_urls), ("decode", target.decode_urls))
    }
    measurement = Measurement(
        engines["prefill"],
        engines["decode"],
        limits,
        profile,
        target.dilation,
        # Not from the seed: the engines remember the prompts of the last calibration.
        Prompts(secrets.randbits(64)),
        np.random.default_rng(args.seed),
    )
    try:
        with Progress("calibrate", unit="points") as progress:
            return await measurement.run(args.budget_s, args.rounds, progress), model
    finally:
        for engine in (*engines["prefill"], *engines["decode"]):
            engine.close()


async def ready_model(target: Target) -> tuple[str, int | None]:
    """The served model and its longest request; ClusterError where an engine is busy or serves another model."""
    async with httpx.AsyncClient(timeout=ASK_TIMEOUT_S, trust_env=False) as client:
        probes = [EngineProbe(url, "prefill", client) for url in target.prefill_urls]
        probes += [EngineProbe(url, "decode", client) for url in target.decode_urls]
        served = await asyncio.gather(*(probe.models() for probe in probes))
        if target.model is None and not served[-len(target.decode_urls)]:
            raise ClusterError(f"{target.decode_urls[0]} serves no model")
        model = target.model or served[-len(target.decode_urls)][0].id
        lengths = []
        for probe, models in zip(probes, served, strict=True):
            found = next((entry for entry in models if entry.id == model), None)
            if found is None:
                names = ", ".join(entry.id for entry in models)
                raise ClusterError(f"{probe.url} does not serve {model!r} but {names or 'nothing'}: give --model")
            lengths += [found.max_model_len] if found.max_model_len is not None else []
            for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
                if await probe.metric(gauge):
                    raise ClusterError(f"{probe.url} has other requests: calibrate while nothing else uses the cluster")
    return model, min(lengths, default=None)


def calibration_of(
    target: Target, model: str, measured: Measured, args: argparse.Namespace, duration_s: float
) -> Calibration:
    """Fit the points and put everything together."""
    fit = fit_calibration(measured.points, target.profile, args.seed)
    points = with_fitted(measured.points, fit.fitted_s.tolist())
    costs = fit.costs()
    fitted_profile = replace(target.profile, step=costs.step_time, handoff=costs.handoff)
    targets = targets_from_profile(fitted_profile, tuple(args.tight), tuple(args.loose), costs.overhead_s)
    return Calibration(
        time=time.time(),
        duration_s=duration_s,
        cluster_kind=target.kind,
        dilation=target.dilation,
        prefill_engines=len(target.prefill_urls),
        decode_engines=len(target.decode_urls),
        model=model,
        hardware=target.profile.name,
        max_num_batched_tokens=target.profile.max_num_batched_tokens,
        seed=args.seed,
        http_s=measured.http_s,
        constants=fit.constants(),
        slo=[SloMetadata(*astuple(targets[k])) for k in range(2)],
        residuals=residuals_of(points),
        notes=[*measured.notes, *fit.notes, *uneven_engines(points), *pace_notes(target)],
        points=points,
    )


def reset_pace(target: Target) -> None:
    """Let paced engines count anew how they keep their step times."""
    for url in target.urls:
        if target.kind == EMULATED:
            ask(url, "POST", "/emulator/pacing/reset")
        elif target.kind == VLLM_CPU:
            vllm_cluster.reset_pacing(url)


def pace_notes(target: Target) -> list[str]:
    """How many paced engines did not keep the step times that they were asked for meanwhile."""
    read = {EMULATED: emulated_cluster.read_pacing, VLLM_CPU: vllm_cluster.read_pacing}.get(target.kind)
    late = [] if read is None else [url for url in target.urls if not read(url).kept]
    return [f"{len(late)} engines did not keep their step times: the constants are this machine's"] if late else []


def summary(calibration: Calibration, profile: HardwareProfile) -> list[str]:
    """The calibration for a person."""
    stretched = f", times divided by the dilation {calibration.dilation:g}" if calibration.dilation != 1.0 else ""
    lines = [
        f"{calibration.model} on {calibration.cluster_kind} {calibration.prefill_engines}P+"
        f"{calibration.decode_engines}D: {len(calibration.points)} points in {calibration.duration_s:.0f} s{stretched}",
        f"{'constant':<22}{'fitted':>10}  {'95 % interval':<20}{calibration.hardware:>10}",
    ]
    for name, known in zip(NAMES, profile_values(profile).tolist(), strict=True):
        constant = getattr(calibration.constants, name)
        factor, unit = UNITS[name]
        interval = f"{constant.low * factor:.4g} - {constant.high * factor:.4g}"
        if constant.source == "profile":
            interval = "not measured"
        shown = "-" if name == "overhead_s" else f"{known * factor:.4g}"
        lines.append(f"{name:<22}{constant.value * factor:>10.4g}  {interval:<20}{shown:>10} {unit}")
    for residual in calibration.residuals:
        lines.append(
            f"{residual.kind:<13} {residual.points:>4} points, off by {residual.median:.1%} in the median, "
            f"{residual.max:.1%} at most"
        )
    lines.append(f"a round trip to an engine that does nothing: {calibration.http_s * 1e3:.2f} ms, wall")
    lines += [_target_line(calibration.slo_targets(), k) for k in range(2)]
    return lines + [f"note: {note}" for note in calibration.notes]


def _target_line(targets: SloTargets, k: int) -> str:
    slo = targets[k]
    return (
        f"SLO {slo.name:<6} TTFT {slo.ttft_base_s * 1e3:.1f} ms + {slo.ttft_per_prompt_token_s * 1e6:.1f} us a prompt "
        f"token, TPOT {slo.tpot_s * 1e3:.2f} ms"
    )
