"""Progress of anything longer than a few seconds: a bar on a terminal, otherwise a line now and then."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

LINE_INTERVAL_S = 10.0


class Progress:
    """Counts `unit`s up to `total` and shows the newest measures beside the count.

        with Progress("collect", total=2000, unit="requests") as progress:
            progress.advance(1, goodput=0.71)

    On a terminal a bar; elsewhere a line at the start, at most one every ten seconds, and one at the end, on
    `stream` (standard error). total None: the count is shown without an end. done: what an earlier run did.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "requests",
        done: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self.done = done
        self._first = done
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._measures: dict[str, float | str] = {}
        self._bar: Any = None
        self._started_s = clock()
        self._last_line_s = self._started_s

    def __enter__(self) -> Self:
        self._started_s = self._last_line_s = self._clock()
        if self._stream.isatty():
            from tqdm import tqdm  # needed on a terminal only

            self._bar = tqdm(
                total=self.total,
                initial=self.done,
                desc=self.what,
                unit=f" {self.unit}",
                file=self._stream,
                dynamic_ncols=True,
            )
        else:
            of = "" if self.total is None else f" of {self.total}"
            self._line(f"starts at {self.done}{of} {self.unit}" if self.done or of else "starts")
        return self

    def advance(self, n: int = 1, **measures: float | str) -> None:
        """`n` more units are done; measures replace earlier ones of the same name."""
        self.done += n
        self._measures.update(measures)
        if self._bar is not None:
            if measures:
                self._bar.set_postfix_str(self._measured(), refresh=False)
            self._bar.update(n)
        elif self._clock() - self._last_line_s >= LINE_INTERVAL_S:
            self._line(self._count())

    def note(self, message: str) -> None:
        """A line of its own at once, which leaves a bar whole."""
        if self._bar is not None:
            self._bar.write(f"{self.what}: {message}", file=self._stream)
        else:
            self._line(message)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            return
        self._line(("done, " if kind is None else "stopped at ") + self._count())

    def _count(self) -> str:
        elapsed_s = self._clock() - self._started_s
        text = f"{self.done}"
        if self.total:
            text += f"/{self.total} {self.unit} ({self.done / self.total:.0%})"
        else:
            text += f" {self.unit}"
        text += f" in {elapsed_s:.0f} s"
        if elapsed_s > 0 and self.done > self._first:
            text += f", {shown((self.done - self._first) / elapsed_s)}/s"
        return text + (f"; {self._measured()}" if self._measures else "")

    def _measured(self) -> str:
        return ", ".join(f"{name} {shown(value)}" for name, value in self._measures.items())

    def _line(self, text: str) -> None:
        self._last_line_s = self._clock()
        print(f"{self.what}: {text}", file=self._stream, flush=True)


def shown(value: float | str) -> str:
    """A measure in three significant digits."""
    return value if isinstance(value, str) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
