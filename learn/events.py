"""The simulator's event queue: a heap by time, events of equal times in the order they were made."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from learn.compiled import jit

SUBMIT = 0
"""A leg reaches its engine."""
PULLED = 1
"""A KV transfer is complete."""


class Events(NamedTuple):
    """Columns (room,); size (2,): events in the heap, events made so far."""

    time_s: npt.NDArray[np.float64]
    made: npt.NDArray[np.int64]
    kind: npt.NDArray[np.int64]
    sequence: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]


def new_events(room: int) -> Events:
    """An empty queue for at most `room` events at a time."""
    made, kind, sequence = np.zeros((3, room), np.int64)
    return Events(np.zeros(room), made, kind, sequence, np.zeros(2, np.int64))


@jit
def push_event(events: Events, time_s: float, kind: int, sequence: int) -> None:
    i = events.size[0]
    made = events.size[1]
    events.size[0] = i + 1
    events.size[1] = made + 1
    while i > 0:
        parent = (i - 1) // 2
        if events.time_s[parent] <= time_s:
            break
        _move(events, parent, i)
        i = parent
    events.time_s[i] = time_s
    events.made[i] = made
    events.kind[i] = kind
    events.sequence[i] = sequence


@jit
def drop_first_event(events: Events) -> None:
    last = events.size[0] - 1
    events.size[0] = last
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        if child + 1 < last and _precedes(events, child + 1, child):
            child += 1
        if _precedes(events, last, child):
            break
        _move(events, child, i)
        i = child
    _move(events, last, i)


@jit
def _precedes(events: Events, a: int, b: int) -> bool:
    if events.time_s[a] != events.time_s[b]:
        return bool(events.time_s[a] < events.time_s[b])
    return bool(events.made[a] < events.made[b])


@jit
def _move(events: Events, source: int, target: int) -> None:
    events.time_s[target] = events.time_s[source]
    events.made[target] = events.made[source]
    events.kind[target] = events.kind[source]
    events.sequence[target] = events.sequence[source]
