"""A cluster of engine processes of any kind: started together, waited for, ended together."""

import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from pipelines.cluster_state import EngineRecord, end_engines
from pipelines.engine_process import EngineProcess, is_healthy
from pipelines.pacing import PacingReport
from serve_table.errors import ClusterError

HOST = "127.0.0.1"
PROGRESS_INTERVAL_S = 15.0

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """One line of progress."""
    print(f"cluster: {line}", file=sys.stderr, flush=True)


def engine_names(n_prefill: int, n_decode: int) -> list[str]:
    """The names of a cluster's engines, prefill engines first."""
    return [f"prefill-{i}" for i in range(n_prefill)] + [f"decode-{i}" for i in range(n_decode)]


class EngineCluster(ABC):
    """Running engines, prefill engines first; a context manager. note: called after each start of one.

    folder: where configurations and logs go; None: a temporary one.
    """

    ready_timeout_s = 120.0
    poll_s = 0.05

    def __init__(
        self, folder: Path | None = None, say: Say = say_on_stderr, note: Callable[[], None] | None = None
    ) -> None:
        self._folder = folder
        self._say = say
        self._note = note
        self._resources = ExitStack()
        self._processes: list[EngineProcess] = []

    @property
    @abstractmethod
    def model(self) -> str:
        """Model name that the engines serve."""

    @property
    @abstractmethod
    def kv_tokens(self) -> int:
        """KV budget of one engine."""

    @abstractmethod
    def start_processes(self, folder: Path) -> None:
        """Start the engines, handing each to `add`."""

    @abstractmethod
    def read_pacing(self, url: str) -> PacingReport:
        """One engine's report; ClusterError where it does not answer."""

    @abstractmethod
    def reset_pacing(self) -> None:
        """Begin a new window of `pacing`."""

    def when_ready(self) -> None:  # noqa: B027 - a kind may have nothing to do then
        """What is done once all engines answer, before the cluster is handed over."""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def engines(self) -> list[EngineRecord]:
        return [process.record for process in self._processes]

    @property
    def prefill_urls(self) -> list[str]:
        return [engine.url for engine in self.engines if engine.role == "prefill"]

    @property
    def decode_urls(self) -> list[str]:
        return [engine.url for engine in self.engines if engine.role == "decode"]

    def pacing(self) -> dict[str, PacingReport]:
        """How each engine kept its step times since the last reset, by URL; ClusterError where one is gone."""
        return {engine.url: self.read_pacing(engine.url) for engine in self.engines}

    def pacing_lines(self) -> list[str]:
        """The same for a person: one line, and one more for each engine that did not keep them."""
        return pacing_lines([engine.name for engine in self.engines], list(self.pacing().values()))

    def require_running(self) -> None:
        """Raise ClusterError where an engine has ended by itself."""
        for process in self._processes:
            process.require_running()

    def add(self, process: EngineProcess) -> None:
        """Take a started engine into the cluster."""
        self._processes.append(process)
        if self._note is not None:
            self._note()

    def detach(self) -> None:
        """Let the engines outlive this process; `close` then ends nothing."""
        for process in self._processes:
            process.detach()
        self._processes.clear()

    def close(self) -> None:
        """End the engines."""
        try:
            end_engines(self.engines)
            for process in self._processes:
                process.ended()
        finally:
            self._processes.clear()
            self._resources.close()

    def _start(self) -> None:
        if self._folder is None:
            self._folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="rutter-cluster-")))
        self._folder.mkdir(parents=True, exist_ok=True)
        self.start_processes(self._folder)
        wait_until_ready(self._processes, self._say, self.ready_timeout_s, self.poll_s)
        self.when_ready()


def wait_until_ready(processes: Sequence[EngineProcess], say: Say, timeout_s: float, poll_s: float) -> None:
    """Return once each engine answers /health. Raises ClusterError where one has ended or takes too long."""
    began_s = said_s = time.monotonic()
    waiting, n = list(processes), len(processes)
    while waiting:
        for process in tuple(waiting):
            process.require_running()
            ready = is_healthy(process.record.url, timeout_s=1.0)
            process.note_children()
            if ready:
                waiting.remove(process)
                say(f"{process.record.name} is ready at {process.record.url} ({n - len(waiting)} of {n})")
        now_s = time.monotonic()
        if waiting and now_s - began_s > timeout_s:
            first = waiting[0].record
            raise ClusterError(f"{first.name} was not ready within {timeout_s:.0f} s; its log is {first.log}")
        if waiting and now_s - said_s > PROGRESS_INTERVAL_S:
            said_s = now_s
            names = ", ".join(process.record.name for process in waiting)
            say(f"waiting for {names}: {now_s - began_s:.0f} s so far")
        time.sleep(poll_s if waiting else 0.0)


def pacing_lines(names: Sequence[str], reports: Sequence[PacingReport]) -> list[str]:
    """What a person must know of how the engines kept their step times."""
    steps = sum(report.steps for report in reports)
    late = sum(report.steps_very_late for report in reports)
    worst_s = max((report.lateness_p99_s or 0.0 for report in reports), default=0.0)
    kept = sum(report.kept for report in reports)
    lines = [
        f"{kept} of {len(reports)} engines kept their step times: {late} of {steps} steps late by more than half a "
        f"step, the worst engine's lateness p99 {worst_s * 1000:.1f} ms"
    ]
    for name, report in zip(names, reports, strict=True):
        if not report.kept:
            advice = "its figures are not those of the hardware, take a larger --dilation"
            lines.append(f"{name} did not: {report.lateness}; {advice}")
    return lines
