"""Dense ids for the blocks of prompts: what the engine model's prefix cache is keyed by."""

import numpy as np
import numpy.typing as npt

from learn.core import NONE
from pipelines.emulated.tokens import Tokens

Ints = npt.NDArray[np.int64]


class PrefixIds:
    """Gives every full prompt block an id by the chain of hashes up to it, and takes ids back.

    references: (n_entries,) the engine model's own count for each entry, NONE where it is not cached. An id can
    be given to another block once the cache has dropped it and no sequence's chain names it.
    """

    def __init__(self, references: Ints, block_tokens: int) -> None:
        self._references = references
        self._block_tokens = block_tokens
        self._id_of: dict[int, int] = {}
        self._hash_of: list[int] = []
        self._free: list[int] = []
        self._users = np.zeros(len(references), np.int64)

    def take(self, prompt: Tokens, salt: str, chain: Ints) -> int:
        """Write the ids of a prompt's full blocks into `chain`; returns how many.

        Where all ids are in use the rest of the chain is left out: those blocks are then computed, not shared.
        """
        n_blocks = len(prompt) // self._block_tokens
        if len(self._free) + len(self._users) - len(self._hash_of) < n_blocks:
            self._collect()
        width = self._block_tokens * prompt.itemsize
        data = prompt.tobytes()
        previous = hash(salt)
        for k in range(n_blocks):
            previous = hash((previous, data[k * width : (k + 1) * width]))
            entry = self._id_of.get(previous)
            if entry is None:
                entry = self._new(previous)
                if entry is None:
                    n_blocks = k
                    break
            chain[k] = entry
        self._users[chain[:n_blocks]] += 1
        return n_blocks

    def give_back(self, chain: Ints) -> None:
        """A sequence is gone; chain: the ids that `take` gave it."""
        self._users[chain] -= 1

    def _new(self, block_hash: int) -> int | None:
        if self._free:
            entry = self._free.pop()
            self._hash_of[entry] = block_hash
        elif len(self._hash_of) < len(self._users):
            entry = len(self._hash_of)
            self._hash_of.append(block_hash)
        else:
            return None
        self._id_of[block_hash] = entry
        return entry

    def _collect(self) -> None:
        """Find the ids that nobody needs any more."""
        given = len(self._hash_of)
        unused = (self._users[:given] == 0) & (self._references[:given] == NONE)
        for entry in np.flatnonzero(unused).tolist():
            # An id that is free already is found again: its hash names it no more.
            if self._id_of.get(self._hash_of[entry]) == entry:
                del self._id_of[self._hash_of[entry]]
                self._free.append(entry)
