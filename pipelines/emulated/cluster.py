"""Emulated engines as processes of their own: started together, ended together."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelines.emulated.engine_config import DEFAULT_LEASE_S, EngineConfig
from pipelines.emulated.engine_process import ask, listening_socket, start_engine
from pipelines.emulated.warm_up import compile_engine_model
from pipelines.engine_cluster import HOST, EngineCluster, Say, engine_names, say_on_stderr
from pipelines.pacing import PacingReport
from serve_table.errors import ConfigError
from serve_table.step_time import HardwareProfile


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
        self.config("checked before anything starts", 0)

    @property
    def names(self) -> list[str]:
        return engine_names(self.n_prefill, self.n_decode)

    @property
    def model_name(self) -> str:
        return self.model or self.profile.name

    def config(self, name: str, port: int) -> EngineConfig:
        """What one of the engines is told; ConfigError where it could not run so."""
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


class Cluster(EngineCluster):
    """Running emulated engines."""

    def __init__(
        self,
        plan: ClusterPlan,
        folder: Path | None = None,
        say: Say = say_on_stderr,
        note: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(folder, say, note)
        self.plan = plan

    @property
    def model(self) -> str:
        return self.plan.model_name

    @property
    def kv_tokens(self) -> int:
        return self.plan.profile.kv_tokens

    def start_processes(self, folder: Path) -> None:
        plan = self.plan
        with ExitStack() as sockets:
            listening = []
            for i, name in enumerate(plan.names):
                port = None if plan.base_port is None else plan.base_port + i
                listening.append(sockets.enter_context(listening_socket(HOST, port, name)))
            compile_engine_model(self._say)
            for name, socket_ in zip(plan.names, listening, strict=True):
                self.add(start_engine(plan.config(name, socket_.getsockname()[1]), socket_, folder))

    def read_pacing(self, url: str) -> PacingReport:
        return read_pacing(url)

    def reset_pacing(self) -> None:
        for engine in self.engines:
            ask(engine.url, "POST", "/emulator/pacing/reset")


def read_pacing(url: str) -> PacingReport:
    """One engine's report; ClusterError where it does not answer."""
    return msgspec.json.decode(ask(url, "GET", "/emulator/pacing"), type=PacingReport)
