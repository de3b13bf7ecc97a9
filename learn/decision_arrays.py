"""What the compiled decision works on as arrays: the fleet and the table, and the features that it saw."""

from typing import Any

import numpy as np
import numpy.typing as npt

from learn.compiled import compile_with_callees, jit
from serve_table import situation
from serve_table.lookup import Table
from serve_table.situation import Fleet, Request

features_of = compile_with_callees(situation.features_of)


@jit
def note_features(features: npt.NDArray[np.float64], i: int, request: Request, fleet: Any) -> None:
    """Put what the decision for request i sees into row i of features (n_requests, 7)."""
    seen = features_of(request, fleet)
    features[i, 0] = seen.prompt_tokens
    features[i, 1] = seen.uncached_prefill_tokens
    features[i, 2] = seen.uncached_decode_tokens
    features[i, 3] = seen.predicted_output_tokens
    features[i, 4] = seen.slo_class
    features[i, 5] = seen.prefill_pressure_tokens
    features[i, 6] = seen.decode_pressure_requests


def new_fleet(n_prefill: int, n_decode: int, elastic: bool = False) -> Any:
    """An idle `Fleet` of live engines, as arrays. elastic: its prefill engines may serve whole requests; what they have
    to prefill is then one array, seen as both columns that tell of it.
    """
    whole_engines = n_prefill if elastic else 0
    n = n_decode + whole_engines
    to_prefill = np.zeros(n)
    prefill_tokens = to_prefill[n_decode:] if elastic else np.zeros(n_prefill)
    prefill: list[Any] = [np.zeros(n_prefill), prefill_tokens, np.ones(n_prefill)]
    decode: list[Any] = [np.zeros(n), np.zeros(n), to_prefill, np.ones(n)]
    return Fleet(*prefill, *decode)._replace(whole_engines=whole_engines)


def table_arrays(table: Table) -> Table:
    """The same table as arrays, for the compiled decision."""
    columns: list[Any] = [
        np.asarray(table.grid_scale, np.float64),
        np.asarray(table.grid_bins, np.int64),
        np.frombuffer(bytes(table.clusters), np.uint8),
        np.frombuffer(bytes(table.actions), np.uint8),
        np.asarray(table.prefill_edges_tokens, np.float64),
        np.asarray(table.decode_edges_requests, np.float64),
    ]
    return Table(*columns)
