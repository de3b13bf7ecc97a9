"""Which requests a run sends, so that later stages can draw others of the same kind that it never saw."""

import msgspec
import numpy as np

from learn.trace import Trace
from pipelines.traces import trace_by_name, traces_folder
from pipelines.workloads import WORKLOADS
from serve_table.errors import ConfigError

DEFAULT_TRACE = "azure-conv"
FALLBACK_WORKLOAD = "mixed"
HELD_OUT_SEED = 1_000_000
"""Far from any seed that training uses."""

LENGTH_DIVISORS = {"mooncake-conv": 8}
"""Prompts of this trace are longer than the engines' context: divided, and said so in the trace's notes."""


class WorkloadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests start to start + n_requests - 1 of a trace, or n_requests of a synthetic workload from a seed."""

    name: str
    n_requests: int
    seed: int
    start: int
    requests_per_s: float
    tight_share: float
    max_model_len_tokens: int

    @property
    def is_synthetic(self) -> bool:
        return self.name in WORKLOADS


def default_name() -> tuple[str, str]:
    """The trace to use where none is asked for, and why, for people."""
    if traces_folder() is not None:
        return DEFAULT_TRACE, "a slice of the Azure conversation trace, found in the traces folder"
    return FALLBACK_WORKLOAD, "the built-in mixed workload: no traces folder is at hand (RUTTER_TRACES names one)"


def requests_of(spec: WorkloadSpec) -> Trace:
    """The requests of a specification."""
    return _slice(spec, spec.seed, spec.start)


def held_out(spec: WorkloadSpec, n_traces: int) -> list[Trace]:
    """Traces of the same kind, length and rate without a request of the specification's own.

    Synthetic: other seeds. Imported: windows spread over the rest of the trace, apart where it is long enough.
    """
    if spec.is_synthetic:
        return [_slice(spec, HELD_OUT_SEED + k, 0) for k in range(n_traces)]
    whole = trace_by_name(
        spec.name,
        None,
        HELD_OUT_SEED,
        max_model_len_tokens=spec.max_model_len_tokens,
        length_divisor=LENGTH_DIVISORS.get(spec.name, 1),
        tight_share=spec.tight_share,
    )
    after = spec.start + spec.n_requests
    rest = len(whole) - after
    if rest < spec.n_requests:
        raise ConfigError(
            f"trace {spec.name}: {max(rest, 0)} requests are left after the slice, {spec.n_requests} are needed to "
            "evaluate on: take a smaller --requests or an earlier --start"
        )
    starts = np.linspace(after, len(whole) - spec.n_requests, n_traces).astype(int)
    return [whole.window(start, start + spec.n_requests).scaled_to(spec.requests_per_s) for start in starts.tolist()]


def _slice(spec: WorkloadSpec, seed: int, start: int) -> Trace:
    return trace_by_name(
        spec.name,
        spec.n_requests,
        seed,
        spec.requests_per_s,
        start,
        max_model_len_tokens=spec.max_model_len_tokens,
        length_divisor=LENGTH_DIVISORS.get(spec.name, 1),
        tight_share=spec.tight_share,
    )
