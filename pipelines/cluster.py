"""`rutter cluster up|down|status`: engines to run against."""

import argparse
import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pipelines.cluster_state import (
    CLUSTERS_FOLDER,
    ClusterState,
    end_engines,
    is_alive,
    known_clusters,
    read_state,
    remove_state,
    write_state,
)
from pipelines.emulated.cluster import Cluster, ClusterPlan, pacing_lines, read_pacing, start_emulated
from pipelines.emulated.engine_config import DEFAULT_LEASE_S
from pipelines.emulated.engine_process import is_healthy
from serve_table.errors import ClusterError, ConfigError
from serve_table.step_time import HardwareProfile, hardware_profile

__all__ = ["Cluster", "ClusterPlan", "add_arguments", "run", "start_emulated"]

EMULATED = "emulated"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `rutter cluster`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="up|down|status")
    up = commands.add_parser("up", help="start engines in the background and print their URLs")
    add = up.add_argument
    add("kind", choices=[EMULATED], help="emulated: engines of the simulator's model in real time, without a GPU")
    add("--prefill", type=int, default=2, metavar="N", help="prefill engines (%(default)s)")
    add("--decode", type=int, default=4, metavar="N", help="decode engines (%(default)s)")
    add("--hardware", default="a40-3b", help="profile of step times and limits (%(default)s)")
    add("--dilation", type=float, default=1.0, metavar="X", help="stretch of engine time, for a busy machine (1)")
    add("--kv-tokens", type=int, metavar="N", help="KV budget of one engine; default: the hardware's")
    add("--lease-s", type=float, default=DEFAULT_LEASE_S, help="engine seconds that a hand-off is held (%(default)s)")
    add("--model", help="served model name; default: the hardware's name")
    add("--base-port", type=int, metavar="P", help="ports from P on; default: free ones")
    add("--name", default=EMULATED, help="name of this cluster (%(default)s)")
    down = commands.add_parser("down", help="end exactly the engines that `up` started")
    down.add_argument("name", nargs="?", help="which cluster; not needed where there is one only")
    commands.add_parser("status", help="show the clusters, their engines and how they keep their pace")


def run(args: argparse.Namespace) -> int:
    """Do what the command line says; 0, or for `status` 1 where an engine is missing."""
    if args.action == "up":
        return up(args, CLUSTERS_FOLDER)
    if args.action == "down":
        return down(args.name, CLUSTERS_FOLDER)
    return status(CLUSTERS_FOLDER)


def up(args: argparse.Namespace, root: Path) -> int:
    """Start a cluster; on any failure, and on Ctrl-C, what was started is ended again."""
    profile = _profile(args)
    plan = ClusterPlan(
        args.prefill, args.decode, profile, args.dilation, args.lease_s, args.model, base_port=args.base_port
    )
    plan.config("checked before anything starts", 0)
    folder = _folder(root, args.name)
    with _only_one(folder, args.name):
        _require_free(folder, args.name)
        started = datetime.now(UTC).isoformat(timespec="seconds")

        def note(ready: bool = False) -> None:
            write_state(_state(args, plan, cluster, started, ready), folder)

        cluster = Cluster(plan, folder, note=note)
        try:
            with cluster:
                note(ready=True)
                _print_urls(cluster, args)
                cluster.detach()
        except BaseException:
            remove_state(folder)
            raise
    return 0


def down(name: str | None, root: Path) -> int:
    """End one cluster; nothing to end is no error."""
    names = known_clusters(root)
    if name is None and len(names) > 1:
        raise ConfigError(f"several clusters are known, name one: rutter cluster down {'|'.join(names)}")
    if name is None and not names:
        print("no cluster is running")
        return 0
    name = name or names[0]
    folder = _folder(root, name)
    state = read_state(folder)
    if state is None:
        print(f"no cluster {name!r} is running")
        return 0
    ran = end_engines(state.engines)
    remove_state(folder)
    gone = len(state.engines) - len(ran)
    print(f"cluster {name!r}: ended {len(ran)} engines" + (f"; {gone} had ended before" if gone else ""))
    return 0


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
        for line in pacing_lines(healthy, [read_pacing(engine.url) for engine in healthy]):
            print(f"  {line}")
    return 1 if missing else 0


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


def _state(args: argparse.Namespace, plan: ClusterPlan, cluster: Cluster, started: str, ready: bool) -> ClusterState:
    return ClusterState(
        name=args.name,
        kind=args.kind,
        hardware=args.hardware,
        dilation=plan.dilation,
        kv_tokens=plan.profile.kv_tokens,
        model=plan.model_name,
        started=started,
        ready=ready,
        engines=cluster.engines,
    )


def _print_urls(cluster: Cluster, args: argparse.Namespace) -> None:
    for engine in cluster.engines:
        print(f"{engine.name:<12} {engine.url:<24} pid {engine.pid}")
    prefill = f"--prefill {' '.join(cluster.prefill_urls)} " if cluster.prefill_urls else ""
    kv = f" --kv-tokens {args.kv_tokens}" if args.kv_tokens is not None else ""
    print("\nput a router in front of it:")
    print(
        f"  rutter serve {prefill}--decode {' '.join(cluster.decode_urls)} --cluster-kind {EMULATED} "
        f"--hardware {args.hardware} --dilation {args.dilation:g}{kv}"
    )
    print(f"end it:\n  rutter cluster down {args.name}")
