"""The process of one emulated engine: `python -m pipelines.emulated.process CONFIG SOCKET_FD LIFELINE_FD`.

`pipelines.lifeline` says what the lifeline is.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from pathlib import Path

import uvloop

from pipelines.emulated.engine_config import EngineConfig, read_config
from pipelines.emulated.server import EngineServer
from pipelines.emulated.warm_up import compile_engine_model
from pipelines.lifeline import starter_is_gone
from serve_table.errors import RutterError

log = logging.getLogger(__name__)


async def serve(config: EngineConfig, listening: socket.socket, lifeline_fd: int) -> None:
    """Run one engine until a signal, or its starter's death, ends it."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, ended.set)
    _watch(lifeline_fd, ended)
    # The first call of a compiled function loads it, which would make the first steps late.
    compile_engine_model(log.info)
    server = EngineServer(config)
    await server.start(listening)
    log.info("%s serves on %s:%d", config.name, config.host, config.port)
    # What lives from here to the end need not be looked at by every collection.
    gc.collect()
    gc.freeze()
    await ended.wait()
    await server.close()
    log.info("%s ends", config.name)


def _watch(lifeline_fd: int, ended: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def readable() -> None:
        loop.remove_reader(lifeline_fd)
        if starter_is_gone(lifeline_fd):
            log.warning("the process that started this engine is gone")
            ended.set()

    loop.add_reader(lifeline_fd, readable)


def main() -> int:
    """Run the engine that the command line describes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    config_path, socket_fd, lifeline_fd = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    try:
        config = read_config(config_path)
        with socket.socket(fileno=socket_fd) as listening, contextlib.suppress(KeyboardInterrupt):
            listening.setblocking(False)
            uvloop.run(serve(config, listening, lifeline_fd))
    except RutterError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
