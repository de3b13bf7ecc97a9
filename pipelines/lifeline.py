"""The pipe by which an engine learns that its starter has died; vLLM's environment imports it too.

The starter holds one end, the engine reads the other. Where it closes without a word, the starter is gone and the
engine must end; the byte b"d" detaches the engine, which then runs until it gets a signal.
"""

import os
import threading
from collections.abc import Callable

DETACH = b"d"


def starter_is_gone(lifeline_fd: int) -> bool:
    """Read the pipe's one word and close it: True where the starter went without detaching. Blocks until then."""
    word = os.read(lifeline_fd, 1)
    os.close(lifeline_fd)
    return word != DETACH


def watch_lifeline(lifeline_fd: int, starter_gone: Callable[[], None]) -> None:
    """Call `starter_gone` from a thread of its own once the starter is gone."""

    def wait() -> None:
        if starter_is_gone(lifeline_fd):
            starter_gone()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
