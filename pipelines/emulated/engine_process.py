"""One emulated engine process seen from its starter: its socket, its start, its lifeline, its health."""

import http.client
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipelines.cluster_state import EngineRecord, process_identity
from pipelines.emulated.engine_config import EngineConfig, write_config
from pipelines.emulated.process import DETACH
from serve_table.errors import ClusterError

BACKLOG = 2048
ASK_TIMEOUT_S = 2.0
SOURCES = Path(__file__).resolve().parents[2]


@dataclass
class EngineProcess:
    """A started engine. lifeline_fd: while it is open, the engine runs; None once detached or ended."""

    record: EngineRecord
    process: subprocess.Popen[bytes]
    lifeline_fd: int | None

    def detach(self) -> None:
        """Let the engine outlive this process."""
        if self.lifeline_fd is not None:
            os.write(self.lifeline_fd, DETACH)
            self._close_lifeline()
            # No longer ours to wait for: without this Popen warns of a process left running.
            self.process.returncode = 0

    def ended(self) -> None:
        """Clear up after the process was ended."""
        self._close_lifeline()
        self.process.wait()

    def require_running(self) -> None:
        """Raise ClusterError where the engine has ended by itself."""
        status = self.process.poll()
        if status is not None:
            lines = Path(self.record.log).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = lines[-1] if lines else "it wrote nothing"
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise ClusterError(f"{self.record.name} {how}; the end of its log {self.record.log}: {last}")

    def _close_lifeline(self) -> None:
        if self.lifeline_fd is not None:
            os.close(self.lifeline_fd)
            self.lifeline_fd = None


def listening_socket(host: str, port: int | None, name: str) -> socket.socket:
    """A socket that listens already, so that no other process can take the port; port None: a free one."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
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
    config_path, log_path = folder / f"{config.name}.json", folder / f"{config.name}.log"
    write_config(config, config_path)
    engine_end, own_end = os.pipe()
    words = [sys.executable, "-m", "pipelines.emulated.process", str(config_path)]
    paths = [str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        with open(log_path, "ab") as log:
            process = subprocess.Popen(
                [*words, str(listening.fileno()), str(engine_end)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(listening.fileno(), engine_end),
                start_new_session=True,
                # An engine is one thread: the pools of numpy's libraries would only take memory.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"},
            )
    except BaseException:
        os.close(own_end)
        raise
    finally:
        os.close(engine_end)
    record = EngineRecord(
        name=config.name,
        role="prefill" if config.role == "prefill" else "decode",
        url=f"http://{config.host}:{config.port}",
        pid=process.pid,
        identity=process_identity(process.pid) or "",
        log=str(log_path),
    )
    return EngineProcess(record, process, own_end)


def ask(url: str, method: str, path: str, timeout_s: float = ASK_TIMEOUT_S) -> bytes:
    """The body of an engine's answer; ClusterError where there is none with status 200."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ClusterError(f"{url} does not answer: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ClusterError(f"{url}{path} answered {response.status}")
    return body


def is_healthy(url: str, timeout_s: float = ASK_TIMEOUT_S) -> bool:
    """Whether an engine answers /health."""
    try:
        ask(url, "GET", "/health", timeout_s)
    except ClusterError:
        return False
    return True
