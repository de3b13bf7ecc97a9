"""vLLM's CPU worker with the tempo of a GPU: `--worker-cls pipelines.vllm_cpu.paced_worker.PacedWorker`.

It runs inside vLLM's own environment and process. Scheduler, block manager, prefix cache, chunked prefill, hand-off
and HTTP server stay vLLM's own; only the length of steps and hand-offs is ours (`pipelines.vllm_cpu.pace`).
"""

import copy
import os
import sys
import threading
import time
from typing import Any

import msgspec
from vllm.distributed import nixl_utils
from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from pipelines.pacing import Pacing
from pipelines.vllm_cpu.engine_main import LEADER_VARIABLE
from pipelines.vllm_cpu.pace import PACE_KEY, HandoffPace, PaceConfig, StepPace, pace_report

PROGRESS_DELAY_US = 500
IDLE_POLL_S = 0.001
LONGEST_NAP_S = 0.02
LEADER_POLL_S = 0.5


class PacedWorker(CPUWorker):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """One engine's worker. Its configuration is in `--additional-config` under PACE_KEY."""

    def __init__(self, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(vllm_config, *arguments, **named)
        self._config = msgspec.convert(vllm_config.additional_config[PACE_KEY], PaceConfig)
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._pacing = Pacing(self._config.dilation)
        self._steps = StepPace(self._pacing)
        self._handoffs = HandoffPace()
        self._computing = False
        _end_with_leader()
        _slow_down_progress_thread()
        _bind_kv_events_on_loopback()

    def initialize_from_config(self, *arguments: Any, **named: Any) -> None:
        cpus = os.sched_getaffinity(0)
        super().initialize_from_config(*arguments, **named)
        # NIXL's connector pins this thread, which computes, to the machine's last core: with several engines on a
        # machine all would share that one.
        os.sched_setaffinity(0, cpus)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Compute a step, or look after transfers where there is nothing to compute."""
        self._computing = scheduler_output.total_num_scheduled_tokens > 0
        if self._computing:
            start_s = self._steps.begin(self._step_s(scheduler_output))
        else:
            self._steps.idle()
            start_s = time.monotonic()
        self._begin_handoffs(scheduler_output.kv_connector_metadata, start_s)
        output = super().execute_model(scheduler_output)
        if output is None:  # the rest of the step is `sample_tokens`
            return None
        output = self._held_back(output)
        if self._computing:
            self._steps.end()
        elif not scheduler_output.finished_req_ids:
            # Only transfers are waited for. vLLM polls every millisecond, which is stretched like all times.
            time.sleep(min(IDLE_POLL_S * max(self._config.dilation - 1.0, 0.0), LONGEST_NAP_S))
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the step's tokens and wait for its planned end."""
        output = self._held_back(super().sample_tokens(grammar_output))
        self._steps.end()
        return output

    def pacing_report(self) -> dict[str, object]:
        """How the pace was kept since the last reset; called over /collective_rpc."""
        return pace_report(self._pacing, self._handoffs)

    def reset_pacing(self) -> None:
        """Begin a new window; called over /collective_rpc."""
        self._pacing.reset()
        self._handoffs.reset()

    def _step_s(self, scheduler_output: Any) -> float:
        cached = scheduler_output.scheduled_cached_reqs
        context_tokens = sum(cached.num_computed_tokens)
        context_tokens += sum(request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs)
        return self._config.step_s(scheduler_output.total_num_scheduled_tokens, context_tokens)

    def _begin_handoffs(self, metadata: Any, start_s: float) -> None:
        for request_id, request in getattr(metadata, "reqs_to_recv", {}).items():
            if request.awaiting_kvs:
                self._handoffs.begin(request_id, start_s, self._config.handoff_s(self._pulled_tokens(request)))

    def _pulled_tokens(self, request: Any) -> int:
        """What the transfer moves: the blocks that the prefix cache does not have, the last one partly filled."""
        tokens = len(request.local_block_ids[0]) * self._block_tokens
        if request.remote.num_tokens:
            cached_tokens = request.local_num_computed_blocks[0] * self._block_tokens
            tokens = min(tokens, request.remote.num_tokens - cached_tokens)
        return tokens

    def _held_back(self, output: Any) -> Any:
        """The output with those finished transfers that are due."""
        known = output.kv_connector_output
        if known is None and not self._handoffs.under_way:
            return output
        if known is None:
            known = KVConnectorOutput()
        due = self._handoffs.release(known.finished_recving or (), known.failed_recving)
        # Copied, because an empty output is one object for all.
        output = copy.copy(output)
        output.kv_connector_output = copy.copy(known)
        output.kv_connector_output.finished_recving = due or None
        return output


def _end_with_leader() -> None:
    """End this process where the engine's first one is killed, which vLLM leaves running."""
    leader = os.environ.get(LEADER_VARIABLE)
    if leader is None or os.getpid() == int(leader):
        return

    def watch() -> None:
        while os.getppid() == int(leader):
            time.sleep(LEADER_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="leader", daemon=True).start()


def _slow_down_progress_thread() -> None:
    """Let NIXL's progress thread sleep between polls; its Python API makes it spin on a whole core."""
    if nixl_utils.NixlWrapper is None:
        raise RuntimeError("NIXL is not installed beside vLLM")
    bindings = sys.modules["nixl._api"].nixlBind
    new_agent = bindings.nixlAgent

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return new_agent(name, config)

    bindings.nixlAgent = agent


def _bind_kv_events_on_loopback() -> None:
    """vLLM publishes KV events, which hold prompts, to every network, or connects; here they stay on the machine."""
    bind = ZmqEventPublisher._bind
    ZmqEventPublisher._bind = staticmethod(lambda socket, endpoint: bind(socket, endpoint.replace("*", "127.0.0.1")))
