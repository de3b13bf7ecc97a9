"""What a process and its children have cost so far: CPU time and peak memory, as Linux counts them."""

import time
from dataclasses import dataclass
from pathlib import Path

from pipelines.cluster_state import session_members
from serve_table.errors import RunError


@dataclass(frozen=True)
class ProcessCost:
    """cpu_s: user and system time of all threads since the start. peak_memory_bytes: largest resident set; of several
    processes their sum, so pages that they share count for each.
    """

    cpu_s: float
    peak_memory_bytes: int


def process_cost(leader_pid: int) -> ProcessCost:
    """Of the process that leads a session and all that live in it. Raises RunError where the system does not tell."""
    pids = [leader_pid, *(member.pid for member in session_members(leader_pid))]
    try:
        return ProcessCost(sum(_cpu_s(pid) for pid in pids), sum(_peak_memory_bytes(pid) for pid in pids))
    except OSError as error:
        raise RunError(f"the cost of process {leader_pid} cannot be read: {error}; it needs Linux") from error


def _cpu_s(pid: int) -> float:
    # What clock_getcpuclockid(3) makes of a pid: a clock in nanoseconds, where /proc counts ticks of 10 ms.
    return time.clock_gettime((~pid << 3) | 2)


def _peak_memory_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
