"""Optuna studies on disk that can be killed, resumed and shared.

The stored study holds finished trials only, each written at once: a kill leaves no running trial behind, and the
budget counts what is complete or was pruned. The default storage is a journal file under a kernel lock, which no death
leaves behind; any Optuna storage URL works for several machines.
"""

import fcntl
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from serve_table.errors import SearchError

OPEN_ATTEMPTS = 5
OPEN_PAUSE_S = 0.3
SQLITE_TIMEOUT_S = 60
TRIED = (TrialState.COMPLETE, TrialState.PRUNED)
FINISHED = (*TRIED, TrialState.FAIL)


class FileLock:
    """Optuna's journal-file lock as a kernel lock: it ends with its holder, however that ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def acquire(self) -> bool:
        file = open(self._path, "ab")  # noqa: SIM115 - closed by `release`
        fcntl.flock(file, fcntl.LOCK_EX)
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


@dataclass(frozen=True)
class Best:
    """The best trial of a study, and how many trials there are. figures: what else its objective said of it."""

    params: dict[str, Any]
    value: float
    complete: int
    failed: int
    pruned: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def tried(self) -> int:
        """What counts towards the budget."""
        return self.complete + self.pruned


class StoredStudy:
    """A study on disk or in a database. place: a journal file's path, or an Optuna storage URL; None: in memory.

    Raises SearchError where it cannot be opened.
    """

    def __init__(self, place: str | Path | None, name: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.name = name
        self._journal = None if place is None or is_url(place) else Path(place)
        self._file = self._journal if place is None or not is_url(place) else sqlite_file(str(place))
        try:
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._alone():
                self._study = self._opened(place)
        except OSError as error:
            raise SearchError(f"cannot open the study in {place}: {error.strerror or error}") from error
        except SearchError:
            raise
        except Exception as error:  # storages raise whatever their database or their file's content does
            raise SearchError(f"cannot open the study in {place}: {first_line(error)}") from error

    def _opened(self, place: str | Path | None) -> optuna.Study:
        attempts = OPEN_ATTEMPTS if self._journal is None else 1
        while True:
            attempts -= 1
            try:
                return loaded_or_created(self._storage(place), self.name)
            except Exception:
                # Two that create a database's tables at once fail in many ways; the tables are there then.
                if attempts <= 0:
                    raise
                time.sleep(OPEN_PAUSE_S)

    def _storage(self, place: str | Path | None) -> BaseStorage | None:
        if place is None:
            return None
        if self._journal is None:
            waits = {"connect_args": {"timeout": SQLITE_TIMEOUT_S}} if self._file is not None else {}
            return RDBStorage(str(place), engine_kwargs=waits)
        lock = FileLock(beside(self._journal, ".lock"))
        return JournalStorage(JournalFileBackend(str(self._journal), lock_obj=lock))  # type: ignore[arg-type]

    def trials(self) -> list[FrozenTrial]:
        """All finished trials in the order stored."""
        return self._study.get_trials(deepcopy=False, states=FINISHED)

    def add(self, trial: FrozenTrial, budget: int, known: int) -> bool:
        """Store a finished trial; whether it was stored.

        Not stored where the budget of tried ones is spent, and where the same point is among the trials after
        the first `known`: another process has been faster. A database on a server takes no lock of ours, so it can
        end up with one trial more for each further process; `best_of` leaves those out.
        """
        with self._alone():
            trials = self.trials()
            if count_tried(trials) >= budget or any(other.params == trial.params for other in trials[known:]):
                return False
            self._study.add_trial(trial)
            return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The only writer among the processes of this machine, for storages that are files."""
        if self._file is None:
            yield
            return
        lock = FileLock(beside(self._file, ".budget.lock"))
        lock.acquire()
        try:
            if self._journal is not None:
                require_journal(self._journal)
                drop_torn_line(self._journal)
            yield
        finally:
            lock.release()


def loaded_or_created(storage: BaseStorage | None, name: str) -> optuna.Study:
    """Optuna's own `load_if_exists` would add a line to a journal at every opening."""
    if storage is not None:
        try:
            return optuna.load_study(study_name=name, storage=storage)
        except KeyError:
            pass
    return optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)


def count_complete(trials: Sequence[FrozenTrial]) -> int:
    return sum(trial.state == TrialState.COMPLETE for trial in trials)


def count_tried(trials: Sequence[FrozenTrial]) -> int:
    """Complete and pruned ones."""
    return sum(trial.state in TRIED for trial in trials)


def count_failed(trials: Sequence[FrozenTrial]) -> int:
    return sum(trial.state == TrialState.FAIL for trial in trials)


def spent_s(trials: Sequence[FrozenTrial]) -> float:
    """Time that was spent on these trials, by whichever process and in however many calls."""
    return sum(trial.duration.total_seconds() for trial in trials if trial.duration is not None)


def best_of(trials: Sequence[FrozenTrial], n_trials: int | None = None) -> Best:
    """The first trial of the highest value among the complete ones of the first n_trials tried; SearchError where there
    is none.
    """
    tried = [trial for trial in trials if trial.state in TRIED][:n_trials]
    complete = [trial for trial in tried if trial.state == TrialState.COMPLETE]
    if not complete:
        raise SearchError(f"no trial was completed, {count_failed(trials)} failed, the last: {failure(trials)}")
    best = max(complete, key=lambda trial: trial.value if trial.value is not None else -math.inf)
    return Best(
        dict(best.params),
        float(best.value or 0.0),
        len(complete),
        count_failed(trials),
        len(tried) - len(complete),
        dict(best.user_attrs),
    )


def failure(trials: Sequence[FrozenTrial]) -> str:
    reasons = [str(trial.user_attrs.get("reason")) for trial in trials if trial.state == TrialState.FAIL]
    return reasons[-1] if reasons else "none was tried"


def first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def is_url(place: str | Path) -> bool:
    return isinstance(place, str) and "://" in place


def sqlite_file(url: str) -> Path | None:
    """The database file of an SQLite URL; None for other databases and for one in memory."""
    scheme, _, path = url.partition(":///")
    name = path.partition("?")[0]
    return Path(name) if scheme.startswith("sqlite") and name and name != ":memory:" else None


def beside(file: Path, suffix: str) -> Path:
    return file.with_name(f"{file.name}{suffix}")


def require_journal(path: Path) -> None:
    """SearchError for a file that is something else, which a cut or a new line would spoil."""
    start = b'{"op_code"'
    if path.exists():
        with open(path, "rb") as file:
            head = file.read(len(start))
        if not start.startswith(head):
            raise SearchError(f"{path} is no Optuna journal: name another file, or a database as sqlite:///FILE")


def drop_torn_line(path: Path) -> None:
    """Cut off a last line without its end, as a full disk or a power cut leaves it.

    Appended to, it would be a broken line in the middle, which the storage refuses for good.
    """
    with open(path, "ab+") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 2**20, 0))
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(size - (len(tail) - tail.rfind(b"\n") - 1))
