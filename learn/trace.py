"""A trace: what arrives when. Workloads make them, importers read them, journals give them back."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from serve_table.errors import TraceError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SAME_BLOCKS = 1.25
"""Up to this ratio, prefix blocks of two traces are blocks of the same text, measured in tokens."""


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, as columns (n_requests,).

    arrival_s: from 0, not descending. slo_class: serve_table.slo.LOOSE or TIGHT. A request's prompt starts with
    the prefix blocks `block_ids[chain_start[i] : chain_start[i] + chain_length[i]]`, each of
    `hash_block_tokens` tokens; equal ids are equal text with an equal prefix before it. Only blocks that
    another request shares need an id: what follows the chain is unique to the request.
    """

    name: str
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    slo_class: Ints
    chain_start: Ints
    chain_length: Ints
    block_ids: Ints
    hash_block_tokens: int = 64
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        columns = (self.prompt_tokens, self.output_tokens, self.slo_class, self.chain_start, self.chain_length)
        if any(len(column) != n for column in columns):
            raise TraceError(f"trace {self.name!r}: its columns differ in length")
        if n == 0:
            return
        if not np.all(np.isfinite(self.arrival_s)) or self.arrival_s[0] < 0 or np.any(np.diff(self.arrival_s) < 0):
            raise TraceError(f"trace {self.name!r}: arrival times must be finite, from 0 on, in order")
        if self.prompt_tokens.min() < 1 or self.output_tokens.min() < 1:
            raise TraceError(f"trace {self.name!r}: every request needs at least one prompt and one output token")
        if np.any(self.chain_length * self.hash_block_tokens > self.prompt_tokens):
            raise TraceError(f"trace {self.name!r}: a prefix chain is longer than its prompt")
        if self.chain_start.min() < 0 or self.chain_length.min() < 0 or np.any(self.block_ids < 0):
            raise TraceError(f"trace {self.name!r}: chain starts, chain lengths and block ids must be at least 0")
        if np.any(self.chain_start + self.chain_length > len(self.block_ids)):
            raise TraceError(f"trace {self.name!r}: a prefix chain points beyond the block ids")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def scaled_to(self, requests_per_s: float) -> "Trace":
        """The same requests with time stretched so that their mean rate is `requests_per_s`."""
        span_s = float(self.arrival_s[-1]) if len(self) else 0.0
        if span_s <= 0.0:
            return self
        return replace(self, arrival_s=self.arrival_s * ((len(self) - 1) / span_s / requests_per_s))

    def head(self, n_requests: int) -> "Trace":
        """The first `n_requests`."""
        return self.window(0, n_requests)

    def window(self, start: int, stop: int) -> "Trace":
        """Requests start to stop - 1, with time counted from the first of them."""
        return self.rows(np.arange(len(self))[start:stop])

    def rows(self, part: Ints) -> "Trace":
        """The requests of these ascending indices, with time counted from the first of them."""
        arrival_s = self.arrival_s[part]
        return replace(
            self,
            arrival_s=arrival_s - arrival_s[0] if len(arrival_s) else arrival_s,
            prompt_tokens=self.prompt_tokens[part],
            output_tokens=self.output_tokens[part],
            slo_class=self.slo_class[part],
            chain_start=self.chain_start[part],
            chain_length=self.chain_length[part],
        )


def joined(traces: Sequence[Trace]) -> Trace:
    """Traces one after the other, each a mean gap after the last, with prefixes of their own.

    Blocks of text differ a little in size from run to run; all are taken as the smallest, so that chains fit prompts.
    """
    if len(traces) == 1:
        return traces[0]
    sizes = [trace.hash_block_tokens for trace in traces if len(trace.block_ids)] or [traces[0].hash_block_tokens]
    block_tokens = min(sizes)
    if max(sizes) > SAME_BLOCKS * block_tokens:
        raise TraceError("traces with prefix blocks of different sizes cannot be joined")
    start_s, n_ids, n_blocks = 0.0, 0, 0
    arrivals, chain_starts, block_ids = [], [], []
    for trace in traces:
        arrivals.append(trace.arrival_s + start_s)
        chain_starts.append(trace.chain_start + n_blocks)
        block_ids.append(trace.block_ids + n_ids)
        span_s = float(trace.arrival_s[-1]) if len(trace) else 0.0
        start_s += span_s + (span_s / (len(trace) - 1) if len(trace) > 1 else 0.0)
        n_blocks += len(trace.block_ids)
        n_ids += int(trace.block_ids.max()) + 1 if len(trace.block_ids) else 0
    return Trace(
        name=traces[0].name,
        arrival_s=np.concatenate(arrivals),
        prompt_tokens=np.concatenate([trace.prompt_tokens for trace in traces]),
        output_tokens=np.concatenate([trace.output_tokens for trace in traces]),
        slo_class=np.concatenate([trace.slo_class for trace in traces]),
        chain_start=np.concatenate(chain_starts),
        chain_length=np.concatenate([trace.chain_length for trace in traces]),
        block_ids=np.concatenate(block_ids),
        hash_block_tokens=block_tokens,
        notes=tuple(note for trace in traces for note in trace.notes),
    )
