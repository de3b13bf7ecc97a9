"""What one engine's KV events tell of its blocks, and how far that can be trusted."""

import logging

from serve_table.errors import KvEventError
from serve_table.kv_blocks import KvBlocks
from serve_table.kv_event import AllBlocksCleared, EventDecoder

logger = logging.getLogger("rutter")


class KvView:
    """One engine's blocks by its messages, numbered from 0 since the engine began.

    complete: nothing is missing, because messages were heard from the first on, or since the cache was cleared.
    doubted: the engine failed, so it may have begun anew; its next message will tell. refused: why events are not
    used, until the engine begins anew; None where they are.
    """

    def __init__(self, engine: str, salt: bytes) -> None:
        self.engine = engine
        self.blocks = KvBlocks(salt)
        self.complete = False
        self.doubted = False
        self.catching_up = False
        self.refused: str | None = None
        self.events = 0
        self.gaps = 0
        self.next_sequence: int | None = None
        """Number of the message that should come next; None before the first."""
        self._decoder = EventDecoder()

    @property
    def usable(self) -> bool:
        heard = self.next_sequence is not None
        return heard and self.refused is None and not self.doubted and not self.catching_up

    @property
    def exact(self) -> bool:
        return self.usable and self.complete

    def follows(self, sequence: int) -> bool:
        """Whether no message before this one was missed. With 0 an engine begins, the first time or again."""
        return sequence in (0, self.next_sequence)

    def receive(self, sequence: int, payload: bytes) -> None:
        """Take in a message. What was known before a gap is forgotten: a removal may have been missed."""
        if sequence != self.next_sequence:
            if self.next_sequence is not None and sequence != 0:
                self.gaps += 1
            self.begin(complete=sequence == 0)
        self.doubted = False
        self.next_sequence = sequence + 1
        try:
            events = self._decoder.events(payload)
            self.events += len(events)
            if self.refused is None:
                for event in events:
                    self.blocks.apply(event)
                    self.complete = self.complete or isinstance(event, AllBlocksCleared)
        except KvEventError as error:
            self.refuse(str(error))

    def begin(self, complete: bool) -> None:
        """Forget everything. complete: and that is all there was to know."""
        self.blocks.clear()
        self.blocks.block_tokens = None
        self.complete = complete
        self.refused = None

    def heard_of_nothing(self) -> None:
        """The engine says that it has sent no message yet."""
        self.begin(complete=True)
        self.doubted = False
        self.next_sequence = 0

    def refuse(self, reason: str) -> None:
        """Use these events no more, until the engine begins anew."""
        self.blocks.clear()
        if self.refused is None:
            logger.warning("KV events of %s are not used, its cache is estimated instead: %s", self.engine, reason)
        self.refused = reason

    def doubt(self) -> None:
        """The engine failed: use nothing of this before its next message."""
        self.doubted = True
