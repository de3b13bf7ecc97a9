"""What all requests of one router share."""

import logging
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from serve_table.access import Access
from serve_table.decision import PRICE
from serve_table.engine_caches import EngineCaches
from serve_table.engine_client import EngineAddress
from serve_table.engine_response import EngineTimeouts
from serve_table.errors import ConfigError, JournalError
from serve_table.features import PromptReader, Tokenizer
from serve_table.fleet import EngineFleet
from serve_table.health import Health, ProbePolicy
from serve_table.holding import Holding
from serve_table.journal import JournalWriter, Row
from serve_table.kv_endpoint import KvEndpoint, endpoints_by_engine
from serve_table.kv_subscriber import KvSubscriber
from serve_table.kv_view import KvView
from serve_table.length_ratio import ratio_of_all
from serve_table.metrics import RouterMetrics
from serve_table.policy import Policy
from serve_table.predictor import LengthPredictor
from serve_table.prefix_index import PrefixIndex
from serve_table.price_params import CONSTANT_NAMES, HOLD_S
from serve_table.residents import ResidentBook
from serve_table.slo import LOOSE, SloTargets

logger = logging.getLogger("rutter")

CLUSTER_KINDS = ("existing", "emulated", "vllm-cpu")
JOURNAL_WARNING_INTERVAL_S = 60.0


@dataclass(frozen=True)
class RouterConfig:
    """Everything that can be set about a router, but for its policy. Raises ConfigError for what cannot be.

    explore: share of requests that choose at random. dilation: how many times slower than the hardware they
    stand for the engines run; journaled durations are divided by it. kv_tokens: KV budget of one engine.
    prefill_kv_events, decode_kv_events: where KV events come from, one an engine as `KvEndpoint` reads them or `-`
    for none; empty: nothing is followed. max_hold_s: the longest that a request is held, in engine time.
    tenant_header: believe `x-rutter-tenant`. elastic: prefill engines may serve whole requests, for which they must
    decode as well (vLLM's `kv_role: kv_both`).
    """

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    explore: float = 0.0
    seed: int = 0
    cluster_kind: str = "existing"
    dilation: float = 1.0
    default_slo_class: int = LOOSE
    timeouts: EngineTimeouts = field(default_factory=EngineTimeouts)
    probes: ProbePolicy = field(default_factory=ProbePolicy)
    max_body_bytes: int = 64 * 2**20
    hash_block_tokens: int = 64
    kv_tokens: int = 60_000
    prefill_kv_events: tuple[str, ...] = ()
    decode_kv_events: tuple[str, ...] = ()
    max_hold_s: float = 30.0
    tenant_header: bool = False
    elastic: bool = False

    @property
    def kv_endpoints(self) -> dict[str, KvEndpoint]:
        """By the URLs of the engines that have one."""
        prefill = endpoints_by_engine("--prefill-kv-events", self.prefill_urls, self.prefill_kv_events)
        return prefill | endpoints_by_engine("--decode-kv-events", self.decode_urls, self.decode_kv_events)

    def __post_init__(self) -> None:
        if not self.decode_urls:
            raise ConfigError("give at least one --decode URL")
        for flag, urls in (("--prefill", self.prefill_urls), ("--decode", self.decode_urls)):
            for url in urls:
                EngineAddress.parse(url)
            if len(set(urls)) != len(urls):
                raise ConfigError(f"{flag} names the same engine twice: {' '.join(urls)}")
        endpoints = [endpoint.live for endpoint in self.kv_endpoints.values()]
        if len(set(endpoints)) != len(endpoints):
            raise ConfigError(f"two engines cannot have one endpoint of KV events: {' '.join(endpoints)}")
        if not 0.0 <= self.explore <= 1.0:
            raise ConfigError(f"--explore {self.explore} must be from 0 to 1")
        if self.cluster_kind not in CLUSTER_KINDS:
            raise ConfigError(f"--cluster-kind {self.cluster_kind!r}: known are {', '.join(CLUSTER_KINDS)}")
        if self.elastic and not self.prefill_urls:
            raise ConfigError("--elastic is about prefill engines: give their URLs with --prefill, or leave it out")
        positive = {
            "--dilation": self.dilation,
            "--connect-timeout-s": self.timeouts.connect_s,
            "--first-byte-timeout-s": self.timeouts.first_byte_s,
            "--gap-timeout-s": self.timeouts.gap_s,
            "--probe-interval-s": self.probes.interval_s,
            "--max-body-bytes": self.max_body_bytes,
            "--hash-block-tokens": self.hash_block_tokens,
            "--kv-tokens": self.kv_tokens,
            "--max-hold-s": self.max_hold_s,
        }
        for flag, value in positive.items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"{flag} {value} must be greater than 0 and finite")


