"""The first process of one vLLM engine: `python -m pipelines.vllm_cpu.engine_main FLAGS... LIFELINE_FD`.

vLLM's API server with the given flags, ended with all that it started where its starter dies. It runs inside vLLM's
own environment.
"""

import contextlib
import os
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path

from pipelines.lifeline import watch_lifeline

SERVER = "vllm.entrypoints.openai.api_server"
LEADER_VARIABLE = "RUTTER_ENGINE_LEADER"
NICENESS_VARIABLE = "RUTTER_ENGINE_NICENESS"
GRACE_S = 5.0


def end_session() -> None:
    """End this process and what it started, kindly and then by force; it leads their process group.

    All are asked at once, for this thread does not outlive the first of them.
    """
    os.killpg(os.getpgid(0), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def lower_priority(niceness: int) -> None:
    """Let this engine give way to those with less niceness; what it starts inherits it."""
    os.nice(niceness)
    # Where sessions are groups of their own to the scheduler (most distributions), the group's niceness counts.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness), encoding="ascii")


def main() -> None:
    """Serve until a signal, or the starter's death."""
    lifeline_fd = int(sys.argv.pop())
    os.set_inheritable(lifeline_fd, False)
    os.environ[LEADER_VARIABLE] = str(os.getpid())
    watch_lifeline(lifeline_fd, end_session)
    lower_priority(int(os.environ.get(NICENESS_VARIABLE, "0")))
    # Until vLLM has its own handler; without one a signal would leave the folder below.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # vLLM leaves sockets and rendezvous files in the temporary folder.
    with tempfile.TemporaryDirectory(prefix="rutter-engine-", ignore_cleanup_errors=True) as scratch:
        os.environ["TMPDIR"] = tempfile.tempdir = scratch
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
