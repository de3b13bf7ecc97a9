"""Repeated measurements and what machine they were made on."""

import gc
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec

CPU_INFO = Path("/proc/cpuinfo")


class Spread(msgspec.Struct, frozen=True):
    """Of one quantity measured `repetitions` times, in the unit that its name says."""

    median: float
    min: float
    max: float
    repetitions: int


class Machine(msgspec.Struct, frozen=True):
    """cores: that this process may use. load_average: runnable processes over the minute before, null where the
    system does not tell.
    """

    cores: int
    cpu: str
    system: str
    python: str
    numpy: str
    numba: str
    load_average: float | None


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


@contextmanager
def collector_off() -> Iterator[None]:
    """Timing without pauses of the garbage collector; what is garbage already goes first."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def this_machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        cores=cores,
        cpu=cpu_model(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        numpy=version("numpy"),
        numba=version("numba"),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def cpu_model(cpu_info: Path = CPU_INFO) -> str:
    """The processor's name as Linux tells it, elsewhere as Python does."""
    try:
        lines = cpu_info.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or "unknown"
