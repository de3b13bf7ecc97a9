"""The command line: what each kind of error ends with, and what is imported for it."""

import argparse
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines import cli
from serve_table.errors import ConfigError, JournalError

ROOT = Path(cli.__file__).parent.parent


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Makes `rutter toy [--rate N]` run a function, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUTTER_DEBUG", raising=False)

    def install(run: Callable[[argparse.Namespace], int]) -> None:
        module = SimpleNamespace(add_arguments=lambda parser: parser.add_argument("--rate", type=float), run=run)
        monkeypatch.setitem(sys.modules, "toy_command", module)  # type: ignore[arg-type]
        command = cli.Command("toy", "toy_command", "play", "learn", resumable=True)
        monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, command))

    return install


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_a_command_gets_its_arguments_and_gives_its_status(toy, capsys) -> None:
    toy(lambda args: sys.stdout.write(f"rate {args.rate}\n") - len("rate 2.0\n"))
    assert cli.main(["toy", "--rate", "2"]) == 0
    assert capsys.readouterr().out == "rate 2.0\n"


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (JournalError("the journal is gone"), 1, "rutter: the journal is gone\n"),
        (ConfigError("--rate 0: must be positive"), 2, "rutter: --rate 0: must be positive\n"),
        (KeyboardInterrupt(), 130, "rutter: interrupted; the same command continues it\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "build/x"),
            1,
            "rutter: the disk is full: build/x: free some space and run the same command again\n",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), 1, "rutter: Permission denied: /root/x\n"),
        (
            ModuleNotFoundError("No module named 'optuna'", name="optuna"),
            1,
            "rutter: `rutter toy` needs optuna, which is not installed: pip install 'pd-rutter[learn]', "
            "or in a clone: pip install -e '.[learn]'\n",
        ),
    ],
)
def test_expected_errors_are_one_line(toy, capsys, tmp_path: Path, error, status: int, line: str) -> None:
    toy(raising(error))
    assert cli.main(["toy"]) == status
    assert capsys.readouterr() == ("", line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("division\nby zero"), OSError(errno.EBADF, "Bad file"), BrokenPipeError()]
)
def test_an_unexpected_error_leaves_its_traceback_in_a_file(toy, capsys, tmp_path: Path, error: Exception) -> None:
    toy(raising(error))
    assert cli.main(["toy"]) == 1
    line = capsys.readouterr().err
    (written,) = (tmp_path / "build").iterdir()
    assert line.startswith(f"rutter: internal error: {type(error).__name__}")
    assert line.endswith(f"the traceback is in build/{written.name}\n")
    assert line.count("\n") == 1
    assert "raise error" in written.read_text()


def test_debug_shows_the_traceback(toy, capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUTTER_DEBUG", "1")
    toy(raising(ZeroDivisionError("division by zero")))
    assert cli.main(["toy"]) == 1
    assert "raise error" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such"], "invalid choice: 'no-such'"),
        (["--no-such"], "usage: rutter"),
        (["toy", "--no-such"], "usage: rutter toy"),
        (["toy", "--rate", "fast"], "invalid float value: 'fast'"),
    ],
)
def test_usage_errors_end_with_2(toy, capsys, words: list[str], message: str) -> None:
    toy(lambda _: 0)
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err


def test_help_and_version(toy, capsys) -> None:
    toy(lambda _: 0)
    assert cli.main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(command.name in overview for command in cli.COMMANDS)
    assert cli.main([]) == 0
    assert capsys.readouterr().out == overview
    assert cli.main(["toy", "--help"]) == 0
    assert "--rate" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"rutter {cli.version()}\n"


def rutter(*words: str, **options) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", *words], cwd=ROOT, stderr=subprocess.PIPE, **options
    )


def test_a_reader_that_leaves_ends_the_command_silently(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"\n")
    reading, writing = os.pipe()
    os.close(reading)
    process = rutter("check-journal", str(tmp_path), stdout=writing)
    os.close(writing)
    assert process.communicate(timeout=30)[1] == b""
    assert process.returncode == cli.PIPE_CLOSED


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_the_output_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"\n")
    with open("/dev/full", "wb") as full:
        process = rutter("check-journal", str(tmp_path), stdout=full)
        line = process.communicate(timeout=30)[1]
    assert line == b"rutter: the disk is full: free some space and run the same command again\n"
    assert process.returncode == cli.FAILED


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGTERM, cli.TERMINATED, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_stopped_command_cleans_up(number: signal.Signals, status: int, word: str) -> None:
    program = """
import signal, sys, time, types
from pipelines import cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
def run(args):
    try:
        print("started", flush=True)
        time.sleep(30)
    finally:
        print("cleaned up")
sys.modules["toy"] = types.SimpleNamespace(add_arguments=lambda parser: None, run=run)
cli.COMMANDS = (cli.Command("toy", "toy", "play"),)
sys.exit(cli.main(["toy"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    process.send_signal(number)
    assert process.communicate(timeout=30) == (b"cleaned up\n", f"rutter: {word}\n".encode())
    assert process.returncode == status


HEAVY = ("httpx", "joblib", "learn", "matplotlib", "numba", "optuna", "pandas", "pyarrow", "scipy", "sklearn", "tqdm")


def test_help_and_light_commands_import_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"\n")
    program = f"""
import sys
from pipelines import cli
for words in (["--help"], ["check-journal", {str(tmp_path)!r}]):
    assert cli.main(words) == 0
loaded = {{name.partition(".")[0] for name in sys.modules}} & set({HEAVY!r})
sys.exit(f"loaded {{sorted(loaded)}}" if loaded else 0)
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=30, check=False)
    assert result.returncode == 0, result.stderr.decode()
