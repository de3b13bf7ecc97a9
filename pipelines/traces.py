"""Traces by name: the public ones where they are at hand, a user's own files, and the synthetic workloads."""

import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from learn.trace import Trace
from pipelines.imports.azure import import_azure
from pipelines.imports.burstgpt import import_burstgpt
from pipelines.imports.mooncake import import_mooncake
from pipelines.imports.options import ImportOptions
from pipelines.imports.report import ImportReport
from pipelines.workloads import CONTEXT_TOKENS, TIGHT_SHARE, WORKLOADS, make_workload
from serve_table.errors import ConfigError, TraceError

FORMATS = ("azure", "mooncake", "burstgpt")
PUBLIC_TRACES = MappingProxyType(
    {
        "azure-conv": ("azure", "AzureLLMInferenceTrace_conv.csv"),
        "azure-code": ("azure", "AzureLLMInferenceTrace_code.csv"),
        "mooncake-conv": ("mooncake", "mooncake_conversation_trace.jsonl"),
        "mooncake-synthetic": ("mooncake", "mooncake_synthetic_trace.jsonl"),
    }
)


def traces_folder() -> Path | None:
    """The folder of public traces: $RUTTER_TRACES, else shared/traces beside the project; None if absent.

    Raises ConfigError where the variable names no folder.
    """
    asked = os.environ.get("RUTTER_TRACES")
    if asked:
        if not Path(asked).is_dir():
            raise ConfigError(f"RUTTER_TRACES is {asked}, which is no folder: correct or unset it")
        return Path(asked)
    beside = Path(__file__).resolve().parents[2] / "shared" / "traces"
    return beside if beside.is_dir() else None


def trace_names() -> tuple[str, ...]:
    """Every name that `trace_by_name` takes, but for files as FORMAT:PATH."""
    return tuple(WORKLOADS) + tuple(PUBLIC_TRACES)


def load_trace(
    name: str, options: ImportOptions | None = None, *, length_divisor: int = 1
) -> tuple[Trace, ImportReport]:
    """A public trace by name, or a file as FORMAT:PATH with a format of azure, mooncake or burstgpt.

    Raises ConfigError for an unknown name or an option the format lacks, TraceError where the file cannot be used.
    """
    file_format, path = _locate(name)
    if file_format != "mooncake" and length_divisor != 1:
        raise ConfigError(f"trace {name}: length_divisor is for Mooncake traces only")
    title = name if name in PUBLIC_TRACES else path.stem
    if file_format == "azure":
        return import_azure(path, options, name=title)
    if file_format == "burstgpt":
        return import_burstgpt(path, options, name=title)
    return import_mooncake(path, options, length_divisor=length_divisor, name=title)


def _locate(name: str) -> tuple[str, Path]:
    if name in PUBLIC_TRACES:
        file_format, file_name = PUBLIC_TRACES[name]
        folder = traces_folder()
        if folder is None:
            raise TraceError(f"trace {name}: no folder of traces here; set RUTTER_TRACES (see data/README.md)")
        return file_format, folder / file_name
    file_format, colon, path = name.partition(":")
    if colon and path and file_format in FORMATS:
        return file_format, Path(path)
    known = ", ".join(trace_names())
    raise ConfigError(f"unknown trace {name!r}; known: {known}, or a file as {'|'.join(FORMATS)}:PATH")


def trace_by_name(
    name: str,
    n_requests: int | None,
    seed: int,
    requests_per_s: float | None = None,
    start: int = 0,
    *,
    from_s: float | None = None,
    to_s: float | None = None,
    max_model_len_tokens: int = CONTEXT_TOKENS,
    length_divisor: int = 1,
    tight_share: float = TIGHT_SHARE,
) -> Trace:
    """Requests start to start + n_requests - 1 of the named trace, at `requests_per_s` on average.

    A synthetic workload needs a count and a rate, and is made from `seed`. An imported trace keeps its own rate
    where none is asked for; `seed` draws its SLO classes only, and None requests are all. What an import
    dropped, fixed or warns of is in the trace's notes. Errors as `make_workload` and `load_trace` raise them.
    """
    if name in WORKLOADS:
        if n_requests is None or requests_per_s is None:
            raise ConfigError(f"workload {name}: give the number of requests and their rate, it has none of its own")
        if start < 0 or from_s is not None or to_s is not None or length_divisor != 1:
            raise ConfigError(f"workload {name}: it can be sliced by start and n_requests only, from 0 on")
        made = make_workload(name, start + n_requests, seed, requests_per_s, tight_share=tight_share)
        return made.window(start, start + n_requests)
    options = ImportOptions(
        max_model_len_tokens=max_model_len_tokens,
        from_s=from_s,
        to_s=to_s,
        start=start,
        n_requests=n_requests,
        tight_share=tight_share,
        seed=seed,
    )
    if requests_per_s is not None and not 0.0 < requests_per_s < float("inf"):
        raise ConfigError(f"trace {name}: {requests_per_s} requests a second asked for, give a rate above 0")
    trace, report = load_trace(name, options, length_divisor=length_divisor)
    trace = replace(trace, notes=trace.notes + tuple(report.lines()))
    if requests_per_s is None:
        return trace
    return replace(
        trace.scaled_to(requests_per_s), notes=trace.notes + (f"time scaled to {requests_per_s:.3g} requests/s",)
    )
