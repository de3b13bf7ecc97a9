"""A router in the test's own event loop, in front of stub engines, and a client for it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from stub_engines import StubEngine

from serve_table.access import Access
from serve_table.admin import Admin
from serve_table.context import RouterConfig, RouterContext
from serve_table.engine_response import EngineTimeouts
from serve_table.health import ProbePolicy
from serve_table.http_servers import listening_socket, uvicorn_config
from serve_table.journal import JournalReader, Row
from serve_table.policy import Policy, policy
from serve_table.predictor import constant_predictor
from serve_table.router import Router
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

PATIENT = EngineTimeouts(connect_s=2.0, first_byte_s=2.0, gap_s=2.0)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Tell me a story. " * 10}], **fields}


@dataclass
class Bench:
    context: RouterContext
    client: httpx.AsyncClient
    admin: httpx.AsyncClient
    port: int
    journal: Path

    async def rows(self, n: int) -> list[Row]:
        """The journal's rows, once there are n of them."""
        rows: list[Row] = []
        for _ in range(1500):
            rows = list(JournalReader([self.journal], strict=True))
            if len(rows) >= n:
                break
            await asyncio.sleep(0.01)
        assert len(rows) == n
        return rows

    async def row(self) -> Row:
        return (await self.rows(1))[0]

    def idle(self) -> bool:
        """Whether every in-flight counter is back at 0."""
        engines = self.context.fleet.engines
        book = self.context.residents
        if book is not None and (any(book.requests) or any(book.seen().shares)):
            return False
        if self.context.holding:
            return False
        return all(e.requests == 0 and e.tokens == 0 and e.local_prefill_tokens == 0 for e in engines)

    async def until_idle(self) -> None:
        for _ in range(1500):
            if self.idle():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("work is still counted in flight")

    async def stream(self, path: str, body: dict[str, Any], **headers: str) -> bytes:
        response = await self.client.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.content


@asynccontextmanager
async def router_bench(
    tmp_path: Path,
    prefill: Sequence[StubEngine] = (),
    decode: Sequence[StubEngine] = (),
    chosen: Policy | str = "round_robin",
    timeouts: EngineTimeouts = PATIENT,
    access: Access | None = None,
    **config: Any,
) -> AsyncIterator[Bench]:
    config.setdefault("probes", ProbePolicy(interval_s=0.05))
    settings = RouterConfig(
        tuple(engine.url for engine in prefill), tuple(engine.url for engine in decode), timeouts=timeouts, **config
    )
    journal = tmp_path / "journal"
    context = RouterContext(
        settings,
        policy(chosen) if isinstance(chosen, str) else chosen,
        constant_predictor(),
        targets_from_profile(A40_3B),
        journal,
        access=access,
    )
    listener = listening_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn_config(Router(context), drain_s=1))
    serving = asyncio.create_task(server._serve([listener]))
    admin_port = httpx.ASGITransport(Admin(context, None))
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10.0) as client,
        httpx.AsyncClient(base_url="http://localhost", transport=admin_port) as admin,
    ):
        while not server.started:
            await asyncio.sleep(0.005)
        try:
            yield Bench(context, client, admin, port, journal)
        finally:
            server.should_exit = True
            await client.aclose()
            await serving
