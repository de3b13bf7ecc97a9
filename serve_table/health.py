"""Which engines are up: found by the requests' own failures, and probed until they are back."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from serve_table.engine_caches import EngineCaches
from serve_table.errors import EngineError
from serve_table.fleet import Engine, EngineFleet
from serve_table.metrics import RouterMetrics

logger = logging.getLogger("rutter")

PROBE_LIMIT_S = 5.0
MAX_PROBE_WAIT_S = 30.0


@dataclass(frozen=True)
class ProbePolicy:
    """interval_s: between probes of an engine that is down; doubled with each failure that follows a comeback
    without a success between, since an engine may answer /health and nothing else."""

    interval_s: float = 1.0

    def wait_s(self, failures: int) -> float:
        return min(self.interval_s * 2.0 ** max(failures - 1, 0), MAX_PROBE_WAIT_S)


class Health:
    """Marks engines down and brings them back. on_change: called after either."""

    def __init__(
        self,
        fleet: EngineFleet,
        caches: EngineCaches,
        metrics: RouterMetrics,
        probes: ProbePolicy,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self._on_change = on_change
        self._fleet = fleet
        self._caches = caches
        self._metrics = metrics
        self._probes = probes
        self._tasks: dict[Engine, asyncio.Task[None]] = {}

    async def start(self, limit_s: float = 2.0) -> None:
        """Probe every engine once, for at most `limit_s` in all; those that do not answer stay down."""
        for engine in self._fleet.engines:
            self._tasks[engine] = asyncio.create_task(self._probe_until_up(engine, first=True))
        await asyncio.wait(self._tasks.values(), timeout=limit_s)

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def mark_failed(self, engine: Engine, kind: str, error: EngineError) -> None:
        """A request's leg failed on this engine: no more work until a probe succeeds."""
        self._metrics.engine_failures.labels(engine.url, kind).inc()
        engine = engine.host
        engine.failures += 1
        if not engine.up:
            return
        engine.up = False
        engine.down_reason = str(error)
        self._caches.forget(engine.url)
        logger.warning("engine down: %s", error)
        self._tell()
        self._tasks[engine] = asyncio.create_task(self._probe_until_up(engine, first=False))

    def mark_served(self, engine: Engine) -> None:
        """A request was answered: what it did before no longer counts."""
        engine.host.failures = 0

    async def _probe_until_up(self, engine: Engine, first: bool) -> None:
        if not first:
            await asyncio.sleep(self._probes.wait_s(engine.failures))
        while not await self._is_healthy(engine):
            await asyncio.sleep(self._probes.interval_s)
        engine.up = True
        engine.down_reason = ""
        self._tell()
        if not first:
            logger.warning("engine back: %s", engine.url)

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change()

    async def _is_healthy(self, engine: Engine) -> bool:
        client = engine.client
        limits = replace(client.timeouts, connect_s=PROBE_LIMIT_S, first_byte_s=PROBE_LIMIT_S, gap_s=PROBE_LIMIT_S)
        try:
            response = await client.request("GET", "/health", [], b"", limits, fresh=True)
        except EngineError as error:
            engine.down_reason = str(error)
            return False
        response.close()
        engine.down_reason = f"{engine.url} answered /health with {response.status}"
        return response.status == 200
