"""The router's own metrics. Labels come from closed sets only: nothing that a client sends becomes a label."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from serve_table.kv_view import KvView

_LATENCY_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60)
_TPOT_BUCKETS = (0.002, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_DECISION_BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)


class RouterMetrics:
    """All series of one router, in a registry of their own."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.requests = Counter(
            "rutter_requests", "Generative requests by their end", ["endpoint", "policy", "status"], registry=registry
        )
        self.refusals = Counter(
            "rutter_refusals", "Requests refused before they were journaled, by status", ["status"], registry=registry
        )
        self.decisions = Counter(
            "rutter_decisions", "Decisions by action and reason", ["policy", "action", "reason"], registry=registry
        )
        self.decision_errors = Counter(
            "rutter_decision_errors", "Decisions that failed and took the safe route", registry=registry
        )
        self.fallbacks = Counter("rutter_fallbacks", "Remote decisions executed locally", ["reason"], registry=registry)
        self.prefill_refusals = Counter(
            "rutter_prefill_refusals", "Prefill legs that an engine refused with 4xx", ["engine"], registry=registry
        )
        self.engine_failures = Counter(
            "rutter_engine_failures", "Legs that failed on an engine", ["engine", "kind"], registry=registry
        )
        self.journal_rows = Counter("rutter_journal_rows", "Rows written", registry=registry)
        self.journal_errors = Counter("rutter_journal_errors", "Rows that could not be written", registry=registry)
        self.ttft = Histogram(
            "rutter_ttft_seconds", "Time to first token", ["action"], buckets=_LATENCY_BUCKETS, registry=registry
        )
        self.tpot = Histogram(
            "rutter_tpot_seconds", "Time per output token", ["action"], buckets=_TPOT_BUCKETS, registry=registry
        )
        self.decision_time = Histogram(
            "rutter_decision_seconds", "Time of one decision", buckets=_DECISION_BUCKETS, registry=registry
        )
        self.handoff_age = Histogram(
            "rutter_handoff_age_seconds",
            "Prefill answer to decode request",
            buckets=_DECISION_BUCKETS + _LATENCY_BUCKETS[1:],
            registry=registry,
        )
        self.held_ended = Counter("rutter_held_ended", "Requests held no longer, by why", ["reason"], registry=registry)
        self.held_time = Histogram(
            "rutter_held_seconds",
            "Time that a request was held",
            buckets=_DECISION_BUCKETS[6:] + _LATENCY_BUCKETS[1:],
            registry=registry,
        )

    def watch_held(self, count: Callable[[], int]) -> None:
        """A gauge of the held requests, read when scraped."""
        Gauge("rutter_held_requests", "Requests held in the router", registry=self.registry).set_function(count)

    def watch_engines(self, engines: Sequence[tuple[str, str, Callable[[], float], Callable[[], float]]]) -> None:
        """Gauges of each engine, (url, role, is up, requests in flight), read when scraped."""
        up = Gauge("rutter_engine_up", "1 where the engine gets work", ["engine", "role"], registry=self.registry)
        in_flight = Gauge(
            "rutter_engine_requests", "Requests in flight on the engine", ["engine", "role"], registry=self.registry
        )
        for url, role, is_up, requests in engines:
            up.labels(url, role).set_function(is_up)
            in_flight.labels(url, role).set_function(requests)

    def watch_kv_views(self, views: Mapping[str, KvView]) -> None:
        """What the KV events of each engine tell, read when scraped."""
        if views:
            self.registry.register(_KvCollector(views))

    def watch_constants(self, names: Sequence[str], live: Sequence[float], known: Sequence[float]) -> None:
        """Gauges of the price's constants, as estimated and against the artifact's, read when scraped."""
        value = Gauge(
            "rutter_constant", "The price's constants as estimated, in seconds", ["constant"], registry=self.registry
        )
        ratio = Gauge(
            "rutter_constant_ratio", "The same as a share of what is known", ["constant"], registry=self.registry
        )
        for k, name in enumerate(names):
            if known[k] > 0.0:
                value.labels(name).set_function(partial(live.__getitem__, k))
                ratio.labels(name).set_function(partial(_share, live, known, k))

    def watch_length_ratio(self, ratio: Callable[[], float]) -> None:
        """A gauge of how long answers are against what was predicted, read when scraped."""
        told = "Tokens of answers as a share of what is predicted"
        Gauge("rutter_length_ratio", told, registry=self.registry).set_function(ratio)

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)


def _share(values: Sequence[float], of: Sequence[float], k: int) -> float:
    return values[k] / of[k]


class _KvCollector(Collector):
    """Series of the engines whose KV events are followed."""

    def __init__(self, views: Mapping[str, KvView]) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        events = CounterMetricFamily("rutter_kv_events", "KV events received", labels=["engine"])
        gaps = CounterMetricFamily("rutter_kv_event_gaps", "Times that KV events were missed", labels=["engine"])
        blocks = GaugeMetricFamily("rutter_kv_blocks", "Blocks known by KV events", labels=["engine"])
        exact = GaugeMetricFamily("rutter_kv_exact", "1 where KV events tell of every block", labels=["engine"])
        for url, view in self._views.items():
            events.add_metric([url], view.events)
            gaps.add_metric([url], view.gaps)
            blocks.add_metric([url], len(view.blocks))
            exact.add_metric([url], float(view.exact))
        yield from (events, gaps, blocks, exact)
