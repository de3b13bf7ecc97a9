"""Small runs of the pipeline: with a simulated journal where no cluster is needed, and with a fast emulated one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from simulated_journals import profile_times, rows_of
from synthetic_rows import write_journal

from learn.simulation import Topology
from pipelines import cli
from pipelines.collect import CollectConfig
from pipelines.live_run import ClusterConfig
from pipelines.stages import Run
from pipelines.workload_spec import WorkloadSpec
from pipelines.workloads import make_workload
from serve_table.journal import JournalReader, Row
from serve_table.step_time import A40_3B

ROOT = Path(cli.__file__).parents[1]
TOPOLOGY = Topology(2, 4, profile_times(1.2, 0.9, 1.0), 0.002)
RATE = 8.0
N_REQUESTS = 120
FAST = ["--prefill", "1", "--decode", "2", "--dilation", "0.3", "--trace", "chat", "--requests", "150", "--rate", "12"]
TRAIN = ["--trials", "10", "--jobs", "1"]


@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    status: int
    out: str
    error: str

    def only_line(self) -> str:
        """Its one line on standard error."""
        (line,) = [line for line in self.error.splitlines() if line.startswith("rutter: ")]
        return line


Rutter = Callable[..., Ended]


@pytest.fixture
def rutter(capsys: pytest.CaptureFixture[str]) -> Iterator[Rutter]:
    """Runs a command line in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*words: str | Path) -> Ended:
        capsys.readouterr()
        status = cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return Ended(status, captured.out, captured.err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def simulated_rows(n_requests: int = N_REQUESTS, seed: int = 0, start_time: float = 1_700_000_000.0) -> list[Row]:
    return rows_of(make_workload("mixed", n_requests, seed, RATE), TOPOLOGY, seed, start_time)


def simulated_journal(folder: Path, n_requests: int = N_REQUESTS, seed: int = 0) -> Path:
    """A journal folder with one simulated run."""
    write_journal(folder, simulated_rows(n_requests, seed))
    return folder


def simulated_collection(folder: Path) -> Run:
    """A run folder that says `collect` is done, with a simulated journal."""
    run = Run(folder)
    spec = WorkloadSpec("mixed", N_REQUESTS, 0, 0, RATE, 0.3, A40_3B.max_model_len_tokens)
    cluster = ClusterConfig("emulated", 2, 4, (), (), "a40-3b", 1.0, "emulated")
    config = msgspec.to_builtins(CollectConfig(spec, RATE, cluster, "least_loaded", 0.3, 0))
    with run.lock():
        stage = run.begin("collect", config)
        journal = simulated_journal(stage.folder / "journal")
        workload = stage.folder / "workload.json"
        workload.write_bytes(msgspec.json.encode(spec))
        run.finish("collect", config, {"journal": journal, "workload": workload})
    return run


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a simulated collection that was trained on."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    simulated_collection(folder)
    assert cli.main(["train", "--run-dir", str(folder), *TRAIN]) == 0
    return folder


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    """A copy of it, to spoil."""
    return Path(shutil.copytree(trained_once, tmp_path / "run"))


@pytest.fixture(scope="session")
def compared_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a small simulated comparison of the learned policy, on chat and documents and 1P+2D."""
    folder = tmp_path_factory.mktemp("compared")
    words = ["--workloads", "chat", "documents", "--topologies", "1P+2D", "--policies", "rutter", "--jobs", "1"]
    size = ["--requests", "120", "--seeds", "2", "--trials", "3"]
    places = ["--run-dir", str(folder / "run"), "--out", str(folder / "grid.csv")]
    assert cli.main(["compare", "--cluster", "simulated", *words, *size, *places]) == 0
    return folder / "run"


@contextmanager
def started(*words: str | Path) -> Iterator["subprocess.Popen[str]"]:
    """A command line as a process, with its output in its pipes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", *[str(word) for word in words]],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(what: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def journal_rows(run_dir: Path) -> list[Row]:
    """Rows of the run's collection so far."""
    folders = sorted(run_dir.glob("collect-*/journal"))
    return list(JournalReader(folders))


def processes_of(folder: Path) -> dict[int, str]:
    """Command lines that name this folder, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(folder) in words:
                found[int(entry.name)] = words
    return found


def digest(paths: Sequence[Path]) -> list[bytes]:
    return [path.read_bytes() for path in paths]
