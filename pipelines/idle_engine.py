"""Engines that do no work: a handle for every prefill leg, ready-made events for every decode leg.

`python -m pipelines.idle_engine EVENTS_A_WRITE SOCKET_FDS LIFELINE_FD` serves one engine on each listening socket, all
of one process, until its starter ends it or is gone. The streams take turns, so many events each, without a wait but
for a reader that takes no more. A request with `pace_s` gets its events one by one, so far apart, as from real engines.
"""

import asyncio
import contextlib
import gc
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import uvloop

from pipelines.cluster_state import EngineRecord, end_engines
from pipelines.emulated.engine_process import listening_socket
from pipelines.emulated.http_connection import HttpConnection, HttpRequest
from pipelines.engine_process import EngineProcess, is_healthy, start_process
from pipelines.idle_answers import METRICS, MODELS, PREFILLED, stream_writes
from pipelines.lifeline import starter_is_gone
from serve_table.errors import ClusterError

START_TIMEOUT_S = 20.0
GENERATIVE = ("/v1/chat/completions", "/v1/completions")
ANSWERS = {"/health": b"{}", "/v1/models": MODELS, "/metrics": METRICS}


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    """What an engine without work reads of a request."""

    max_tokens: int = 16
    stream: bool = False
    pace_s: float = 0.0
    stream_options: _StreamOptions | None = None


class IdleConnection(HttpConnection):
    """A connection that says when its reader takes no more."""

    stream: "Stream | None" = None

    def pause_writing(self) -> None:
        if self.stream is not None:
            self.stream.paused = True

    def resume_writing(self) -> None:
        if self.stream is not None:
            self.stream.resume()


class Stream:
    """One answer under way. ready: called where its reader takes more again."""

    def __init__(self, connection: IdleConnection, writes: Iterator[bytes], ready: Callable[["Stream"], None]) -> None:
        self.paused = False
        self._connection = connection
        self._writes = writes
        self._ready = ready
        connection.stream = self
        connection.on_disconnect = self._stop
        connection.begin_stream()

    def step(self) -> bool:
        """Write what is next; False once that was all, or the reader is gone."""
        data = next(self._writes, None)
        if data is None:
            self._connection.stream = None
            self._connection.end_stream(b"")
            return False
        self._connection.write(data)
        return True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self._ready(self)

    def _stop(self) -> None:
        self._writes = iter(())


class IdleServer:
    """All engines of the process. events_a_write: of a stream that is not paced."""

    def __init__(self, events_a_write: int) -> None:
        self._events_a_write = events_a_write
        self._connections: set[HttpConnection] = set()
        self._active: dict[Stream, None] = {}
        self._loop = asyncio.get_running_loop()

    async def start(self, listening: socket.socket) -> None:
        await self._loop.create_server(lambda: IdleConnection(self._handle, self._connections), sock=listening)

    def _handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        if request.path in GENERATIVE and isinstance(connection, IdleConnection):
            self._generate(request, connection)
        elif request.path in ANSWERS:
            connection.respond(200, ANSWERS[request.path])
        else:
            connection.respond(404, b"{}")

    def _generate(self, request: HttpRequest, connection: IdleConnection) -> None:
        try:
            body = msgspec.json.decode(request.body, type=_Body)
        except msgspec.DecodeError:
            connection.respond(400, b"{}")
            return
        if not body.stream:
            connection.respond(200, PREFILLED)
            return
        usage = body.stream_options is not None and body.stream_options.include_usage
        paced = body.pace_s > 0.0
        writes = iter(stream_writes(body.max_tokens, usage, 1 if paced else self._events_a_write))
        if paced:
            self._pace(Stream(connection, writes, lambda _: None), body.pace_s)
        else:
            self._add(Stream(connection, writes, self._add))

    def _pace(self, stream: Stream, pace_s: float) -> None:
        if stream.step():
            self._loop.call_later(pace_s, self._pace, stream, pace_s)

    def _add(self, stream: Stream) -> None:
        if not self._active:
            self._loop.call_soon(self._step)
        self._active[stream] = None

    def _step(self) -> None:
        """What is next of every stream whose reader takes it."""
        for stream in list(self._active):
            if not stream.step() or stream.paused:
                self._active.pop(stream, None)
        if self._active:
            self._loop.call_soon(self._step)


class IdleEngines:
    """A process with so many engines, for the time of a `with` block. log: where its output goes."""

    def __init__(self, n_prefill: int, n_decode: int, log: Path, events_a_write: int) -> None:
        self.prefill_urls: list[str] = []
        self.decode_urls: list[str] = []
        self._n_prefill = n_prefill
        self._n_decode = n_decode
        self._log = log
        self._events_a_write = events_a_write
        self._process: EngineProcess | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as sockets:
            names = ["prefill"] * self._n_prefill + ["decode"] * self._n_decode
            listening = [sockets.enter_context(listening_socket("127.0.0.1", None, name)) for name in names]
            urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in listening]
            fds = [one.fileno() for one in listening]
            words = [sys.executable, "-m", "pipelines.idle_engine", str(self._events_a_write)]
            words.append(",".join(str(fd) for fd in fds))
            record = EngineRecord(name="idle engines", role="decode", url=urls[0], log=str(self._log))
            self._process = start_process(record, words, {"OPENBLAS_NUM_THREADS": "1"}, fds)
        self.prefill_urls, self.decode_urls = urls[: self._n_prefill], urls[self._n_prefill :]
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_engines([process.record])
            process.ended()

    def _wait_ready(self, process: EngineProcess) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not is_healthy(process.record.url):
            process.require_running()
            if time.monotonic() > deadline_s:
                raise ClusterError(f"the idle engines did not answer within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.05)


async def serve(listening: Sequence[socket.socket], events_a_write: int, lifeline_fd: int) -> None:
    """Serve until a signal, or the starter's death."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    def readable() -> None:
        loop.remove_reader(lifeline_fd)
        if starter_is_gone(lifeline_fd):
            ended.set()

    loop.add_reader(lifeline_fd, readable)
    server = IdleServer(events_a_write)
    for one in listening:
        await server.start(one)
    gc.collect()
    gc.freeze()
    await ended.wait()


def main() -> None:
    events_a_write, fds, lifeline_fd = int(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
    with contextlib.ExitStack() as sockets:
        listening = [sockets.enter_context(socket.socket(fileno=int(fd))) for fd in fds]
        uvloop.run(serve(listening, events_a_write, lifeline_fd))


if __name__ == "__main__":
    main()
