"""Rutter's folder in the user's cache: what is made once on a machine, for every clone on it."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve_table.errors import ClusterError


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/rutter, or ~/.cache/rutter."""
    # A relative path is to be ignored, says the XDG base directory specification.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "rutter"


def digest_of(parameters: object) -> str:
    """12 characters that stand for JSON-like parameters."""
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:12]


@contextmanager
def only_builder(folder: Path) -> Iterator[None]:
    """Keep others from building the same folder meanwhile; ClusterError where another is at it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ClusterError(f"{folder} is being built by another command: wait for its end") from error
        yield
