"""vLLM engines on CPUs as processes of their own: checked, started, warmed up and ended together."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from pipelines.cluster_state import EngineRecord, kv_events_of
from pipelines.emulated.engine_config import DEFAULT_LEASE_S
from pipelines.engine_cluster import HOST, EngineCluster, Say, say_on_stderr
from pipelines.engine_process import ask
from pipelines.vllm_cpu.engine_flags import DEFAULT_DILATION, EnginePorts, VllmCpuPlan, engine_flags
from pipelines.vllm_cpu.engine_start import start_engine
from pipelines.vllm_cpu.environment import vllm_python
from pipelines.vllm_cpu.pace import VllmPacingReport
from pipelines.vllm_cpu.room import choose_ports, require_disk, require_memory
from pipelines.vllm_cpu.tiny_model import tiny_model
from pipelines.vllm_cpu.warm_up import warm_up
from serve_table.step_time import HardwareProfile

READY_TIMEOUT_S = 600.0
"""On a busy machine; 50 s for one engine alone, 150 s for six on two free cores."""
PACING_TIMEOUT_S = 10.0
"""An engine answers between two steps, and the longest takes a second."""


def start_vllm_cpu(
    n_prefill: int,
    n_decode: int,
    profile: HardwareProfile,
    dilation: float = DEFAULT_DILATION,
    *,
    lease_s: float = DEFAULT_LEASE_S,
    model: str | None = None,
    folder: Path | None = None,
    say: Say = say_on_stderr,
) -> "VllmCpuCluster":
    """Engines for the time of a `with` block; they end with it, and by themselves should this process die.

    folder: where logs go; None: a temporary one. Raises ConfigError here and ClusterError on entry.
    """
    return VllmCpuCluster(VllmCpuPlan(n_prefill, n_decode, profile, dilation, lease_s, model), folder, say)


class VllmCpuCluster(EngineCluster):
    """Running vLLM engines. Raises ConfigError where vLLM's environment is not built."""

    ready_timeout_s = READY_TIMEOUT_S
    poll_s = 0.5

    def __init__(
        self,
        plan: VllmCpuPlan,
        folder: Path | None = None,
        say: Say = say_on_stderr,
        note: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(folder, say, note)
        self.plan = plan
        self._python = vllm_python()

    @property
    def model(self) -> str:
        return self.plan.model_name

    @property
    def kv_tokens(self) -> int:
        return self.plan.profile.kv_tokens

    @property
    def kv_event_endpoints(self) -> dict[str, str]:
        """Where each engine's KV events come from, by its URL, as `rutter serve` takes it."""
        return kv_events_of(self.engines)

    def start_processes(self, folder: Path) -> None:
        names = self.plan.names
        require_memory(len(names))
        require_disk(folder)
        ports = choose_ports(self.plan)
        model_folder = tiny_model()
        self._say(f"starting {len(names)} vLLM engines side by side: one to five minutes")
        for name, own in zip(names, ports, strict=True):
            self._start_engine(name, own, model_folder, folder)

    def _start_engine(self, name: str, ports: EnginePorts, model_folder: Path, folder: Path) -> None:
        record = EngineRecord(
            name=name,
            role="prefill" if name.startswith("prefill") else "decode",
            url=f"http://{HOST}:{ports.http}",
            log=str(folder / f"{name}.log"),
            kv_events=ports.kv_endpoint,
        )
        flags = engine_flags(self.plan, ports, model_folder)
        self.add(start_engine(record, self._python, flags, ports, folder))

    def when_ready(self) -> None:
        self._say("warming up every engine and every pair")
        long_prompt = min(self.plan.profile.max_num_batched_tokens, self.plan.max_model_len_tokens - 2)
        warm_up(self.prefill_urls, self.decode_urls, self.model, long_prompt)
        self.reset_pacing()

    def read_pacing(self, url: str) -> VllmPacingReport:
        return read_pacing(url)

    def reset_pacing(self) -> None:
        for engine in self.engines:
            reset_pacing(engine.url)


class _Results(msgspec.Struct):
    results: list[VllmPacingReport]


def read_pacing(url: str) -> VllmPacingReport:
    """One engine's report; ClusterError where it does not answer."""
    return msgspec.json.decode(_call_worker(url, "pacing_report"), type=_Results).results[0]


def reset_pacing(url: str) -> None:
    """Begin a new window of one engine's report; ClusterError where it does not answer."""
    _call_worker(url, "reset_pacing")


def _call_worker(url: str, method: str) -> bytes:
    return ask(url, "POST", "/collective_rpc", PACING_TIMEOUT_S, {"method": method})
