"""Emulated engines as processes of their own: started together, ended together."""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from pipelines.cluster_state import EngineRecord, end_engines
from pipelines.emulated.engine_config import DEFAULT_LEASE_S, EngineConfig
from pipelines.emulated.engine_process import EngineProcess, ask, is_healthy, listening_socket, start_engine
from pipelines.emulated.pacing import PacingReport
from pipelines.emulated.warm_up import compile_engine_model
from serve_table.errors import ClusterError, ConfigError
from serve_table.step_time import HardwareProfile

HOST = "127.0.0.1"
READY_TIMEOUT_S = 120.0
POLL_S = 0.05

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """One line of progress."""
    print(f"cluster: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class ClusterPlan:
    """What to start. base_port: the first engine's, the others count on from it; None takes free ones."""

    n_prefill: int
    n_decode: int
    profile: HardwareProfile
    dilation: float = 1.0
    lease_s: float = DEFAULT_LEASE_S
    model: str | None = None
    base_port: int | None = None

    def __post_init__(self) -> None:
        if self.n_prefill < 0 or self.n_decode < 1:
            raise ConfigError("a cluster needs at least one --decode engine, and no fewer than 0 --prefill engines")
        if self.base_port is not None and not 0 < self.base_port <= 65536 - len(self.names):
            raise ConfigError(f"--base-port {self.base_port}: {len(self.names)} ports from there on must be in 1-65535")

    @property
    def names(self) -> list[str]:
        return [f"prefill-{i}" for i in range(self.n_prefill)] + [f"decode-{i}" for i in range(self.n_decode)]

    @property
    def model_name(self) -> str:
        return self.model or self.profile.name

    def config(self, name: str, port: int) -> EngineConfig:
        """What one of the engines is told."""
        return EngineConfig(
            name=name,
            role=name.partition("-")[0],
            host=HOST,
            port=port,
            model=self.model_name,
            profile=self.profile,
            dilation=self.dilation,
            lease_s=self.lease_s,
        )


def start_emulated(
    n_prefill: int,
    n_decode: int,
    profile: HardwareProfile,
    dilation: float = 1.0,
    *,
    lease_s: float = DEFAULT_LEASE_S,
    model: str | None = None,
    folder: Path | None = None,
    say: Say = say_on_stderr,
) -> "Cluster":
    """Engines for the time of a `with` block; they end with it, and by themselves should this process die.

    folder: where configurations and logs go; None: a temporary one. Raises ConfigError here, ClusterError on entry.
    """
    return Cluster(ClusterPlan(n_prefill, n_decode, profile, dilation, lease_s, model), folder, say)


class Cluster:
    """Running engines, prefill engines first; a context manager. note: called after each start of one."""

    def __init__(
        self,
        plan: ClusterPlan,
        folder: Path | None = None,
        say: Say = say_on_stderr,
        note: Callable[[], None] | None = None,
    ) -> None:
        self.plan = plan
        self._folder = folder
        self._say = say
        self._note = note
        self._resources = ExitStack()
        self._processes: list[EngineProcess] = []

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
        return {engine.url: read_pacing(engine.url) for engine in self.engines}

    def pacing_lines(self) -> list[str]:
        """The same for a person: one line, and one more for each engine that did not keep them."""
        return pacing_lines(self.engines, list(self.pacing().values()))

    def reset_pacing(self) -> None:
        """Begin a new window of `pacing`."""
        for engine in self.engines:
            ask(engine.url, "POST", "/emulator/pacing/reset")

    def require_running(self) -> None:
        """Raise ClusterError where an engine has ended by itself."""
        for process in self._processes:
            process.require_running()

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
        plan = self.plan
        if self._folder is None:
            self._folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="rutter-cluster-")))
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as sockets:
            listening = []
            for i, name in enumerate(plan.names):
                port = None if plan.base_port is None else plan.base_port + i
                listening.append(sockets.enter_context(listening_socket(HOST, port, name)))
            compile_engine_model(self._say)
            for name, socket_ in zip(plan.names, listening, strict=True):
                config = plan.config(name, socket_.getsockname()[1])
                self._processes.append(start_engine(config, socket_, self._folder))
                if self._note is not None:
                    self._note()
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        for ready, process in enumerate(self._processes, start=1):
            while not is_healthy(process.record.url, timeout_s=1.0):
                self.require_running()
                if time.monotonic() > deadline_s:
                    raise ClusterError(
                        f"{process.record.name} was not ready within {READY_TIMEOUT_S:.0f} s; "
                        f"its log is {process.record.log}"
                    )
                time.sleep(POLL_S)
            self._say(f"{process.record.name} is ready at {process.record.url} ({ready} of {len(self._processes)})")


def read_pacing(url: str) -> PacingReport:
    """One engine's report; ClusterError where it does not answer."""
    return msgspec.json.decode(ask(url, "GET", "/emulator/pacing"), type=PacingReport)


def pacing_lines(engines: Sequence[EngineRecord], reports: Sequence[PacingReport]) -> list[str]:
    """What a person must know of how the engines kept their step times."""
    steps = sum(report.steps for report in reports)
    late = sum(report.steps_very_late for report in reports)
    worst_s = max((report.lateness_p99_s or 0.0 for report in reports), default=0.0)
    kept = sum(report.kept for report in reports)
    lines = [
        f"{kept} of {len(reports)} engines kept their step times: {late} of {steps} steps late by more than half a "
        f"step, the worst engine's lateness p99 {worst_s * 1000:.1f} ms"
    ]
    for engine, report in zip(engines, reports, strict=True):
        if not report.kept:
            lines.append(
                f"{engine.name} did not: {report.steps_very_late} of {report.steps} steps very late, plan given up "
                f"{report.re_anchored} times; its figures are not those of the hardware, take a larger --dilation"
            )
    return lines
