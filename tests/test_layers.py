"""The one rule of the house: pipelines -> learn -> serve_table, no cycles, and a router that imports light."""

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest
from source_tree import PACKAGES, ROOT, Import, files, imports, modules

MAY_IMPORT = {
    "serve_table": {"serve_table"},
    "learn": {"learn", "serve_table"},
    "pipelines": {"pipelines", "learn", "serve_table"},
}
ROUTER_LIBRARIES = {"httptools", "msgspec", "numpy", "prometheus_client", "safetensors", "uvicorn", "uvloop"}
ROUTER_OPTIONAL = {"tokenizers", "zmq"}
OFFLINE_ONLY = {
    "joblib",
    "learn",
    "matplotlib",
    "numba",
    "optuna",
    "pandas",
    "pipelines",
    "pyarrow",
    "scipy",
    "sklearn",
}


def all_imports(package: str) -> list[tuple[str, Import]]:
    return [(f"{path}:{item.line}", item) for path in files(package) for item in imports(path)]


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_imports_against_the_arrows(package: str) -> None:
    wrong = [
        f"{place} imports {item.name}"
        for place, item in all_imports(package)
        if item.package in PACKAGES and item.package not in MAY_IMPORT[package]
    ]
    assert wrong == []


def test_nothing_imports_the_tests() -> None:
    assert [place for package in PACKAGES for place, item in all_imports(package) if item.package == "tests"] == []


def test_the_router_imports_only_its_libraries() -> None:
    wrong = [
        f"{place} imports {item.name}"
        for place, item in all_imports("serve_table")
        if item.package not in sys.stdlib_module_names | ROUTER_LIBRARIES | {"serve_table"}
        and not (item.package in ROUTER_OPTIONAL and not item.top_level)
    ]
    assert wrong == []


def test_modules_import_each_other_without_cycles() -> None:
    known = modules()
    graph = {
        name: {item.name for item in imports(path) if item.top_level and item.name in known and item.name != name}
        for name, path in known.items()
    }
    assert any(graph.values())
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"an import cycle: {' -> '.join(error.args[1])}")


def test_importing_the_router_loads_nothing_of_the_offline_half() -> None:
    names = [name for name in modules() if name.partition(".")[0] == "serve_table"]
    program = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
heavy = {{name.partition(".")[0] for name in sys.modules}} & {OFFLINE_ONLY | ROUTER_OPTIONAL!r}
sys.exit(f"loaded {{sorted(heavy)}}" if heavy else 0)
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr.decode()
