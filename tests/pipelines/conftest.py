"""Helpers of the other test folder, and the small runs that several files look at."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "learn"))

from small_runs import compared_once, rutter, trained, trained_once

__all__ = ["compared_once", "rutter", "trained", "trained_once"]
