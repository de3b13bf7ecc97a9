"""`rutter serve` as a child process, for the runs that send load through it."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.server_process import ServerProcess
from serve_table.kv_endpoint import NOWHERE


@dataclass
class RouterProcess(ServerProcess):
    """A router in front of the given engines; a context manager that starts it and ends it in good order.

    kv_events: endpoints by engine URL. arguments: further flags of `rutter serve`. log: where its output goes.
    """

    prefill_urls: Sequence[str]
    decode_urls: Sequence[str]
    journal: Path
    policy: str
    log: Path
    policy_params: dict[str, float | str] = field(default_factory=dict)
    artifact: Path | None = None
    explore: float = 0.0
    seed: int = 0
    cluster_kind: str = "existing"
    dilation: float = 1.0
    kv_events: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    url: str = ""
    _process: subprocess.Popen[bytes] | None = None

    name = "the router"
    ready_path = "/ready"

    def command(self, port: int) -> list[str]:
        words = [sys.executable, "-m", "pipelines.cli", "serve", "--port", str(port), "--policy", self.policy]
        words += ["--prefill", *self.prefill_urls] if self.prefill_urls else []
        words += ["--decode", *self.decode_urls, "--journal", str(self.journal)]
        words += ["--explore", str(self.explore), "--seed", str(self.seed)]
        words += ["--cluster-kind", self.cluster_kind, "--dilation", str(self.dilation), "--exit-with-stdin"]
        if self.policy_params:
            words += ["--policy-params", json.dumps(self.policy_params)]
        if self.artifact is not None:
            words += ["--artifact", str(self.artifact)]
        words += kv_event_flags(self.prefill_urls, self.decode_urls, self.kv_events)
        return [*words, *self.arguments]


def kv_event_flags(prefill_urls: Sequence[str], decode_urls: Sequence[str], kv_events: Mapping[str, str]) -> list[str]:
    """The flags of `rutter serve` for engines that publish KV events, by their URLs."""
    words: list[str] = []
    for flag, urls in (("--prefill-kv-events", prefill_urls), ("--decode-kv-events", decode_urls)):
        if any(url in kv_events for url in urls):
            words += [flag, *(kv_events.get(url, NOWHERE) for url in urls)]
    return words
