"""What an emulated engine counts for /metrics."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

TRANSFER_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")


@dataclass
class Counters:
    """Totals since the engine's start. external_hits_tokens: prompt tokens whose KV came from elsewhere.

    aborted: requests whose client left; vLLM does not count them among the finished.
    finished: answers by finish reason, and those that failed, as `error`.
    """

    prompt_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    external_hits_tokens: int = 0
    transfers_s: float = 0.0
    aborted: int = 0
    failed_transfers: int = 0
    finished: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(FINISHED_REASONS, 0)))
    transfer_buckets: list[int] = field(default_factory=lambda: [0] * (len(TRANSFER_BUCKETS_S) + 1))

    @property
    def transfers(self) -> int:
        """KV transfers completed."""
        return sum(self.transfer_buckets)

    def observe_transfer(self, duration_s: float) -> None:
        """A KV transfer is complete."""
        self.transfers_s += duration_s
        self.transfer_buckets[bisect_left(TRANSFER_BUCKETS_S, duration_s)] += 1
