"""The prefix index: which blocks each engine was sent by this router, and so is believed to hold."""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Per engine the most recently sent blocks, at most `capacity_blocks` of them."""

    def __init__(self, engines: Sequence[str], capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._blocks: dict[str, OrderedDict[int, None]] = {engine: OrderedDict() for engine in engines}

    def cached_blocks(self, engine: str, hashes: Sequence[int]) -> int:
        """Length in blocks of the longest prefix that the engine is believed to hold."""
        held = self._blocks[engine]
        n_blocks = 0
        for block in hashes:
            if block not in held:
                break
            n_blocks += 1
        return n_blocks

    def record(self, engine: str, hashes: Sequence[int]) -> None:
        """Note that the engine was sent a prompt of these blocks."""
        held = self._blocks[engine]
        # Last block first: the head of a prefix is the most recently used, so prefixes shrink from their tail.
        for block in reversed(hashes):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.capacity_blocks:
            held.popitem(last=False)

    def clear(self, engine: str) -> None:
        """Forget what the engine held: it restarted, or its cache was reset."""
        self._blocks[engine].clear()

    def n_blocks(self, engine: str) -> int:
        return len(self._blocks[engine])
