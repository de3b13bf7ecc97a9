"""The Rust `vllm-router` from PyPI as a child process, to measure beside our own router."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.server_process import ServerProcess, free_port
from serve_table.errors import ConfigError

PACKAGE = "vllm-router"
VERSION = "0.1.17"
ENVIRONMENT_VARIABLE = "RUTTER_VLLM_ROUTER"
DEFAULT_PROGRAM = Path("build/vllm-router-env/bin/vllm-router")


def peer_program(asked: Path | None) -> Path:
    """The peer's program: asked for, else $RUTTER_VLLM_ROUTER, else that of `make vllm-router-env`.

    Raises ConfigError where there is none.
    """
    named = asked or Path(os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT_PROGRAM)
    if not named.is_file():
        raise ConfigError(f"{named}: no such program; `make vllm-router-env` installs {PACKAGE}=={VERSION}")
    return named


def peer_version(program: Path) -> str:
    """What the environment of the program says that it is."""
    python = program.parent / "python"
    ask = f"import importlib.metadata as m; print(m.version('{PACKAGE}'))"
    if not python.is_file():
        return f"{program}, version unknown"
    done = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False)
    return f"{PACKAGE} {done.stdout.strip() or 'of unknown version'}"


@dataclass
class PeerRouter(ServerProcess):
    """vllm-router with prefill and decode apart over NIXL, round robin, in front of the given engines."""

    program: Path
    prefill_urls: Sequence[str]
    decode_urls: Sequence[str]
    log: Path
    url: str = ""
    _process: subprocess.Popen[bytes] | None = None

    name = PACKAGE

    def command(self, port: int) -> list[str]:
        words = [str(self.program), "--host", "127.0.0.1", "--port", str(port)]
        words += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
        for url in self.prefill_urls:
            words += ["--prefill", url]
        for url in self.decode_urls:
            words += ["--decode", url]
        # As Rutter: metrics on, no line a request. Engines that answer at once are asked again soon.
        words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        return [*words, "--log-level", "warning", "--worker-startup-check-interval", "1"]
