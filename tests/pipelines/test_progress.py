"""Progress on a terminal and without one."""

import io

import pytest

from pipelines.progress import Progress, shown


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_line_at_the_start_every_ten_seconds_and_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("collect", total=100, stream=stream, clock=clock) as progress:
        for _ in range(100):
            clock.now_s += 0.25
            progress.advance(goodput=0.71234)
    assert stream.getvalue().splitlines() == [
        "collect: starts at 0 of 100 requests",
        "collect: 40/100 requests (40%) in 10 s, 4/s; goodput 0.712",
        "collect: 80/100 requests (80%) in 20 s, 4/s; goodput 0.712",
        "collect: done, 100/100 requests (100%) in 25 s, 4/s; goodput 0.712",
    ]


def test_a_continued_run_counts_its_rate_from_where_it_began() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("train", total=100, unit="trials", done=90, stream=stream, clock=clock) as progress:
        clock.now_s += 5.0
        progress.advance(10)
    assert stream.getvalue().splitlines() == [
        "train: starts at 90 of 100 trials",
        "train: done, 100/100 trials (100%) in 5 s, 2/s",
    ]


def test_an_error_is_not_called_done() -> None:
    stream, clock = io.StringIO(), Clock()
    with pytest.raises(KeyboardInterrupt), Progress("collect", stream=stream, clock=clock) as progress:
        progress.advance(7)
        progress.note("an engine left")
        raise KeyboardInterrupt
    assert stream.getvalue().splitlines() == [
        "collect: starts",
        "collect: an engine left",
        "collect: stopped at 7 requests in 0 s",
    ]


def test_a_terminal_shows_a_bar_with_the_measures() -> None:
    stream = Terminal()
    with Progress("collect", total=4, stream=stream) as progress:
        progress.advance(2, goodput=0.5, policy="table")
        progress.note("warming up")
        progress.advance(2)
    text = stream.getvalue()
    assert "4/4" in text
    assert "goodput 0.5, policy table" in text
    assert "collect: warming up\n" in text


@pytest.mark.parametrize(("value", "text"), [(0.12345, "0.123"), (12345.6, "12,346"), (1.0, "1"), ("table", "table")])
def test_shown(value: float | str, text: str) -> None:
    assert shown(value) == text
