"""`rutter cluster up|down|restart|status`: engines to run against."""

import argparse
import fcntl
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pipelines.cluster_state import (
    CLUSTERS_FOLDER,
    ClusterState,
    end_engines,
    is_alive,
    known_clusters,
    kv_events_of,
    read_state,
    remove_state,
    write_state,
)
from pipelines.emulated.cluster import Cluster, ClusterPlan, start_emulated
from pipelines.emulated.cluster import read_pacing as read_emulated_pacing
from pipelines.emulated.engine_config import DEFAULT_LEASE_S
from pipelines.emulated.engine_process import start_again as restart_emulated
from pipelines.engine_cluster import EngineCluster, pacing_lines, say_on_stderr, wait_until_ready
from pipelines.engine_process import is_healthy
from pipelines.pacing import PacingReport
from pipelines.router_process import kv_event_flags
from pipelines.vllm_cpu.cluster import VllmCpuCluster, start_vllm_cpu
from pipelines.vllm_cpu.cluster import read_pacing as read_vllm_pacing
from pipelines.vllm_cpu.engine_flags import DEFAULT_DILATION, VllmCpuPlan
from pipelines.vllm_cpu.engine_start import start_again as restart_vllm
from serve_table.errors import ClusterError, ConfigError
from serve_table.step_time import HardwareProfile, hardware_profile

__all__ = [
    "Cluster",
    "ClusterPlan",
    "add_arguments",
    "run",
    "start_emulated",
    "start_vllm_cpu",
    "vllm_pacing",
]

EMULATED = "emulated"
VLLM_CPU = "vllm-cpu"
RESTART_POLL_S = 0.2
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `rutter cluster`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="up|down|restart|status")
    up = commands.add_parser("up", help="start engines in the background and print their URLs")
    add = up.add_argument
    kinds = (
        "emulated: engines of the simulator's model in real time; vllm-cpu: vLLM's own engines and NIXL hand-offs on "
        "this machine's CPUs, paced to the hardware (make vllm-env builds their environment)"
    )
    add("kind", choices=[EMULATED, VLLM_CPU], help=kinds)
    add("--prefill", type=int, default=2, metavar="N", help="prefill engines (%(default)s)")
    add("--decode", type=int, default=4, metavar="N", help="decode engines (%(default)s)")
    add("--hardware", default="a40-3b", help="profile of step times and limits (%(default)s)")
    stretch = f"stretch of engine time, for a slow or busy machine (1; vllm-cpu: {DEFAULT_DILATION:g})"
    add("--dilation", type=float, metavar="X", help=stretch)
    add("--kv-tokens", type=int, metavar="N", help="KV budget of one engine; default: the hardware's")
    add("--lease-s", type=float, default=DEFAULT_LEASE_S, help="engine seconds that a hand-off is held (%(default)s)")
    add("--model", help="served model name; default: the hardware's name")
    ports = "ports from P on, one an engine, four for vllm-cpu; default: free ones"
    add("--base-port", type=int, metavar="P", help=ports)
    add("--name", help="name of this cluster; default: its kind")
    down = commands.add_parser("down", help="end exactly the engines that `up` started")
    down.add_argument("name", nargs="?", help="which cluster; not needed where there is one only")
    restart_ = commands.add_parser("restart", help="start one engine anew, on the same port, as after its crash")
    restart_.add_argument("engine", help="its name, as `status` shows it")
    restart_.add_argument("name", nargs="?", help="which cluster; not needed where there is one only")
    commands.add_parser("status", help="show the clusters, their engines and how they keep their pace")


def run(args: argparse.Namespace) -> int:
    """Do what the command line says; 0, or for `status` 1 where an engine is missing."""
    if args.action == "up":
        return up(args, CLUSTERS_FOLDER)
    if args.action == "down":
        return down(args.name, CLUSTERS_FOLDER)
    if args.action == "restart":
        return restart(args.engine, args.name, CLUSTERS_FOLDER)
    return status(CLUSTERS_FOLDER)


def up(args: argparse.Namespace, root: Path) -> int:
    """Start a cluster; on any failure, and on Ctrl-C, what was started is ended again."""
    args.name = args.name or args.kind
    if args.dilation is None:
        args.dilation = DEFAULT_DILATION if args.kind == VLLM_CPU else 1.0
    folder = _folder(root, args.name)

    def note(ready: bool = False) -> None:
        write_state(_state(args, cluster, started, ready), folder)

    cluster = _cluster(args, folder, note)
    with _only_one(folder, args.name):
        _require_free(folder, args.name)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            with cluster:
                note(ready=True)
                _print_urls(cluster, args)
                cluster.detach()
        except BaseException:
            remove_state(folder)
            raise
    return 0


def _cluster(args: argparse.Namespace, folder: Path, note: Callable[[], None]) -> EngineCluster:
    """The cluster of the flags, not yet started; ConfigError where they do not fit."""
    settings = (args.prefill, args.decode, _profile(args), args.dilation, args.lease_s, args.model, args.base_port)
    if args.kind == VLLM_CPU:
        return VllmCpuCluster(VllmCpuPlan(*settings), folder, note=note)
    return Cluster(ClusterPlan(*settings), folder, note=note)


def down(name: str | None, root: Path) -> int:
    """End one cluster; nothing to end is no error."""
    state = _state_of(name, root)
    if state is None:
        print(f"no cluster {name!r} is running" if name else "no cluster is running")
        return 0
    ran = end_engines(state.engines)
    remove_state(_folder(root, state.name))
    gone = len(state.engines) - len(ran)
    print(f"cluster {state.name!r}: ended {len(ran)} engines" + (f"; {gone} had ended before" if gone else ""))
    return 0


