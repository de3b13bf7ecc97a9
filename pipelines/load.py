"""The open-loop load generator: request i leaves when it is due, whatever became of those before it."""

import asyncio
import resource
import time
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
import uvloop

from learn.trace import Trace
from pipelines.connections import ON_SENT, OpenLoopTransport
from pipelines.load_report import LATENESS_LIMIT_S, LoadReport, RequestRecord, quantiles
from pipelines.progress import Progress
from pipelines.prompts import Endpoint, PromptMaker
from pipelines.stream_timing import StreamTiming
from serve_table.errors import ConfigError
from serve_table.slo import CLASS_NAMES

LAG_INTERVAL_S = 0.02
# Below the five seconds after which vLLM's server closes an idle connection, so that ours goes first.
KEEPALIVE_S = 4.0
# Time zero lies this far ahead, so that the first request is as punctual as the others.
START_DELAY_S = 0.02
_ERROR_CHARACTERS = 300


def client_id(index: int, prefix: str = "load") -> str:
    """The X-Request-Id of request `index` of a trace."""
    return f"{prefix}-{index:06d}"


def client_index(request_id: str) -> int | None:
    """The index that `client_id` put into an id; None for an id of another kind."""
    digits = request_id.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else None


def load(url: str, trace: Trace, **options: Any) -> LoadReport:
    """`run_load` on an event loop of its own (uvloop); Ctrl-C returns what was measured, flagged incomplete."""
    return uvloop.run(run_load(url, trace, **options))


async def run_load(
    url: str,
    trace: Trace,
    *,
    seed: int,
    model: str,
    slo_headers: bool = True,
    dilation: float = 1.0,
    endpoint: Endpoint = "completions",
    progress: Progress | None = None,
    warmup_requests: int = 0,
    timeout_s: float = 600.0,
    lateness_limit_s: float = LATENESS_LIMIT_S,
    id_prefix: str = "load",
) -> LoadReport:
    """Send `trace` to the OpenAI server at `url` (http://host:port) and measure every answer.

    Request i is sent at start + arrival_s[i] * dilation on the monotonic clock, on as many connections as it
    takes. Failures are counted in the records, never raised. warmup_requests: that many short requests first, with
    prompts of their own, not recorded. timeout_s: an answer's limit in engine time. Cancelling (Ctrl-C) cancels
    the open requests and returns what there is, flagged incomplete. Raises ConfigError for a bad argument.
    """
    _check(url, dilation, timeout_s, endpoint)
    _allow_open_files(len(trace) + 64)
    prompts = PromptMaker(trace, seed, model, endpoint)
    transport = OpenLoopTransport(KEEPALIVE_S)
    async with httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
        run = _LoadRun(
            client=client,
            url=f"{url.rstrip('/')}/v1/{endpoint}",
            prompts=prompts,
            slo_headers=slo_headers,
            dilation=dilation,
            timeout_wall_s=timeout_s * dilation,
            id_prefix=id_prefix,
            progress=progress,
        )
        complete = await run.measure(warmup_requests)
    return LoadReport(
        n_requests=len(trace),
        records=tuple(sorted(run.records, key=lambda record: record.index)),
        complete=complete,
        duration_s=(time.monotonic() - run.start_s) / dilation,
        dilation=dilation,
        lag=quantiles(run.lags_s),
        lateness_limit_s=lateness_limit_s,
    )


def _check(url: str, dilation: float, timeout_s: float, endpoint: str) -> None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"the server's URL {url!r} is none: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or not 0 < (parsed.port or 80) < 2**16:
        raise ConfigError(f"the server's URL is {url!r}: give it as http://host:port")
    if endpoint not in ("completions", "chat/completions"):
        raise ConfigError(f"endpoint is {endpoint!r}: give completions or chat/completions")
    for name, value in (("dilation", dilation), ("timeout_s", timeout_s)):
        if not 0.0 < value < float("inf"):
            raise ConfigError(f"{name} is {value}: it must be above 0 and finite")


