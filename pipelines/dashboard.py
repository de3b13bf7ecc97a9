"""`rutter dashboard`: optuna-dashboard on a run's stored search, also while the search runs."""

import argparse
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from learn.study import FileLock
from pipelines.stages import Run, add_run_arguments, run_from
from serve_table.errors import ConfigError, RunError

STUDY_STEM = "study"
DATABASE_SUFFIXES = (".db", ".sqlite", ".sqlite3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--storage", help="Optuna storage URL or journal file, where the search was given its own")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (%(default)s)")


def run(args: argparse.Namespace) -> int:
    from optuna_dashboard import run_server  # an extra of its own

    if not 0 < args.port < 65536:
        raise ConfigError(f"--port {args.port}: a port is from 1 to 65535")
    storage = args.storage if args.storage is not None else str(newest_study(run_from(args)))
    print(f"{storage} on http://{args.host}:{args.port}/ (Ctrl-C ends it)", flush=True)
    try:
        run_server(opened(storage), host=args.host, port=args.port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {args.host}:{args.port}: {error.strerror}; choose a --port") from error
    return 0


def newest_study(run: Run) -> Path:
    """The study file of the run that was written to last; RunError where there is none."""
    found = [path for path in run.folder.rglob(f"{STUDY_STEM}.*") if path.is_file() and path.suffix != ".lock"]
    if not found:
        raise RunError(f"no search in {run.folder} yet: run `rutter train` first, or name its --storage")
    return max(found, key=lambda path: path.stat().st_mtime)


def opened(storage: str) -> str | JournalStorage:
    """What optuna-dashboard takes: a URL as it is; a file by its suffix as a database or a journal."""
    if "://" in storage:
        return storage
    path = Path(storage)
    if not path.is_file():
        raise ConfigError(f"--storage {storage}: no such file; give a URL like sqlite:///study.db or a journal file")
    if path.suffix in DATABASE_SUFFIXES:
        return f"sqlite:///{path}"
    # The search's own lock: Optuna's default one would take the search's lock file for a lock that is held.
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    return JournalStorage(JournalFileBackend(storage, lock_obj=lock))  # type: ignore[arg-type]
