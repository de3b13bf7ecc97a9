"""How the engines of a live run kept their asked step times, whatever kind of engines they are."""

from collections.abc import Sequence

from pipelines.emulated.cluster import read_pacing as read_emulated
from pipelines.engine_process import ask
from pipelines.pacing import PacingReport
from pipelines.vllm_cpu.cluster import read_pacing as read_vllm
from pipelines.vllm_cpu.cluster import reset_pacing as reset_vllm

EMULATED = "emulated"
VLLM_CPU = "vllm-cpu"


def reset_pace(kind: str, urls: Sequence[str]) -> None:
    """Begin a new window of every engine's report; ClusterError where one does not answer."""
    for url in urls:
        if kind == EMULATED:
            ask(url, "POST", "/emulator/pacing/reset")
        elif kind == VLLM_CPU:
            reset_vllm(url)
        else:
            ask(url, "GET", "/health")


def read_pace(kind: str, urls: Sequence[str]) -> list[PacingReport] | None:
    """Each engine's report since the last reset; None for engines that run at a pace of their own.

    ClusterError where one does not answer: an engine that is gone spoilt the run.
    """
    if kind == EMULATED:
        return [read_emulated(url) for url in urls]
    if kind == VLLM_CPU:
        return [read_vllm(url) for url in urls]
    for url in urls:
        ask(url, "GET", "/health")
    return None
