"""The start of one emulated engine process, with a socket that listens already."""

import socket
import sys
from pathlib import Path

from pipelines.cluster_state import EngineRecord
from pipelines.emulated.engine_config import EngineConfig, read_config, write_config
from pipelines.engine_process import EngineProcess, ask, is_healthy, start_process
from serve_table.errors import ClusterError

__all__ = ["ask", "is_healthy", "listening_socket", "start_again", "start_engine"]

BACKLOG = 2048


def listening_socket(host: str, port: int | None, name: str) -> socket.socket:
    """A socket that listens already, so that no other process can take the port; port None: a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port or 0))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ClusterError(
            f"port {port} for {name} cannot be used ({error.strerror}): choose another --base-port, "
            "or leave it out to take free ports"
        ) from error
    return listening


def start_engine(config: EngineConfig, listening: socket.socket, folder: Path) -> EngineProcess:
    """Start an engine in a session of its own, with its configuration and log in `folder`."""
    config_path = folder / f"{config.name}.json"
    write_config(config, config_path)
    record = EngineRecord(
        name=config.name,
        role="prefill" if config.role == "prefill" else "decode",
        url=f"http://{config.host}:{config.port}",
        log=str(folder / f"{config.name}.log"),
    )
    words = [sys.executable, "-m", "pipelines.emulated.process", str(config_path), str(listening.fileno())]
    # An engine is one thread: the pools of numpy's libraries would only take memory.
    return start_process(record, words, {"OPENBLAS_NUM_THREADS": "1"}, (listening.fileno(),))


def start_again(record: EngineRecord, folder: Path) -> EngineProcess:
    """Start an engine as it was started before, on the same port."""
    config = read_config(folder / f"{record.name}.json")
    with listening_socket(config.host, config.port, config.name) as listening:
        return start_engine(config, listening, folder)
