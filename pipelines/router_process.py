"""`rutter serve` as a child process, for the runs that send load through it."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from serve_table.errors import ClusterError
from serve_table.kv_endpoint import NOWHERE

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


@dataclass
class RouterProcess:
    """A router in front of the given engines; a context manager that starts it and ends it in good order.

    kv_events: endpoints by engine URL. arguments: further flags of `rutter serve`. log: where its output goes.
    """

    prefill_urls: Sequence[str]
    decode_urls: Sequence[str]
    journal: Path
    policy: str
    log: Path
    policy_params: dict[str, float | str] = field(default_factory=dict)
    artifact: Path | None = None
    explore: float = 0.0
    seed: int = 0
    cluster_kind: str = "existing"
    dilation: float = 1.0
    kv_events: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    url: str = ""
    _process: subprocess.Popen[bytes] | None = None

    def command(self, port: int) -> list[str]:
        words = [sys.executable, "-m", "pipelines.cli", "serve", "--port", str(port), "--policy", self.policy]
        words += ["--prefill", *self.prefill_urls] if self.prefill_urls else []
        words += ["--decode", *self.decode_urls, "--journal", str(self.journal)]
        words += ["--explore", str(self.explore), "--seed", str(self.seed)]
        words += ["--cluster-kind", self.cluster_kind, "--dilation", str(self.dilation), "--exit-with-stdin"]
        if self.policy_params:
            words += ["--policy-params", json.dumps(self.policy_params)]
        if self.artifact is not None:
            words += ["--artifact", str(self.artifact)]
        words += kv_event_flags(self.prefill_urls, self.decode_urls, self.kv_events)
        return [*words, *self.arguments]

    def __enter__(self) -> Self:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            # A group of its own: Ctrl-C reaches us first, and we end it once its rows are written. The pipe closes
            # when we die, however that happens, and the router ends then by itself.
            self._process = subprocess.Popen(
                self.command(port), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
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
        """End it: first kindly, so that it journals what is open."""
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
                raise ClusterError(f"the router did not start: {last_line(self.log)}")
            try:
                if httpx.get(f"{self.url}/ready", timeout=2.0, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise ClusterError(f"the router was not ready within {READY_TIMEOUT_S:.0f} s; its log is {self.log}")


def kv_event_flags(prefill_urls: Sequence[str], decode_urls: Sequence[str], kv_events: Mapping[str, str]) -> list[str]:
    """The flags of `rutter serve` for engines that publish KV events, by their URLs."""
    words: list[str] = []
    for flag, urls in (("--prefill-kv-events", prefill_urls), ("--decode-kv-events", decode_urls)):
        if any(url in kv_events for url in urls):
            words += [flag, *(kv_events.get(url, NOWHERE) for url in urls)]
    return words


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it wrote nothing to {log}"
