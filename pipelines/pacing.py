"""How well a paced engine keeps its planned step times."""

import logging
from bisect import bisect_left
from collections import deque

import msgspec
import numpy as np

LATE_SHARE_OF_STEP = 0.1
VERY_LATE_SHARE_OF_STEP = 0.5
VERY_LATE_STEPS_ALLOWED = 0.01
STEPS_BEFORE_JUDGEMENT = 100
BEHIND_LIMIT_S = 1.0
BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
REMEMBERED_STEPS = 8192

log = logging.getLogger(__name__)


class PacingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of its pace, since the start or the last reset.

    Lateness is the wall time from a step's planned end to its last token's write, over the newest steps; None
    before the first step. kept: False where the figures measured meanwhile are not those of the asked hardware.
    """

    dilation: float
    steps: int
    steps_late: int
    steps_very_late: int
    lateness_p50_s: float | None
    lateness_p99_s: float | None
    lateness_max_s: float | None
    re_anchored: int
    re_anchored_s: float
    kept: bool

    @property
    def lateness(self) -> str:
        """What was late, for a person."""
        return f"{self.steps_very_late} of {self.steps} steps very late, plan given up {self.re_anchored} times"


class Pacing:
    """Counts lateness by step. All times are wall seconds."""

    def __init__(self, dilation: float) -> None:
        self.dilation = dilation
        self.bucket_counts = [0] * (len(BUCKETS_S) + 1)
        self.bucket_sum_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Begin a new window; the histogram of /metrics runs on, as counters must."""
        self._steps = 0
        self._late = 0
        self._very_late = 0
        self._max_s = 0.0
        self._newest_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._re_anchored = 0
        self._re_anchored_s = 0.0
        self._warned = False

    def step(self, lateness_s: float, step_s: float) -> None:
        """A step of planned length `step_s` was completed this much after its planned end."""
        self._steps += 1
        self._newest_s.append(lateness_s)
        self.bucket_counts[bisect_left(BUCKETS_S, lateness_s)] += 1
        self.bucket_sum_s += max(lateness_s, 0.0)
        if lateness_s > self._max_s:
            self._max_s = lateness_s
        if lateness_s > LATE_SHARE_OF_STEP * step_s:
            self._late += 1
            if lateness_s > VERY_LATE_SHARE_OF_STEP * step_s:
                self._very_late += 1
                self._warn_once()

    def re_anchor(self, behind_s: float) -> None:
        """The plan was given up and begins anew from the present."""
        self._re_anchored += 1
        self._re_anchored_s += behind_s
        self._warn_once()

    @property
    def kept(self) -> bool:
        if self._re_anchored:
            return False
        return self._steps < STEPS_BEFORE_JUDGEMENT or self._very_late <= VERY_LATE_STEPS_ALLOWED * self._steps

    def report(self) -> PacingReport:
        newest_s = np.array(self._newest_s)
        return PacingReport(
            dilation=self.dilation,
            steps=self._steps,
            steps_late=self._late,
            steps_very_late=self._very_late,
            lateness_p50_s=float(np.quantile(newest_s, 0.5)) if len(newest_s) else None,
            lateness_p99_s=float(np.quantile(newest_s, 0.99)) if len(newest_s) else None,
            lateness_max_s=self._max_s if len(newest_s) else None,
            re_anchored=self._re_anchored,
            re_anchored_s=self._re_anchored_s,
            kept=self.kept,
        )

    def _warn_once(self) -> None:
        if self._warned or self.kept:
            return
        self._warned = True
        log.warning(
            "this machine does not keep the asked step times: %d of %d steps were late by more than half a step and "
            "the plan was given up %d times; ask for a larger --dilation or fewer engines",
            self._very_late,
            self._steps,
            self._re_anchored,
        )
