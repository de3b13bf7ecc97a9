"""Helpers of the other test folder, and the small runs that several files look at."""

import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "learn"))

from small_runs import compared_once, rutter, trained, trained_once

__all__ = ["compared_once", "rutter", "trained", "trained_once"]


def pytest_configure() -> None:
    """A script's background job ignores Ctrl-C, and so would every process that tests start there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
