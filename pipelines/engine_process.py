"""One engine process seen from its starter: its start, its lifeline, its health, its children."""

import http.client
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pipelines.cluster_state import EngineRecord, process_identity, session_members
from pipelines.lifeline import DETACH
from serve_table.errors import ClusterError

ASK_TIMEOUT_S = 2.0
SOURCES = Path(__file__).resolve().parents[1]


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

    def note_children(self) -> None:
        """Remember the processes that the engine has started, so that they can be ended where it cannot do so."""
        if self.process.returncode is None:
            children = session_members(self.record.pid)
            self.record = msgspec.structs.replace(self.record, children=children)

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


def start_process(
    record: EngineRecord, words: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> EngineProcess:
    """Start an engine in a session of its own, its log where the record says.

    words: the command line; the descriptor of the engine's end of the lifeline is put after them. environment: what
    is added to ours, beside the project's folder for imports. record: pid and identity are set here.
    """
    engine_end, own_end = os.pipe()
    paths = [str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        with open(record.log, "ab") as log:
            process = subprocess.Popen(
                [*words, str(engine_end)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(*pass_fds, engine_end),
                start_new_session=True,
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
            )
    except BaseException:
        os.close(own_end)
        raise
    finally:
        os.close(engine_end)
    identity = process_identity(process.pid) or ""
    return EngineProcess(msgspec.structs.replace(record, pid=process.pid, identity=identity), process, own_end)


def ask(url: str, method: str, path: str, timeout_s: float = ASK_TIMEOUT_S, body: Any = None) -> bytes:
    """The body of an engine's answer; ClusterError where there is none with status 200. body: sent as JSON."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    content = None if body is None else json.dumps(body)
    try:
        connection.request(method, path, content, {} if content is None else {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ClusterError(f"{url} does not answer: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ClusterError(f"{url}{path} answered {response.status}")
    return answer


def is_healthy(url: str, timeout_s: float = ASK_TIMEOUT_S) -> bool:
    """Whether an engine answers /health."""
    try:
        ask(url, "GET", "/health", timeout_s)
    except ClusterError:
        return False
    return True
