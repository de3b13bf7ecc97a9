"""Server-sent events cut out of a byte stream, whatever way it was cut into packets.

An event ends with an empty line; lines end with LF, CR LF or CR (WHATWG HTML, "Server-sent events").
"""

import re

# A CR that ends the buffer is not yet an end of line: an LF may follow.
_END_OF_EVENT = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n|\Z))")


class EventSplitter:
    """Splits a byte stream into events; joined together, the events and the tail are the stream."""

    def __init__(self) -> None:
        self.tail = b""
        """Bytes of an event that is not complete yet."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that this chunk completes, each with the empty line that ends it."""
        buffer = self.tail + chunk if self.tail else chunk
        if b"\r" in buffer:
            return self._feed_any_line_end(buffer)
        events = buffer.split(b"\n\n")
        self.tail = events.pop()
        return [event + b"\n\n" for event in events]

    def _feed_any_line_end(self, buffer: bytes) -> list[bytes]:
        events = []
        start = 0
        for match in _END_OF_EVENT.finditer(buffer):
            events.append(buffer[start : match.end()])
            start = match.end()
        self.tail = buffer[start:]
        return events


def event_data(event: bytes) -> bytes | None:
    """The joined `data` lines of one event; None where it has none, as a comment."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]
    lines = []
    for line in re.split(rb"\r\n|\n|\r", event):
        name, colon, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" ") if colon else b"")
    return b"\n".join(lines) if lines else None
