"""Compilation with numba, of `learn`'s own functions and of `serve_table`'s decision functions."""

import hashlib
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

DECISION_SOURCES = (
    "decision.py",
    "guard.py",
    "harm.py",
    "length_ratio.py",
    "lookup.py",
    "placement.py",
    "price.py",
    "price_params.py",
    "self_calibration.py",
    "situation.py",
    "step_time.py",
)
"""Of `serve_table`: what is compiled here."""

Function = TypeVar("Function", bound=Callable[..., Any])


def _sources_digest() -> str:
    """Digest of the sources that are compiled here; numba's cache does not see changes in callees' files."""
    root = Path(__file__).resolve().parent
    texts = {source: source.read_bytes() for source in sorted(root.glob("*.py"))}
    digest = hashlib.sha256(numba.__version__.encode())
    for source, text in texts.items():
        # These have the constants and layouts that compiled functions freeze.
        if b"learn.compiled" in text or source.name in ("core.py", "run_state.py"):
            digest.update(text)
    for name in DECISION_SOURCES:
        digest.update((root.parent / "serve_table" / name).read_bytes())
    return digest.hexdigest()[:16]


def _use_own_cache() -> None:
    if "NUMBA_CACHE_DIR" not in os.environ:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        numba.config.CACHE_DIR = str(base / "rutter" / "numba" / _sources_digest())  # type: ignore[attr-defined]


_use_own_cache()


def jit(function: Function) -> Function:
    """Compile on first call, cached on disk; with NUMBA_DISABLE_JIT=1 the plain function.

    Compiled functions may not allocate: without numba's reference counting the simulator runs twice as fast.
    """
    options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
    compiled: Function = numba.njit(**options)(function)
    return compiled


def compile_with_callees(function: Function) -> Function:
    """Compile a plain function of another package together with the plain functions that it calls.

    The original stays as it is: the copy's globals point to compiled callees.
    """
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return function
    compiled: Function = _compile(function, {})
    return compiled


def _compile(function: Any, done: dict[str, Any]) -> Any:
    key = f"{function.__module__}.{function.__qualname__}"
    if key not in done:
        namespace = dict(function.__globals__)
        for name in function.__code__.co_names:
            callee = namespace.get(name)
            if isinstance(callee, types.FunctionType):
                namespace[name] = _compile(callee, done)
        copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)
        copy.__module__ = function.__module__
        copy.__qualname__ = function.__qualname__
        done[key] = jit(copy)
    return done[key]
