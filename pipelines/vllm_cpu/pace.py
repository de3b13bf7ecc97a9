"""The tempo of a paced vLLM engine: how long each step and each hand-off has to take, and whether they did.

Nothing of vLLM is imported here, so that it can be tested where vLLM is not installed.
"""

import time
from collections.abc import Callable, Collection, Iterable

import msgspec

from pipelines.pacing import BEHIND_LIMIT_S, Pacing, PacingReport
from serve_table.step_time import handoff_time_s, step_time_s

PACE_KEY = "rutter_pace"
"""Where in vLLM's `--additional-config` the worker finds its `PaceConfig`."""

LATE_SHARE_OF_HANDOFF = 0.5
LATE_HANDOFFS_ALLOWED = 0.01
HANDOFFS_BEFORE_JUDGEMENT = 100

Clock = Callable[[], float]


class PaceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """step_time: (5,), handoff: (2,), as `serve_table.step_time` orders them, in seconds of the hardware."""

    step_time: list[float]
    handoff: list[float]
    dilation: float

    def step_s(self, step_tokens: int, context_tokens: int) -> float:
        """Wall time of a step."""
        return step_time_s(self.step_time, float(step_tokens), float(context_tokens)) * self.dilation

    def handoff_s(self, tokens: int) -> float:
        """Wall time of a hand-off."""
        return handoff_time_s(self.handoff, float(tokens)) * self.dilation


class VllmPacingReport(PacingReport, frozen=True, kw_only=True):
    """handoffs_late: transfers that NIXL had not finished half their paced time after its end."""

    handoffs: int
    handoffs_late: int

    @property
    def lateness(self) -> str:
        return f"{super().lateness}, {self.handoffs_late} of {self.handoffs} hand-offs slower than asked"


class StepPace:
    """Ends each step at its planned time, counted from the planned end of the one before unless the engine idled.

    So scheduling, sampling and output processing are part of a step, as on the hardware, and do not lengthen it.
    """

    def __init__(self, pacing: Pacing, clock: Clock = time.monotonic, sleep: Callable[[float], None] = time.sleep):
        self._pacing = pacing
        self._clock = clock
        self._sleep = sleep
        self._planned_end_s: float | None = None
        self._step_s = 0.0

    def begin(self, step_s: float) -> float:
        """A step of this length begins; returns when it began by plan, which is now where the engine was idle."""
        start_s = self._clock() if self._planned_end_s is None else self._planned_end_s
        self._planned_end_s = start_s + step_s
        self._step_s = step_s
        return start_s

    def end(self) -> None:
        """Wait for the planned end of the step; a plan that is far behind begins anew."""
        if self._planned_end_s is None:
            return
        left_s = self._planned_end_s - self._clock()
        if left_s > 0.0:
            self._sleep(left_s)
        behind_s = self._clock() - self._planned_end_s
        self._pacing.step(behind_s, self._step_s)
        if behind_s > BEHIND_LIMIT_S:
            self._pacing.re_anchor(behind_s)
            self._planned_end_s += behind_s

    def idle(self) -> None:
        """The engine has nothing to compute: its next step begins when it begins."""
        self._planned_end_s = None


class HandoffPace:
    """Holds back the news of a finished transfer until the hardware's transfer would have finished."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._due_s: dict[str, float] = {}
        self._late_from_s: dict[str, float] = {}
        self._finished: set[str] = set()
        self._late: set[str] = set()
        self.reset()

    @property
    def under_way(self) -> bool:
        return bool(self._due_s)

    def reset(self) -> None:
        """Begin a new window of the counts."""
        self.handoffs = 0
        self.handoffs_late = 0

    @property
    def kept(self) -> bool:
        return self.handoffs < HANDOFFS_BEFORE_JUDGEMENT or self.handoffs_late <= LATE_HANDOFFS_ALLOWED * self.handoffs

    def begin(self, request_id: str, start_s: float, length_s: float) -> None:
        """A transfer starts."""
        self._due_s[request_id] = start_s + length_s
        self._late_from_s[request_id] = start_s + length_s * (1.0 + LATE_SHARE_OF_HANDOFF)

    def release(self, finished: Collection[str], failed: Iterable[str] = ()) -> set[str]:
        """The transfers that the engine may hear of now. finished, failed: those that ended since the last call."""
        now_s = self._clock()
        for request_id in failed:
            self._forget(request_id)
        told = {request_id for request_id in finished if request_id not in self._due_s}
        self._finished.update(request_id for request_id in finished if request_id in self._due_s)
        for request_id, due_s in tuple(self._due_s.items()):
            if due_s > now_s:
                continue
            if request_id not in self._finished:
                # Of one that has finished, it is not known how long before this look it did.
                if self._late_from_s[request_id] < now_s:
                    self._late.add(request_id)
                continue
            told.add(request_id)
            self.handoffs += 1
            self.handoffs_late += request_id in self._late
            self._forget(request_id)
        return told

    def _forget(self, request_id: str) -> None:
        self._due_s.pop(request_id, None)
        self._late_from_s.pop(request_id, None)
        self._finished.discard(request_id)
        self._late.discard(request_id)


def pace_report(pacing: Pacing, handoffs: HandoffPace) -> dict[str, object]:
    """The fields of `VllmPacingReport`, as an engine answers them."""
    report: dict[str, object] = msgspec.to_builtins(pacing.report())
    return report | {
        "handoffs": handoffs.handoffs,
        "handoffs_late": handoffs.handoffs_late,
        "kept": pacing.kept and handoffs.kept,
    }
