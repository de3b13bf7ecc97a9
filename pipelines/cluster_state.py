"""What `rutter cluster` remembers of a cluster: its processes, told apart from later ones with the same pid."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from serve_table.artifact import write_atomically
from serve_table.errors import ClusterError

CLUSTERS_FOLDER = Path("build/clusters")
STATE_FILE = "cluster.json"
POLL_S = 0.05
KILL_GRACE_S = 5.0


class ProcessRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process. identity: see `process_identity`."""

    pid: int
    identity: str

    @property
    def is_alive(self) -> bool:
        return process_identity(self.pid) == self.identity


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine. pid, identity: of its first process, which leads a session. children: the others of that session.

    log: a path. kv_events: where its KV events come from, as `rutter serve` takes it; None where from nowhere.
    """

    name: str
    role: Literal["prefill", "decode"]
    url: str
    pid: int = 0
    identity: str = ""
    log: str
    children: list[ProcessRecord] = []
    kv_events: str | None = None

    @property
    def processes(self) -> list[ProcessRecord]:
        return [ProcessRecord(self.pid, self.identity), *self.children]


class ClusterState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster that was started. ready: every engine has answered."""

    version: Literal[1] = 1
    name: str
    kind: str
    hardware: str
    dilation: float
    kv_tokens: int
    model: str
    started: str
    ready: bool
    engines: list[EngineRecord]


def process_identity(pid: int) -> str | None:
    """Boot and start time of a live process; None where there is none (a zombie is none).

    Two processes never have both the pid and this in common.
    """
    try:
        fields = _stat_fields(Path(f"/proc/{pid}"))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _identity_from_ps(pid)
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def session_members(leader_pid: int) -> list[ProcessRecord]:
    """The live processes of the session that this process leads, without itself; none where /proc does not say."""
    members = []
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        try:
            session = int(_stat_fields(process)[3])
        except OSError:
            continue  # it has ended
        identity = process_identity(pid) if session == leader_pid != pid else None
        if identity is not None:
            members.append(ProcessRecord(pid, identity))
    return members


def _stat_fields(process: Path) -> list[str]:
    """Fields after the command's name, which may hold spaces and brackets: state first, session 4th, start 20th."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _identity_from_ps(pid: int) -> str | None:
    words = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    line = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    state, _, started = line.partition(" ")
    return None if not started or state.startswith("Z") else started.strip()


def is_alive(engine: EngineRecord) -> bool:
    """Whether the very process that was started still runs."""
    return process_identity(engine.pid) == engine.identity


def end_engines(engines: Sequence[EngineRecord], grace_s: float = KILL_GRACE_S) -> list[EngineRecord]:
    """End those that still run and their children, kindly and then by force; returns the ones that ran.

    Raises ClusterError where one cannot be ended.
    """
    processes = {engine.name: _with_new_children(engine) for engine in engines}
    ran = [engine for engine in engines if any(process.is_alive for process in processes[engine.name])]
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for engine in ran:
            alive = [process for process in processes[engine.name] if process.is_alive]
            # Asked kindly, an engine ends its children itself.
            for process in alive[:1] if signal_number == signal.SIGTERM else alive:
                _signal(engine, process.pid, signal_number)
        _wait_until_gone([process for engine in ran for process in processes[engine.name]], grace_s)
    for engine in ran:
        if any(process.is_alive for process in processes[engine.name]):
            raise ClusterError(f"{engine.name} (pid {engine.pid}) cannot be ended")
    return ran


def _with_new_children(engine: EngineRecord) -> list[ProcessRecord]:
    """The engine's processes, with those that it has started since it was recorded."""
    started = session_members(engine.pid) if is_alive(engine) else []
    return [*engine.processes, *(process for process in started if process not in engine.children)]


def _wait_until_gone(processes: Sequence[ProcessRecord], grace_s: float) -> None:
    deadline_s = time.monotonic() + grace_s
    while any(process.is_alive for process in processes) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def _signal(engine: EngineRecord, pid: int, signal_number: signal.Signals) -> None:
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise ClusterError(f"{engine.name} (pid {pid}) belongs to another user: end it as that user") from error


def write_state(state: ClusterState, folder: Path) -> None:
    """Replace a cluster's state file; it is whole at any moment."""
    write_atomically(folder / STATE_FILE, msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")


def read_state(folder: Path) -> ClusterState | None:
    """A cluster's state; None where none was started. ClusterError where the file is damaged."""
    path = folder / STATE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=ClusterState)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ClusterError(
            f"{path} is damaged ({error}): end its engines by hand (their configurations are beside it), then delete it"
        ) from error


def remove_state(folder: Path) -> None:
    """Forget a cluster; its logs stay."""
    (folder / STATE_FILE).unlink(missing_ok=True)


def known_clusters(root: Path) -> list[str]:
    """Names of the clusters that have a state file."""
    return sorted(path.parent.name for path in root.glob(f"*/{STATE_FILE}"))


def kv_events_of(engines: Sequence[EngineRecord]) -> dict[str, str]:
    """Where KV events come from, by the URLs of the engines that publish them."""
    return {engine.url: engine.kv_events for engine in engines if engine.kv_events is not None}


def known_kv_events(root: Path = CLUSTERS_FOLDER) -> dict[str, str]:
    """The same for all engines of the clusters that were started here."""
    states = [read_state(root / name) for name in known_clusters(root)]
    return kv_events_of([engine for state in states if state is not None for engine in state.engines])
