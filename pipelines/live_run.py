"""One live run: a trace through a router of its own, in front of an emulated or an existing cluster."""

import argparse
import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from learn.trace import Trace
from pipelines.cluster_state import known_kv_events, kv_events_of
from pipelines.emulated.cluster import start_emulated
from pipelines.engine_cluster import EngineCluster, pacing_lines
from pipelines.engine_process import ask
from pipelines.load import run_load
from pipelines.load_report import LoadReport
from pipelines.progress import Progress
from pipelines.router_process import RouterProcess
from pipelines.vllm_cpu import engine_flags as vllm_cpu
from pipelines.vllm_cpu.cluster import read_pacing, reset_pacing, start_vllm_cpu
from serve_table.errors import ConfigError
from serve_table.step_time import HardwareProfile, hardware_profile

EMULATED = "emulated"
VLLM_CPU = "vllm-cpu"
EXISTING = "existing"
Say = Callable[[str], None]
"""Tells a person one line."""

DEFAULT_DILATION = 2.0
"""Of the embedded emulated cluster: two cores keep a saturated 2P+4D's step times at it."""
DEFAULT_DILATIONS = {EMULATED: DEFAULT_DILATION, VLLM_CPU: vllm_cpu.DEFAULT_DILATION, EXISTING: 1.0}


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engines to run against. URLs are empty for an embedded cluster, which is started for the run."""

    kind: str
    prefill_engines: int
    decode_engines: int
    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    hardware: str
    dilation: float
    model: str


def add_cluster_arguments(parser: argparse.ArgumentParser, *other_kinds: str) -> None:
    """The flags of `cluster_from`, the same for every live run. other_kinds: of clusters that are none of its."""
    add = parser.add_argument
    kinds = "emulated, or vllm-cpu: real vLLM engines; with URLs, what they are: existing or vllm-cpu"
    kinds += "".join(f"; or {kind}" for kind in other_kinds)
    add("--cluster", choices=[EMULATED, VLLM_CPU, EXISTING, *other_kinds], help=kinds)
    add("--prefill", type=int, default=2, metavar="N", help="prefill engines to start (%(default)s)")
    add("--decode", type=int, default=4, metavar="N", help="decode engines to start (%(default)s)")
    add("--prefill-url", action="extend", nargs="+", default=[], metavar="URL", help="an existing cluster's engines")
    add("--decode-url", action="extend", nargs="+", default=[], metavar="URL", help="an existing cluster's engines")
    add("--model", default=EMULATED, help="model name that the engines serve (%(default)s)")
    add("--hardware", default="a40-3b", help="hardware profile (%(default)s)")
    defaults = ", ".join(f"{dilation:g} {kind}" for kind, dilation in DEFAULT_DILATIONS.items())
    add("--dilation", type=float, help=f"stretch of engine time; default {defaults}")


def cluster_from(args: argparse.Namespace) -> ClusterConfig:
    """The checked cluster of the flags; ConfigError names what does not fit."""
    hardware_profile(args.hardware)
    existing = bool(args.prefill_url or args.decode_url)
    if existing and not args.decode_url:
        raise ConfigError("an existing cluster needs --decode-url, and --prefill-url where it prefills remotely")
    kind = args.cluster or (EXISTING if existing else EMULATED)
    if kind == EXISTING and not existing:
        raise ConfigError("--cluster existing needs its engines' --decode-url, and --prefill-url")
    if kind == EMULATED and existing:
        raise ConfigError("--cluster emulated starts its own engines: leave out --prefill-url and --decode-url")
    if not existing and (args.prefill < 1 or args.decode < 1):
        raise ConfigError(f"the {kind} cluster needs at least one --prefill and one --decode engine")
    dilation = args.dilation if args.dilation is not None else DEFAULT_DILATIONS[kind]
    if not 0.0 < dilation < float("inf"):
        raise ConfigError(f"--dilation {dilation} must be above 0")
    return ClusterConfig(
        kind=kind,
        prefill_engines=len(args.prefill_url) if existing else args.prefill,
        decode_engines=len(args.decode_url) if existing else args.decode,
        prefill_urls=tuple(args.prefill_url),
        decode_urls=tuple(args.decode_url),
        hardware=args.hardware,
        dilation=dilation,
        model=args.model,
    )


def profile_of(cluster: ClusterConfig) -> HardwareProfile:
    """The profile that the engines really have: vLLM on CPUs has KV blocks of its own size."""
    profile = hardware_profile(cluster.hardware)
    if cluster.kind != VLLM_CPU:
        return profile
    return vllm_cpu.VllmCpuPlan(cluster.prefill_engines, cluster.decode_engines, profile, cluster.dilation).profile


@dataclass
class Engines:
    """Where the engines are. kept_pace: whether paced ones kept the asked step times, once the run has ended.
    kv_events: where their KV events come from, by URL.
    """

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    kept_pace: bool = True
    kv_events: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def engines_of(cluster: ClusterConfig, folder: Path, say: Say) -> Iterator[Engines]:
    """The existing engines, or a cluster started for the time of the block; the pace of paced ones is said at the end.

    Raises ClusterError for an engine that is down.
    """
    if cluster.decode_urls:
        for url in (*cluster.prefill_urls, *cluster.decode_urls):
            ask(url, "GET", "/health")
        with _paced(cluster, say) as engines:
            yield engines
        return
    with _embedded(cluster, folder, say) as embedded:
        kv_events = kv_events_of(embedded.engines)
        engines = Engines(tuple(embedded.prefill_urls), tuple(embedded.decode_urls), kv_events=kv_events)
        yield engines
        engines.kept_pace = all(report.kept for report in embedded.pacing().values())
        for line in embedded.pacing_lines():
            say(line)


@contextmanager
def _paced(cluster: ClusterConfig, say: Say) -> Iterator[Engines]:
    """Engines that run already; how paced ones kept their pace during the block is said at its end."""
    engines = Engines(cluster.prefill_urls, cluster.decode_urls, kv_events=known_kv_events())
    if cluster.kind != VLLM_CPU:
        yield engines
        return
    urls = [*engines.prefill_urls, *engines.decode_urls]
    for url in urls:
        reset_pacing(url)
    yield engines
    reports = [read_pacing(url) for url in urls]
    engines.kept_pace = all(report.kept for report in reports)
    for line in pacing_lines(urls, reports):
        say(line)


def _embedded(cluster: ClusterConfig, folder: Path, say: Say) -> EngineCluster:
    start = start_vllm_cpu if cluster.kind == VLLM_CPU else start_emulated
    return start(
        cluster.prefill_engines,
        cluster.decode_engines,
        hardware_profile(cluster.hardware),
        cluster.dilation,
        model=cluster.model,
        folder=folder / "engines",
        say=say,
    )


@dataclass(frozen=True)
class RunPolicy:
    """How the router of a run decides. calibration: sets its SLO targets where no artifact does. params: replace the
    policy's defaults.
    """

    name: str
    artifact: Path | None = None
    calibration: Path | None = None
    explore: float = 0.0
    seed: int = 0
    params: Mapping[str, float | str] = field(default_factory=dict)


def send_through_router(
    cluster: ClusterConfig,
    engines: Engines,
    policy: RunPolicy,
    trace: Trace,
    folder: Path,
    progress: Progress,
    id_prefix: str = "load",
) -> LoadReport:
    """Send a trace and return what the client saw; rows go to `folder`/journal, the router's log to router.log."""
    router = RouterProcess(
        engines.prefill_urls,
        engines.decode_urls,
        folder / "journal",
        policy.name,
        folder / "router.log",
        policy_params=dict(policy.params),
        artifact=policy.artifact,
        explore=policy.explore,
        seed=policy.seed,
        cluster_kind=cluster.kind,
        dilation=cluster.dilation,
        kv_events=engines.kv_events,
        arguments=[
            *("--hardware", cluster.hardware),
            *(("--calibration", str(policy.calibration)) if policy.calibration is not None else ()),
        ],
    )
    with router, progress:
        load = run_load(
            router.url,
            trace,
            seed=policy.seed,
            model=cluster.model,
            dilation=cluster.dilation,
            progress=progress,
            id_prefix=id_prefix,
        )
        return uvloop.run(interruptible(load))


async def interruptible(load: Coroutine[Any, Any, LoadReport]) -> LoadReport:
    """Await a load; Ctrl-C or a termination cancels it, and its report says that it is incomplete."""
    task = asyncio.ensure_future(load)
    if threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
    return await task
