"""Optuna studies that can be killed, resumed and shared.

The stored study holds finished trials only, each written at once: a kill leaves no running trial behind, and the
budget counts what is complete. The default storage is a journal file under a kernel lock, which no death leaves
behind; any Optuna storage URL works for several machines. Every process asks an in-memory copy of the study,
evaluates in threads (the compiled simulator runs without the interpreter's lock), and stores in order.

With one job and one process the result follows from the seed alone, also across kills: the sampler is seeded anew
for every batch from the seed and the number of trials before it.
"""

import fcntl
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import optuna
from joblib import Parallel, delayed
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from serve_table.errors import SearchError

Space = Mapping[str, BaseDistribution]
Params = Mapping[str, Any]
Objective = Callable[[Params], float]

SAMPLER = "TPE, multivariate"
STARTUP_TRIALS = 24
MAX_FAILED_SHARE = 0.5
"""With more failed trials than this share of the budget, at least MIN_FAILED, a search gives up."""

MIN_FAILED = 20


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
    """The best trial of a study, and how many trials there are."""

    params: dict[str, Any]
    value: float
    complete: int
    failed: int


class StoredStudy:
    """A study on disk or in a database. place: a journal file's path, or an Optuna storage URL; None: in memory."""

    def __init__(self, place: str | Path | None, name: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.name = name
        self._budget_lock: Path | None = None
        try:
            storage = self._storage(place)
            self._study = optuna.create_study(
                storage=storage, study_name=name, direction="maximize", load_if_exists=True
            )
        except OSError as error:
            raise SearchError(f"cannot open the study in {place}: {error.strerror or error}") from error
        except Exception as error:  # storages raise whatever their database or their file's content does
            raise SearchError(f"cannot open the study in {place}: {first_line(error)}") from error

    def _storage(self, place: str | Path | None) -> BaseStorage | None:
        if place is None:
            return None
        if isinstance(place, str) and "://" in place:
            waits = {"connect_args": {"timeout": 60}} if place.startswith("sqlite") else {}
            return RDBStorage(place, engine_kwargs=waits)
        path = Path(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f"{path.name}.lock"))
        self._budget_lock = path.with_name(f"{path.name}.budget.lock")
        drop_torn_line(path, lock)
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))  # type: ignore[arg-type]

    def trials(self) -> list[FrozenTrial]:
        """All finished trials in the order stored."""
        return self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))

    def add(self, trial: FrozenTrial, budget: int) -> bool:
        """Store a finished trial unless the budget of complete ones is spent already; whether it was stored."""
        with self._budget():
            if count_complete(self.trials()) >= budget:
                return False
            self._study.add_trial(trial)
            return True

    @contextmanager
    def _budget(self) -> Iterator[None]:
        if self._budget_lock is None:
            yield
            return
        lock = FileLock(self._budget_lock)
        lock.acquire()
        try:
            yield
        finally:
            lock.release()


def search(
    stored: StoredStudy,
    space: Space,
    objective: Objective,
    n_trials: int,
    *,
    seed: int,
    jobs: int = 1,
    warm_start: Sequence[Params] = (),
    on_trial: Callable[[int, float], None] | None = None,
) -> Best:
    """Run until the study has n_trials complete trials; returns its best.

    objective: higher is better; NaN, infinity or an exception fails the trial. warm_start: parameters tried first.
    on_trial: told the number of complete trials and the best value after each. Raises SearchError where nothing
    completed, or too much failed.
    """
    space = dict(space)
    memory = optuna.create_study(direction="maximize")
    known = 0
    while True:
        trials = stored.trials()
        memory.add_trials(trials[known:])
        known = len(trials)
        complete = count_complete(trials)
        if complete >= n_trials:
            return best_of(trials)
        if len(trials) - complete > max(MIN_FAILED, MAX_FAILED_SHARE * n_trials):
            raise SearchError(f"{len(trials) - complete} trials failed, the last: {failure(trials)}")
        batch = min(max(jobs, 1), n_trials - complete)
        points = _ask(memory, space, seed, known, batch, warm_start)
        values = Parallel(n_jobs=jobs, prefer="threads")(delayed(_evaluate)(objective, point) for point in points)
        for point, (value, reason) in zip(points, values, strict=True):
            if stored.add(_finished(space, point, value, reason), n_trials) and value is not None:
                complete += 1
                trials = stored.trials()
                if on_trial is not None:
                    on_trial(complete, best_of(trials).value)


def _ask(
    memory: optuna.Study, space: Space, seed: int, known: int, batch: int, warm_start: Sequence[Params]
) -> list[Params]:
    """The next points: warm starts in their order, then the sampler's."""
    points: list[Params] = list(warm_start[known : known + batch])
    if len(points) < batch:
        # constant_liar keeps the points of one batch apart.
        memory.sampler = TPESampler(
            seed=seed * 100_003 + known,
            multivariate=True,
            n_startup_trials=STARTUP_TRIALS,
            constant_liar=batch > 1,
        )
        asked = [memory.ask(dict(space)) for _ in range(batch - len(points))]
        points.extend(trial.params for trial in asked)
        for trial in asked:
            # The copy keeps none of its own: finished trials come back from the store.
            memory.tell(trial, state=TrialState.FAIL)
    return points


def _evaluate(objective: Objective, point: Params) -> tuple[float | None, str]:
    try:
        value = float(objective(point))
    except Exception as error:  # noqa: BLE001 - a trial that fails must not end the study
        return None, first_line(error)
    return (value, "") if math.isfinite(value) else (None, f"the objective is {value}")


def _finished(space: Space, point: Params, value: float | None, reason: str) -> FrozenTrial:
    if value is None:
        return create_trial(
            state=TrialState.FAIL, params=dict(point), distributions=dict(space), user_attrs={"reason": reason}
        )
    return create_trial(params=dict(point), distributions=dict(space), value=value)


def count_complete(trials: Sequence[FrozenTrial]) -> int:
    return sum(trial.state == TrialState.COMPLETE for trial in trials)


def best_of(trials: Sequence[FrozenTrial]) -> Best:
    """The first trial of the highest value; SearchError where none is complete."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if not complete:
        raise SearchError(f"no trial was completed, {len(trials)} failed, the last: {failure(trials)}")
    best = max(complete, key=lambda trial: trial.value if trial.value is not None else -math.inf)
    return Best(dict(best.params), float(best.value or 0.0), len(complete), len(trials) - len(complete))


def failure(trials: Sequence[FrozenTrial]) -> str:
    reasons = [str(trial.user_attrs.get("reason")) for trial in trials if trial.state == TrialState.FAIL]
    return reasons[-1] if reasons else "none was tried"


def first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def drop_torn_line(path: Path, lock: FileLock) -> None:
    """Cut off a last line without its end, as a full disk or a power cut leaves it.

    Appended to, it would be a broken line in the middle, which the storage refuses for good.
    """
    lock.acquire()
    try:
        with open(path, "ab+") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 2**20, 0))
            tail = file.read()
            if tail and not tail.endswith(b"\n"):
                file.truncate(size - (len(tail) - tail.rfind(b"\n") - 1))
    finally:
        lock.release()
