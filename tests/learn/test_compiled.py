"""Compilation: compiled and interpreted runs agree, functions of other packages stay as they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import interpreted_cases
import numba
import numpy as np
import pytest

from learn import compiled
from learn.compiled import compile_with_callees, jit
from serve_table import decision


def test_compiled_and_interpreted_runs_agree() -> None:
    script = Path(interpreted_cases.__file__)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    interpreted = json.loads(done.stdout)
    found = interpreted_cases.results()
    assert found.keys() == interpreted.keys()
    for name, columns in found.items():
        if not isinstance(columns, dict):
            assert columns == interpreted[name], name
            continue
        for column, values in columns.items():
            np.testing.assert_allclose(values, interpreted[name][column], rtol=0.0, atol=1e-9, err_msg=name)


def _doubled(x: float) -> float:
    return 2.0 * x


def _sum_of_doubles(x: float, y: float) -> float:
    return _doubled(x) + _doubled(y)


def test_a_plain_function_is_compiled_with_the_plain_functions_it_calls_and_stays_plain() -> None:
    function = compile_with_callees(_sum_of_doubles)
    assert function(1.5, 2.0) == 7.0
    assert function is not _sum_of_doubles
    assert not hasattr(_sum_of_doubles, "signatures")
    assert function.py_func.__globals__["_doubled"] is not _doubled
    assert function.nopython_signatures
    assert not hasattr(decision.decide, "signatures")
    assert not hasattr(decision.choose, "signatures")


def test_with_the_jit_disabled_functions_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert compile_with_callees(_sum_of_doubles) is _sum_of_doubles


def test_a_function_that_allocates_is_refused() -> None:
    @jit
    def allocates(n: int) -> float:
        return np.zeros(n).sum()

    with pytest.raises(numba.core.errors.TypingError):
        allocates(3)


def test_the_cache_folder_changes_with_the_compiled_sources_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("learn", "serve_table"):
        (tmp_path / package).mkdir()
        for source in (Path(compiled.__file__).parents[1] / package).glob("*.py"):
            (tmp_path / package / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "learn" / "compiled.py"))
    before = compiled._sources_digest()
    (tmp_path / "learn" / "clusters.py").write_text("# not compiled\n")
    assert compiled._sources_digest() == before
    for changed in ("learn/core.py", "learn/engine.py", "serve_table/decision.py"):
        path = tmp_path / changed
        path.write_text(path.read_text() + "\n# changed\n")
        after = compiled._sources_digest()
        assert after != before
        before = after


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({"NUMBA_CACHE_DIR": "own"}, "own"), ({"XDG_CACHE_HOME": "base"}, "base/rutter/numba")],
)
def test_the_cache_lies_where_the_environment_says(variables: dict[str, str], expected: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    env |= {name: str(tmp_path / value) for name, value in variables.items()}
    code = "import learn.compiled, numba; print(numba.config.CACHE_DIR)"
    root = Path(compiled.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip().startswith(str(tmp_path / expected))
