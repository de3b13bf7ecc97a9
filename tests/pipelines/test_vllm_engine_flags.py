"""What vLLM engines are told."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from pipelines.vllm_cpu.engine_flags import EnginePorts, VllmCpuPlan, engine_environment, engine_flags
from pipelines.vllm_cpu.pace import PACE_KEY, PaceConfig
from serve_table.errors import ConfigError
from serve_table.step_time import A40_3B

PORTS = EnginePorts(http=1001, side_channel=1002, kv_events=1003, kv_replay=1004)


def told(plan: VllmCpuPlan) -> dict[str, str]:
    """The flags that have a value."""
    words = engine_flags(plan, PORTS, Path("/models/tiny"))
    return {flag: value for flag, value in pairwise(words) if not value.startswith("--")}


def test_kv_budget_and_longest_request_are_the_profile_s() -> None:
    flags = told(VllmCpuPlan(1, 1, A40_3B))
    assert flags["--num-gpu-blocks-override"] == str(60_000 // 32 + 1)  # one is vLLM's null block
    assert flags["--max-model-len"] == "16384"
    assert flags["--max-num-seqs"] == "128"
    assert told(VllmCpuPlan(1, 1, replace(A40_3B, kv_tokens=4100)))["--max-model-len"] == "4096"


def test_the_worker_gets_the_profile_s_times() -> None:
    config = json.loads(told(VllmCpuPlan(1, 1, A40_3B, 4.0))["--additional-config"])
    pace = msgspec.convert(config[PACE_KEY], PaceConfig)
    assert pace.step_s(1, 0) == pytest.approx(4 * (A40_3B.step.floor_s + A40_3B.step.per_token_s))


def test_the_lease_is_stretched_like_all_times() -> None:
    config = json.loads(told(VllmCpuPlan(1, 1, A40_3B, 8.0, lease_s=30.0))["--kv-transfer-config"])
    assert config["kv_connector_extra_config"]["kv_lease_duration"] == 240
    assert (config["kv_connector"], config["kv_role"]) == ("NixlConnector", "kv_both")


def test_ports_are_the_engine_s_own() -> None:
    flags = told(VllmCpuPlan(1, 1, A40_3B))
    assert (flags["--host"], flags["--port"]) == ("127.0.0.1", "1001")
    events = json.loads(flags["--kv-events-config"])
    assert (events["endpoint"], events["replay_endpoint"]) == ("tcp://*:1003", "tcp://127.0.0.1:1004")
    assert PORTS.kv_endpoint == "tcp://127.0.0.1:1003,tcp://127.0.0.1:1004"
    assert engine_environment(PORTS)["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "1002"


def test_blocks_are_of_32_tokens_whatever_the_hardware_s_are() -> None:
    assert VllmCpuPlan(1, 1, A40_3B).profile.block_tokens == 32
    assert told(VllmCpuPlan(1, 1, A40_3B))["--block-size"] == "32"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_decode": 0}, "at least one --decode"),
        ({"n_prefill": -1}, "at least one --decode"),
        ({"dilation": 0.0}, "dilation is 0.0"),
        ({"dilation": float("nan")}, "dilation is nan"),
        ({"lease_s": 0.0}, "lease is 0.0"),
        ({"profile": replace(A40_3B, kv_tokens=63)}, "KV of 63 tokens"),
        ({"base_port": 65_529}, "--base-port 65529: 8 ports"),
    ],
)
def test_plans_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VllmCpuPlan(**{"n_prefill": 1, "n_decode": 1, "profile": A40_3B, **settings})  # type: ignore[arg-type]
