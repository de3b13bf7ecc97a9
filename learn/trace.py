"""A trace: what arrives when. Workloads make them, importers read them, journals give them back."""

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from serve_table.errors import TraceError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


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
        part = slice(start, stop)
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
