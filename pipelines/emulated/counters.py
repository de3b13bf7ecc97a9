"""What an emulated engine counts for /metrics."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Totals since the engine's start. finished: answers by finish reason, and `abort` and `error`."""

    prompt_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    transfers: int = 0
    failed_transfers: int = 0
    finished: Counter[str] = field(default_factory=lambda: Counter({"stop": 0, "length": 0, "abort": 0, "error": 0}))
