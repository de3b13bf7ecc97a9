"""/metrics of an emulated engine: vLLM's names, and the emulator's own."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pipelines.emulated.counters import TRANSFER_BUCKETS_S
from pipelines.emulated.generation import Engine
from pipelines.pacing import BUCKETS_S

LABELS = ("model_name", "engine")


class EngineCollector(Collector):
    """Reads one engine at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._labels = (engine.config.model, "0")

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._pacing()

    def _gauges(self) -> Iterator[Metric]:
        loop = self._engine.loop
        running, waiting = loop.running_and_waiting()
        for name, help_, value in (
            ("vllm:num_requests_running", "Requests in the batch.", running),
            ("vllm:num_requests_waiting", "Requests that wait for their turn or for their KV.", waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 1 is all.", loop.kv_usage),
            ("rutter_emulator_held_requests", "Finished prefill legs whose KV is held.", len(self._engine.handles)),
        ):
            gauge = GaugeMetricFamily(name, help_, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        loop, counters = self._engine.loop, self._engine.counters
        for name, help_, value in (
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the cache.",
                counters.prefix_queries_tokens,
            ),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", counters.prefix_hits_tokens),
            (
                "vllm:external_prefix_cache_hits",
                "Prompt tokens whose KV came from another engine.",
                counters.external_hits_tokens,
            ),
            ("rutter_emulator_aborted_requests", "Requests whose client left.", counters.aborted),
            ("vllm:prompt_tokens", "Prompt tokens of requests that began to answer.", counters.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", loop.generated_tokens),
            ("vllm:num_preemptions", "Sequences preempted for want of KV blocks.", loop.preemptions),
            ("vllm:nixl_num_kv_expired_reqs", "Held KV that nobody released in time.", self._engine.handles.expired),
            ("vllm:nixl_num_failed_transfers", "KV transfers that failed.", counters.failed_transfers),
        ):
            counter = CounterMetricFamily(name, help_, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Requests by how they ended.", labels=(*LABELS, "finished_reason")
        )
        for reason, count in counters.finished.items():
            success.add_metric((*self._labels, reason), count)
        yield success

        transfers = HistogramMetricFamily(
            "vllm:nixl_xfer_time_seconds", "Duration of the KV transfers completed.", labels=LABELS
        )
        buckets = _cumulative(TRANSFER_BUCKETS_S, counters.transfer_buckets)
        transfers.add_metric(self._labels, buckets, counters.transfers_s)
        yield transfers

    def _pacing(self) -> Iterator[Metric]:
        pacing = self._engine.loop.pacing
        lateness = HistogramMetricFamily(
            "rutter_emulator_step_lateness_seconds", "From a step's planned end to its last token.", labels=LABELS
        )
        lateness.add_metric(self._labels, _cumulative(BUCKETS_S, pacing.bucket_counts), pacing.bucket_sum_s)
        yield lateness
        report = pacing.report()
        for name, help_, value in (
            ("rutter_emulator_steps", "Engine steps since the last reset.", report.steps),
            ("rutter_emulator_steps_late", "Steps late by more than a tenth of their length.", report.steps_late),
            ("rutter_emulator_steps_very_late", "Steps late by more than half.", report.steps_very_late),
            ("rutter_emulator_re_anchored", "Times that the plan began anew.", report.re_anchored),
            ("rutter_emulator_pace_kept", "1 where the asked step times were kept.", int(report.kept)),
        ):
            gauge = GaugeMetricFamily(name, help_, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge


def _cumulative(limits_s: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus counts them."""
    return list(zip((*map(str, limits_s), "+Inf"), accumulate(counts), strict=True))


class Metrics:
    """The text of /metrics."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine))

    def text(self) -> bytes:
        return generate_latest(self._registry)
