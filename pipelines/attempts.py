"""Which requests each attempt at a collection sent, so that a killed one continues where its journal ends."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from serve_table.artifact import write_atomically
from serve_table.journal import JournalReader

Ints = npt.NDArray[np.int64]


class Attempts:
    """The attempts noted in a folder.

    Client ids are `attempt-N-K`: the K-th of attempt N, whose requests are in attempt-N.json.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def paths(self) -> list[Path]:
        return sorted(self.folder.glob("attempt-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))

    def begin(self, requests: Ints) -> str:
        """Note a new attempt; returns the prefix of its client ids."""
        number = len(self.paths()) + 1
        write_atomically(self.folder / f"attempt-{number}.json", msgspec.json.encode(requests.tolist()))
        return f"attempt-{number}"

    def discard(self, journal: Path) -> None:
        """Forget all attempts and their journal, where only a whole run counts."""
        for path in self.paths():
            path.unlink()
        if journal.is_dir():
            shutil.rmtree(journal)

    def left(self, journal: Path, n_requests: int) -> Ints:
        """Indices of the requests without an answered row in the journal, in order of arrival."""
        sent = {path.stem: msgspec.json.decode(path.read_bytes(), type=list[int]) for path in self.paths()}
        answered = np.zeros(n_requests, bool)
        if journal.is_dir():
            for row in JournalReader([journal]):
                prefix, _, number = (row.client_id or "").rpartition("-")
                if row.status == "ok" and prefix in sent and number.isdigit() and int(number) < len(sent[prefix]):
                    answered[sent[prefix][int(number)]] = True
        left: Ints = np.flatnonzero(~answered)
        return left