class RouterJournal:
    """The journal as a router uses it: a full disk is counted and reported, and never stops a request."""

    def __init__(self, folder: Path | None, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self._writer = JournalWriter(folder) if folder is not None else None
        self._metrics = metrics
        self._clock = clock
        self._warned_s: float | None = None

    def append(self, row: Row) -> None:
        if self._writer is None:
            return
        try:
            self._writer.append(row)
        except JournalError as error:
            self._metrics.journal_errors.inc()
            now_s = self._clock()
            if self._warned_s is None or now_s - self._warned_s >= JOURNAL_WARNING_INTERVAL_S:
                self._warned_s = now_s
                logger.error("%s; requests go on, their rows are lost", error)
        else:
            self._metrics.journal_rows.inc()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class RouterContext:
    """The shared parts, and the two things that make decisions differ: the draws and the rotation."""

    def __init__(
        self,
        config: RouterConfig,
        policy: Policy,
        predictor: LengthPredictor,
        slo_targets: SloTargets,
        journal_folder: Path | None = None,
        tokenizer: Tokenizer | None = None,
        access: Access | None = None,
    ) -> None:
        self.config = config
        self.access = access or Access()
        self.policy = policy
        self.predictor = predictor
        self.slo_targets = slo_targets
        self.clock: Callable[[], float] = time.monotonic
        self.started_s = self.clock()
        self.metrics = RouterMetrics()
        self.journal = RouterJournal(journal_folder, self.metrics, self.clock)
        if config.elastic and policy.number != PRICE:
            raise ConfigError(
                f"--elastic: policy {policy.name!r} never gives a whole request to a prefill engine; take "
                "--policy price, or rutter with an artifact whose policy is the price"
            )
        self.fleet = EngineFleet(
            config.prefill_urls, config.decode_urls, config.timeouts, config.elastic, self.access.engine_key
        )
        urls = [engine.url for engine in self.fleet.engines]
        salt = secrets.token_bytes(16)
        endpoints = config.kv_endpoints
        views = {url: KvView(url, salt) for url in endpoints}
        index = PrefixIndex(urls, max(config.kv_tokens // config.hash_block_tokens, 1))
        self.caches = EngineCaches(index, views, salt)
        self.kv_subscriber = KvSubscriber(endpoints, views) if endpoints else None
        self.prompts = PromptReader(config.hash_block_tokens, salt, tokenizer)
        self.tenant_salt = secrets.token_bytes(16)
        self.rng = random.Random(config.seed)
        self.rotation = 0
        self.residents: ResidentBook | None = None
        if policy.number == PRICE:
            n_prefill, n_decode = len(config.prefill_urls), len(config.decode_urls)
            self.residents = ResidentBook(
                policy.params, n_prefill, n_decode, lambda: self.clock() / config.dilation, config.elastic
            )
            found = self.residents.found
            self.metrics.watch_constants(CONSTANT_NAMES, found.live, found.known)
            self.metrics.watch_length_ratio(partial(ratio_of_all, self.residents.lengths))
        self.holding: Holding | None = None
        if self.residents is not None and policy.params[HOLD_S] > 0.0:
            self.holding = Holding(self.fleet, self.residents, self.metrics, config.max_hold_s, config.dilation)
            self.metrics.watch_held(self.holding.__len__)
        on_change = None if self.holding is None else self.holding.wake
        self.health = Health(self.fleet, self.caches, self.metrics, config.probes, on_change)
        self.metrics.watch_engines(
            [
                (engine.url, engine.role, lambda e=engine: float(e.host.up), lambda e=engine: e.requests)  # type: ignore[misc]
                for engine in self.fleet.engines + self.fleet.whole
            ]
        )

        self.metrics.watch_kv_views(views)

    def next_rotation(self) -> int:
        self.rotation += 1
        return self.rotation - 1