def _allow_open_files(n_files: int) -> None:
    """Raise this process's soft limit towards one socket a request; what is still short shows as errors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = n_files if hard == resource.RLIM_INFINITY else min(n_files, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass
class _Exchange:
    """One request under way. sent_s: when its first byte was written, on the monotonic clock, as ended_s."""

    sent_s: float | None = None
    ended_s: float | None = None
    http_status: int | None = None
    error: str | None = None
    timing: StreamTiming = field(default_factory=StreamTiming)

    def on_sent(self) -> None:
        self.sent_s = time.monotonic()


@dataclass
class _LoadRun:
    client: httpx.AsyncClient
    url: str
    prompts: PromptMaker
    slo_headers: bool
    dilation: float
    timeout_wall_s: float
    id_prefix: str
    progress: Progress | None
    records: list[RequestRecord] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    start_s: float = field(default_factory=time.monotonic)
    n_failed: int = 0

    async def measure(self, warmup_requests: int) -> bool:
        """Run to the end; False where it was cancelled."""
        lag = asyncio.create_task(self._watch_lag())
        sending: list[asyncio.Task[None]] = []
        try:
            await self._warm_up(warmup_requests)
            await self._pace(sending)
            await asyncio.gather(*sending)
        except asyncio.CancelledError:
            return False
        finally:
            for task in (lag, *sending):
                task.cancel()
            await asyncio.gather(lag, *sending, return_exceptions=True)
        return True

    async def _warm_up(self, n_requests: int) -> None:
        """Open connections and warm the path with the trace's first requests, shortened and of other text."""
        head = self.prompts.trace.head(n_requests)
        short = replace(
            head,
            prompt_tokens=np.minimum(head.prompt_tokens, 32),
            output_tokens=np.minimum(head.output_tokens, 4),
            chain_length=np.zeros_like(head.chain_length),
        )
        prompts = replace(self.prompts, trace=short, seed=~self.prompts.seed)
        await asyncio.gather(
            *(
                self._exchange(_Exchange(), client_id(index, f"{self.id_prefix}-warmup"), index, prompts.body(index))
                for index in range(len(short))
            )
        )

    async def _pace(self, sending: list[asyncio.Task[None]]) -> None:
        """Start every request at its own absolute deadline: one late request delays no other."""
        self.lags_s.clear()
        self.start_s = time.monotonic() + START_DELAY_S
        for index, arrival_s in enumerate(self.prompts.trace.arrival_s.tolist()):
            body = self.prompts.body(index)
            wait_s = self.start_s + arrival_s * self.dilation - time.monotonic()
            # Even a request that is due gives the loop one turn, so that the one before it gets out.
            await asyncio.sleep(max(wait_s, 0.0))
            sending.append(asyncio.create_task(self._request(index, arrival_s, body)))

    async def _request(self, index: int, scheduled_s: float, body: bytes) -> None:
        """One request of the trace and its record."""
        request_id = client_id(index, self.id_prefix)
        exchange = _Exchange()
        try:
            await self._exchange(exchange, request_id, index, body)
        except asyncio.CancelledError:
            exchange.error = "cancelled: the run was interrupted"
            raise
        finally:
            self.records.append(self._record(exchange, index, request_id, scheduled_s))
        if self.progress is not None:
            self.n_failed += exchange.error is not None
            self.progress.advance(1, failed=float(self.n_failed))

    async def _exchange(self, exchange: _Exchange, request_id: str, index: int, body: bytes) -> None:
        """Send and read to the end; what goes wrong is told in `exchange.error`."""
        headers = {"content-type": "application/json", "accept-encoding": "identity", "x-request-id": request_id}
        if self.slo_headers:
            headers["x-rutter-slo-class"] = CLASS_NAMES[int(self.prompts.trace.slo_class[index])]
        extensions = {ON_SENT: exchange.on_sent}
        try:
            async with (
                asyncio.timeout(self.timeout_wall_s),
                self.client.stream("POST", self.url, content=body, headers=headers, extensions=extensions) as response,
            ):
                exchange.http_status = response.status_code
                if response.status_code == 200:
                    async for data in response.aiter_raw():
                        exchange.timing.feed(data, time.monotonic())
                    exchange.error = exchange.timing.flaw()
                else:
                    text = (await response.aread()).decode("utf-8", "replace")[:_ERROR_CHARACTERS]
                    exchange.error = f"HTTP {response.status_code}: {text}"
        except TimeoutError:
            exchange.error = f"no whole answer within {self.timeout_wall_s:g} s"
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            exchange.error = f"{type(error).__name__}: {error}"
        exchange.ended_s = time.monotonic()

    def _record(self, exchange: _Exchange, index: int, request_id: str, scheduled_s: float) -> RequestRecord:
        timing, sent_s = exchange.timing, exchange.sent_s
        tpot_s = timing.tpot_s()

        def since_sent(time_s: float | None) -> float | None:
            return None if time_s is None or sent_s is None else (time_s - sent_s) / self.dilation

        return RequestRecord(
            index=index,
            request_id=request_id,
            scheduled_s=scheduled_s,
            lateness_s=None if sent_s is None else (sent_s - self.start_s) / self.dilation - scheduled_s,
            http_status=exchange.http_status,
            ttft_s=since_sent(timing.first_token_s),
            tpot_s=None if tpot_s is None else tpot_s / self.dilation,
            e2e_s=since_sent(exchange.ended_s) if exchange.error is None else None,
            prompt_tokens=timing.prompt_tokens,
            output_tokens=timing.output_tokens,
            token_events=timing.n_token_events,
            finish_reason=timing.finish_reason,
            error=exchange.error,
        )

    async def _watch_lag(self) -> None:
        """How late the loop wakes for a timer, again and again."""
        while True:
            due_s = time.monotonic() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.lags_s.append(max(time.monotonic() - due_s, 0.0) / self.dilation)
