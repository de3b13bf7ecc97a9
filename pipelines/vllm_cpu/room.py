"""Whether the machine has room for the engines: memory, disk and free ports, checked before anything starts."""

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from pipelines.engine_cluster import HOST
from pipelines.vllm_cpu.engine_flags import PORTS_OF_ENGINE, EnginePorts, VllmCpuPlan
from serve_table.errors import ClusterError

ENGINE_BYTES = 1_100_000_000
"""Resident memory of one engine's two processes, measured."""
DISK_BYTES = 200_000_000
"""For logs and what vLLM keeps of its own in the user's cache."""
LOWEST_PORT, HIGHEST_PORT = 20_000, 32_000
"""Below the ports that Linux gives to outgoing connections, so that none is taken while the engines load."""


def require_memory(n_engines: int) -> None:
    """Raise ClusterError where the engines would not fit into what is free; nothing where the system does not say."""
    free_bytes = available_bytes()
    needed_bytes = n_engines * ENGINE_BYTES
    if free_bytes is not None and free_bytes < needed_bytes:
        raise ClusterError(
            f"{n_engines} engines need about {needed_bytes / 1e9:.1f} GB of memory and {free_bytes / 1e9:.1f} GB are "
            "free: end other programs, or start fewer engines (--prefill 1 --decode 2)"
        )


def available_bytes() -> int | None:
    """Memory that can be taken without swapping, by Linux's estimate; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def require_disk(folder: Path) -> None:
    """Raise ClusterError where there is no room for the logs."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < DISK_BYTES:
        raise ClusterError(f"{folder} has {free_bytes / 1e6:.0f} MB free, {DISK_BYTES / 1e6:.0f} MB are needed")


def choose_ports(plan: VllmCpuPlan) -> list[EnginePorts]:
    """Ports for each engine. ClusterError names one that is in use."""
    n = len(plan.names)
    if plan.base_port is not None:
        ports = list(range(plan.base_port, plan.base_port + PORTS_OF_ENGINE * n))
        for port in ports:
            _require_free(port)
    else:
        found = _free_ports()
        ports = [next(found) for _ in range(PORTS_OF_ENGINE * n)]
    return [EnginePorts(*ports[i::n]) for i in range(n)]


def _free_ports() -> Iterator[int]:
    """Free ports one after the other, begun at another place in each process."""
    n = HIGHEST_PORT - LOWEST_PORT
    first = os.getpid() * 101 % n
    for i in range(n):
        port = LOWEST_PORT + (first + i) % n
        if _refusal(port) is None:
            yield port
    raise ClusterError(f"too few ports are free from {LOWEST_PORT} to {HIGHEST_PORT}: name others with --base-port")


def _require_free(port: int) -> None:
    refusal = _refusal(port)
    if refusal is not None:
        raise ClusterError(
            f"port {port} cannot be used ({refusal}): choose another --base-port, or leave it out to take free ports"
        )


def _refusal(port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error.strerror or str(error)
    return None
