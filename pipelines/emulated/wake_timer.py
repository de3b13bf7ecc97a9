"""A timer finer than the event loop's own, whose millisecond would be a tenth of an engine step."""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

CLOCK_MONOTONIC = 1
ABSOLUTE = 1
NANOSECONDS = 1_000_000_000


class _TimerSpec(ctypes.Structure):
    """struct itimerspec of timerfd_settime(2): an interval, unused, and the first expiration."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class WakeTimer:
    """Calls back once at a time of time.monotonic(). On Linux a timerfd; elsewhere the loop's timer."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._fd: int | None = None
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            fd = self._libc.timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            if fd >= 0:
                self._fd = fd
                self._loop.add_reader(fd, self._expired)

    def wake_at(self, when_s: float) -> None:
        """Replace the time that was set before; a past one calls back at the loop's next turn."""
        if self._fd is not None:
            # Zero would disarm it.
            when_ns = max(int(when_s * NANOSECONDS), 1)
            spec = _TimerSpec(0, 0, when_ns // NANOSECONDS, when_ns % NANOSECONDS)
            self._libc.timerfd_settime(self._fd, ABSOLUTE, ctypes.byref(spec), None)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(when_s - time.monotonic(), 0.0), self._callback)

    def close(self) -> None:
        """Never call back again."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
        if self._handle is not None:
            self._handle.cancel()

    def _expired(self) -> None:
        if self._fd is None:
            return
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # set anew since it expired
        self._callback()
