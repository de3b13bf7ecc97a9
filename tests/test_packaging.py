"""What pyproject.toml, README.md and Makefile say about the packages is what is on disk."""

import ast
import re
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from source_tree import PACKAGES, ROOT, files, imports, with_file_map

from pipelines.cli import COMMANDS

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Which extras a file may import from, beside the base dependencies.
EXTRAS = {"serve_table": ("kv-events", "tokenizer"), "learn": ("learn",), "pipelines": ("learn",)}
EXTRAS_OF_FILE = {
    Path("pipelines/dashboard.py"): ("learn", "dashboard"),
    Path("pipelines/vllm_cpu/paced_worker.py"): ("learn", "gpu"),
}


def declared(*extras: str) -> set[str]:
    """Names of the distributions in the base dependencies and these extras, normalised."""
    project = PROJECT["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return {normalised(re.split(r"[^A-Za-z0-9._-]", line)[0]) for line in lines}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_package_list_is_the_folders_on_disk() -> None:
    on_disk = {path.parent.as_posix().replace("/", ".") for package in PACKAGES for path in files(package)}
    assert sorted(on_disk) == PROJECT["tool"]["setuptools"]["packages"]
    for name in on_disk:
        assert (ROOT / name.replace(".", "/") / "__init__.py").is_file(), f"{name} has no __init__.py"


@pytest.fixture(scope="module")
def distributions() -> Mapping[str, list[str]]:
    """Import name to the installed distributions that bring it."""
    return packages_distributions()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_declared_in_the_right_extra(package: str, distributions: Mapping[str, list[str]]) -> None:
    wrong = []
    for path in files(package):
        allowed = declared(*EXTRAS_OF_FILE.get(path, EXTRAS[package]))
        for item in imports(path):
            if item.package in sys.stdlib_module_names or item.package in PACKAGES:
                continue
            names = {normalised(name) for name in distributions.get(item.package, [item.package])}
            if not names & allowed:
                wrong.append(f"{path}:{item.line} imports {item.name}")
    assert wrong == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_subcommand_has_its_module(command) -> None:
    path = ROOT / (command.module.replace(".", "/") + ".py")
    assert path.is_file(), f"`rutter {command.name}` names {command.module}"
    functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert {"add_arguments", "run"} <= functions
    assert command.extra is None or command.extra in PROJECT["project"]["optional-dependencies"]


def code_of(markdown: str) -> list[str]:
    """The lines of fenced blocks and the inline code of a text."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", rest)
    return [line.strip() for block in fenced for line in block.splitlines()] + inline


def commands_in(code: list[str]) -> set[str]:
    return {word for line in code for word in re.findall(r"(?:^|[\s;&|/])rutter ([a-z][a-z-]*)", line)}


def targets_in(code: list[str]) -> set[str]:
    """Words after `make` that are neither variables nor flags."""
    calls = [match for line in code for match in re.findall(r"(?:^|[;&|] )make((?: [^\s;&|#]+)*)", line)]
    return {word for call in calls for word in call.split() if re.fullmatch(r"[a-z][a-z-]*", word)}


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_commands_and_targets_named_in_the_readme_exist() -> None:
    code = code_of((ROOT / "README.md").read_text(encoding="utf-8"))
    assert commands_in(code) <= {command.name for command in COMMANDS}
    assert targets_in(code) <= makefile_targets()


def test_commands_called_by_the_makefile_exist() -> None:
    called = set(re.findall(r"\$\(RUTTER\) ([a-z-]+)", (ROOT / "Makefile").read_text()))
    assert called
    assert called <= {command.name for command in COMMANDS}


def test_how_commands_are_found_in_text() -> None:
    code = code_of(
        "A rutter was a book. Run `rutter collect`, `make train ARGS=-x`.\n```sh\n.venv/bin/rutter up a\n```\n"
    )
    assert commands_in(code) == {"collect", "up"}
    assert targets_in(code) == {"train"}


def test_the_readme_maps_the_files_as_they_describe_themselves() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == with_file_map(readme), "run `make readme`"
