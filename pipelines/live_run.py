"""One live run: a trace through a router of its own, in front of an emulated or an existing cluster."""

import argparse
import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from learn.trace import Trace
from pipelines.emulated.cluster import start_emulated
from pipelines.emulated.engine_process import ask
from pipelines.load import run_load
from pipelines.load_report import LoadReport
from pipelines.progress import Progress
from pipelines.router_process import RouterProcess
from serve_table.errors import ConfigError
from serve_table.step_time import hardware_profile

EMULATED = "emulated"
EXISTING = "existing"
Say = Callable[[str], None]
"""Tells a person one line."""

DEFAULT_DILATION = 2.0
"""Of the embedded emulated cluster: two cores keep a saturated 2P+4D's step times at it."""


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engines to run against. URLs are empty for the embedded emulated cluster."""

    kind: str
    prefill_engines: int
    decode_engines: int
    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    hardware: str
    dilation: float
    model: str


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `cluster_from`, the same for every live run."""
    add = parser.add_argument
    add("--prefill", type=int, default=2, metavar="N", help="emulated prefill engines (%(default)s)")
    add("--decode", type=int, default=4, metavar="N", help="emulated decode engines (%(default)s)")
    add("--prefill-url", action="extend", nargs="+", default=[], metavar="URL", help="an existing cluster's engines")
    add("--decode-url", action="extend", nargs="+", default=[], metavar="URL", help="an existing cluster's engines")
    add("--model", default=EMULATED, help="model name that the engines serve (%(default)s)")
    add("--hardware", default="a40-3b", help="hardware profile (%(default)s)")
    add("--dilation", type=float, help=f"stretch of engine time; default {DEFAULT_DILATION:g} emulated, 1 existing")


def cluster_from(args: argparse.Namespace) -> ClusterConfig:
    """The checked cluster of the flags; ConfigError names what does not fit."""
    hardware_profile(args.hardware)
    existing = bool(args.prefill_url or args.decode_url)
    if existing and not args.decode_url:
        raise ConfigError("an existing cluster needs --decode-url, and --prefill-url where it prefills remotely")
    if not existing and (args.prefill < 1 or args.decode < 1):
        raise ConfigError("the emulated cluster needs at least one --prefill and one --decode engine")
    dilation = args.dilation if args.dilation is not None else (1.0 if existing else DEFAULT_DILATION)
    if not 0.0 < dilation < float("inf"):
        raise ConfigError(f"--dilation {dilation} must be above 0")
    return ClusterConfig(
        kind=EXISTING if existing else EMULATED,
        prefill_engines=len(args.prefill_url) if existing else args.prefill,
        decode_engines=len(args.decode_url) if existing else args.decode,
        prefill_urls=tuple(args.prefill_url),
        decode_urls=tuple(args.decode_url),
        hardware=args.hardware,
        dilation=dilation,
        model=args.model,
    )


@dataclass
class Engines:
    """Where the engines are. kept_pace: whether emulated ones kept the asked step times, once they have ended."""

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    kept_pace: bool = True


@contextmanager
def engines_of(cluster: ClusterConfig, folder: Path, say: Say) -> Iterator[Engines]:
    """The existing engines, or an emulated cluster for the time of the block, its pace said at the end.

    Raises ClusterError for an engine that is down.
    """
    if cluster.kind != EMULATED:
        for url in (*cluster.prefill_urls, *cluster.decode_urls):
            ask(url, "GET", "/health")
        yield Engines(cluster.prefill_urls, cluster.decode_urls)
        return
    profile = hardware_profile(cluster.hardware)
    with start_emulated(
        cluster.prefill_engines,
        cluster.decode_engines,
        profile,
        cluster.dilation,
        model=cluster.model,
        folder=folder / "engines",
        say=say,
    ) as emulated:
        engines = Engines(tuple(emulated.prefill_urls), tuple(emulated.decode_urls))
        yield engines
        engines.kept_pace = all(report.kept for report in emulated.pacing().values())
        for line in emulated.pacing_lines():
            say(line)


@dataclass(frozen=True)
class RunPolicy:
    """How the router of a run decides."""

    name: str
    artifact: Path | None = None
    explore: float = 0.0
    seed: int = 0


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
        artifact=policy.artifact,
        explore=policy.explore,
        seed=policy.seed,
        cluster_kind=cluster.kind,
        dilation=cluster.dilation,
        arguments=["--hardware", cluster.hardware],
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
