"""The sockets, the HTTP servers on them, and the signals that end both servers together."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from typing import Any, Literal

import uvicorn

from serve_table.errors import ConfigError, RutterError

ADMIN_DRAIN_S = 1


def listening_socket(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A bound socket. flag: what sets its port. Raises RutterError where the address is in use or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, a head and its body, or two
    # events, are 40 ms apart.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise RutterError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a socket listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def uvicorn_config(application: Any, drain_s: int, lifespan: Literal["on", "off"] = "on") -> uvicorn.Config:
    """How uvicorn serves an ASGI application: the engines' own headers, nothing logged, nothing in between."""
    return uvicorn.Config(
        application,
        http="httptools",
        ws="none",
        lifespan=lifespan,
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=drain_s,
    )


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it: uvicorn would raise them again once it has ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class RouterServers:
    """The public server, and the admin server where there is one, in one event loop."""

    def __init__(self, router: Any, listener: socket.socket, drain_s: int) -> None:
        """router: an ASGI application whose lifespan begins before its requests and ends after them."""
        self._public = _Server(uvicorn_config(router, drain_s))
        self._listener = listener
        self._admin: tuple[_Server, socket.socket] | None = None

    def add_admin(self, admin: Any, listener: socket.socket) -> None:
        """admin: an ASGI application without a lifespan."""
        self._admin = _Server(uvicorn_config(admin, ADMIN_DRAIN_S, "off")), listener

    def run(self, exit_with_stdin: bool) -> None:
        """Serve until a signal or, where asked for, until nobody holds the other end of standard input."""
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(self._serve_until_told(exit_with_stdin))

    async def _serve_until_told(self, exit_with_stdin: bool) -> None:
        with self._signals():
            if exit_with_stdin:
                self._follow_stdin()
            if self._admin is None:
                await self._public.serve(sockets=[self._listener])
                return
            server, listener = self._admin
            admin = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                await self._public.serve(sockets=[self._listener])
            finally:
                # Operators may look on until the last stream has ended.
                server.should_exit = True
                await admin

    @contextlib.contextmanager
    def _signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._public.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _follow_stdin(self) -> None:
        loop = asyncio.get_running_loop()
        stdin = sys.stdin.fileno()

        def readable() -> None:
            if not os.read(stdin, 4096):
                loop.remove_reader(stdin)
                self._public.handle_exit(signal.SIGTERM, None)

        try:
            loop.add_reader(stdin, readable)
        except OSError as error:
            raise ConfigError("--exit-with-stdin: standard input must be a pipe, a socket or a terminal") from error


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
