"""Where an engine's KV events come from, as the command line says it: `LIVE[,REPLAY]`, or `-` for nowhere."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from serve_table.errors import ConfigError

NOWHERE = "-"
_ADDRESS = re.compile(r"tcp://(\*|[^\s/:*]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})|ipc://\S+")


@dataclass(frozen=True)
class KvEndpoint:
    """live: the engine's `endpoint`; one with a star is listened on, for engines that connect to their subscriber.
    replay: the engine's `replay_endpoint`, which repeats what was missed; None where it has none.
    """

    live: str
    replay: str | None = None

    @property
    def is_listened_on(self) -> bool:
        return self.live.startswith("tcp://*:")

    @classmethod
    def parse(cls, text: str) -> "KvEndpoint":
        """Raises ConfigError for what ZeroMQ cannot use."""
        live, _, replay = text.partition(",")
        for address in (live, replay) if replay else (live,):
            match = _ADDRESS.fullmatch(address)
            if match is None or (match[2] is not None and not 0 < int(match[2]) <= 65535):
                raise ConfigError(f"KV events from {text!r}: give tcp://HOST:PORT[,tcp://HOST:PORT], ipc://PATH or -")
        if replay.startswith("tcp://*"):
            raise ConfigError(f"KV events from {text!r}: the replay endpoint needs the engine's host instead of *")
        return cls(live, replay or None)


def endpoints_by_engine(flag: str, urls: Sequence[str], texts: Sequence[str]) -> dict[str, KvEndpoint]:
    """The endpoints of the engines that have one; texts: one an engine in the same order, or none at all.

    Raises ConfigError where they do not pair up.
    """
    if texts and len(texts) != len(urls):
        raise ConfigError(f"{flag} needs one endpoint for each of {len(urls)} engines, - for none: {len(texts)} given")
    pairs = zip(urls, texts, strict=True) if texts else ()
    return {url: KvEndpoint.parse(text) for url, text in pairs if text != NOWHERE}
