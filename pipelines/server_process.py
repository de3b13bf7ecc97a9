"""A server as a child process: ready inside a `with` block, ended in good order after it."""

import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from serve_table.errors import ClusterError

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


class ServerProcess:
    """A context manager that starts a server and ends it. log: where its output goes.

    Who inherits has a name for it, its command line, and the path that it answers with 200 once it is ready.
    """

    name = "the server"
    ready_path = "/health"
    log: Path
    url: str = ""
    _process: subprocess.Popen[bytes] | None = None

    def command(self, port: int) -> list[str]:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """Of the process, which leads a session. ClusterError where it does not run."""
        if self._process is None:
            raise ClusterError(f"{self.name} does not run")
        return self._process.pid

    def __enter__(self) -> Self:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        words = self.command(port)
        with open(self.log, "ab") as log:
            # A group of its own: Ctrl-C reaches us first, and we end it once its rows are written. The pipe closes
            # when we die, however that happens, and the router ends then by itself.
            try:
                self._process = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                raise ClusterError(f"{self.name} cannot be started: {words[0]}: {error.strerror}") from error
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End it: first kindly, so that it finishes what is open."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            if process.stdin is not None:
                process.stdin.close()

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process is None or self._process.poll() is not None:
                raise ClusterError(f"{self.name} did not start: {last_line(self.log)}")
            try:
                if httpx.get(f"{self.url}{self.ready_path}", timeout=2.0, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise ClusterError(f"{self.name} was not ready within {READY_TIMEOUT_S:.0f} s; its log is {self.log}")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it wrote nothing to {log}"