def restart(engine_name: str, name: str | None, root: Path) -> int:
    """Start one engine of a cluster anew, whether it still runs or not; the others are left alone."""
    state = _state_of(name, root)
    if state is None:
        raise ClusterError("no such cluster is running: rutter cluster up starts one")
    folder = _folder(root, state.name)
    old = next((engine for engine in state.engines if engine.name == engine_name), None)
    if old is None:
        raise ConfigError(f"{engine_name!r}: known are {', '.join(engine.name for engine in state.engines)}")
    with _only_one(folder, state.name):
        end_engines([old])
        process = (restart_vllm if state.kind == VLLM_CPU else restart_emulated)(old, folder)
        try:
            wait_until_ready([process], say_on_stderr, VllmCpuCluster.ready_timeout_s, RESTART_POLL_S)
            engines = [process.record if engine == old else engine for engine in state.engines]
            write_state(msgspec.structs.replace(state, engines=engines), folder)
            process.detach()
        except BaseException:
            end_engines([process.record])
            process.ended()
            raise
    return 0


def _state_of(name: str | None, root: Path) -> ClusterState | None:
    """The cluster of that name, or the only one; None where there is none. ConfigError where it must be named."""
    names = known_clusters(root)
    if name is None and len(names) > 1:
        raise ConfigError(f"several clusters are known, name one: {' | '.join(names)}")
    if name is None:
        return read_state(_folder(root, names[0])) if names else None
    return read_state(_folder(root, name))


def status(root: Path) -> int:
    """Print every known cluster; 1 where an engine of one is gone or silent."""
    names = known_clusters(root)
    if not names:
        print("no cluster is running")
    missing = 0
    for name in names:
        state = read_state(_folder(root, name))
        if state is None:
            continue
        print(f"{name}: {state.kind}, {state.hardware}, dilation {state.dilation:g}, since {state.started}")
        healthy = []
        for engine in state.engines:
            alive = is_alive(engine)
            answers = alive and is_healthy(engine.url)
            healthy += [engine] if answers else []
            word = "healthy" if answers else "running, does not answer" if alive else "gone"
            print(f"  {engine.name:<12} {engine.url:<24} pid {engine.pid:<8} {word}")
        missing += len(state.engines) - len(healthy)
        for line in pacing_lines(
            [engine.name for engine in healthy], [_read_pacing(state.kind, engine.url) for engine in healthy]
        ):
            print(f"  {line}")
    return 1 if missing else 0


def vllm_pacing(name: str = VLLM_CPU, root: Path = CLUSTERS_FOLDER) -> dict[str, PacingReport]:
    """How each engine of a vllm-cpu cluster that `up` started kept its step times, by URL. Raises ClusterError."""
    state = read_state(_folder(root, name))
    if state is None or state.kind != VLLM_CPU:
        raise ClusterError(f"no {VLLM_CPU} cluster {name!r} is running")
    return {engine.url: _read_pacing(state.kind, engine.url) for engine in state.engines}


def _read_pacing(kind: str, url: str) -> PacingReport:
    return read_vllm_pacing(url) if kind == VLLM_CPU else read_emulated_pacing(url)


def _profile(args: argparse.Namespace) -> HardwareProfile:
    profile = hardware_profile(args.hardware)
    if args.kv_tokens is None:
        return profile
    if args.kv_tokens < 1:
        raise ConfigError(f"--kv-tokens {args.kv_tokens}: must be positive")
    return replace(profile, kv_tokens=args.kv_tokens)


def _folder(root: Path, name: str) -> Path:
    if not NAME.fullmatch(name):
        raise ConfigError(f"cluster name {name!r}: letters, digits, '.', '_' and '-' only, at most 64")
    return root / name


@contextmanager
def _only_one(folder: Path, name: str) -> Iterator[None]:
    """Keep a second `up` of the same name out while one is at work."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "up.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ClusterError(f"cluster {name!r} is being started by another command") from error
        yield


def _require_free(folder: Path, name: str) -> None:
    state = read_state(folder)
    if state is None:
        return
    running = sum(map(is_alive, state.engines))
    if running:
        raise ClusterError(
            f"cluster {name!r} is running already ({running} of {len(state.engines)} engines): "
            f"rutter cluster down {name}, or choose another --name"
        )


def _state(args: argparse.Namespace, cluster: EngineCluster, started: str, ready: bool) -> ClusterState:
    return ClusterState(
        name=args.name,
        kind=args.kind,
        hardware=args.hardware,
        dilation=args.dilation,
        kv_tokens=cluster.kv_tokens,
        model=cluster.model,
        started=started,
        ready=ready,
        engines=cluster.engines,
    )


def _print_urls(cluster: EngineCluster, args: argparse.Namespace) -> None:
    for engine in cluster.engines:
        print(f"{engine.name:<12} {engine.url:<24} pid {engine.pid}")
    prefill = f"--prefill {' '.join(cluster.prefill_urls)} " if cluster.prefill_urls else ""
    kv = f" --kv-tokens {args.kv_tokens}" if args.kv_tokens is not None else ""
    flags = kv_event_flags(cluster.prefill_urls, cluster.decode_urls, kv_events_of(cluster.engines))
    events = "".join(f" {word}" for word in flags)
    print("\nput a router in front of it:")
    print(
        f"  rutter serve {prefill}--decode {' '.join(cluster.decode_urls)} --cluster-kind {args.kind} "
        f"--hardware {args.hardware} --dilation {args.dilation:g}{kv}{events}"
    )
    print(f"end it:\n  rutter cluster down {args.name}")
