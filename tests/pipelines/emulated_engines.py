"""Emulated engines inside the test's own loop, fast enough to test with."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec

from pipelines.emulated.engine_config import EngineConfig
from pipelines.emulated.engine_process import listening_socket
from pipelines.emulated.server import EngineServer
from serve_table.step_time import A40_3B, Handoff, StepTime

MODEL = "a40-3b"
FAST = replace(
    A40_3B,
    step=StepTime(
        floor_s=0.001, per_token_s=0.0, knee_tokens=0.0, per_token_beyond_s=0.000001, per_context_token_s=0.0
    ),
    handoff=Handoff(latency_s=0.001, per_token_s=0.0),
)
SLOW_STEPS = replace(FAST, step=replace(FAST.step, floor_s=0.05))


@dataclass
class EngineUnderTest:
    """A running engine and a client that speaks to it."""

    server: EngineServer
    url: str
    port: int
    client: httpx.AsyncClient

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers=names)

    async def events(self, path: str, body: Any) -> list[str]:
        """The data of a stream's events, its framing checked."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.text.split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines)
        return [line.removeprefix("data: ") for line in lines]

    async def metric(self, name: str, **labels: str) -> float:
        """The one sample of a metric that has these labels."""
        for line in (await self.client.get("/metrics")).text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(f'{key}="{text}"' in sample for key, text in labels.items()):
                return float(value)
        raise AssertionError(f"no metric {name}")

    async def prefill(self, prompt: Any, request_id: str = "r") -> dict[str, Any]:
        """The prefill leg of a request; returns its kv_transfer_params."""
        body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        response = await self.post("/v1/completions", body, x_request_id=request_id)
        assert response.status_code == 200, response.text
        handle: dict[str, Any] = response.json()["kv_transfer_params"]
        return handle

    async def until(self, running: int = 0, waiting: int = 0, kv_usage: float | None = None) -> None:
        """Wait, not for ever, until the gauges say this."""
        loop = self.server.engine.loop
        for _ in range(400):
            usage_fits = kv_usage is None or abs(loop.kv_usage - kv_usage) < 1e-9
            if loop.running_and_waiting() == (running, waiting) and usage_fits:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"running and waiting {loop.running_and_waiting()}, KV usage {loop.kv_usage}")

    async def until_idle(self) -> None:
        """Nothing runs, nothing waits, nothing is held."""
        await self.until(kv_usage=0.0)
        assert len(self.server.engine.handles) == 0


@asynccontextmanager
async def emulated_engine(**settings: Any) -> AsyncIterator[EngineUnderTest]:
    """One engine; settings: of EngineConfig, by default FAST and undilated."""
    listening = listening_socket("127.0.0.1", None, "the test")
    listening.setblocking(False)
    port = listening.getsockname()[1]
    default = EngineConfig(name="engine", role="decode", host="127.0.0.1", port=port, model=MODEL, profile=FAST)
    server = EngineServer(msgspec.structs.replace(default, **settings))
    await server.start(listening)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20.0) as client:
            yield EngineUnderTest(server, url, port, client)
    finally:
        await server.close()


@asynccontextmanager
async def emulated_pair(**settings: Any) -> AsyncIterator[tuple[EngineUnderTest, EngineUnderTest]]:
    """A prefill engine and a decode engine."""
    async with emulated_engine(**settings) as prefill, emulated_engine(**settings) as decode:
        yield prefill, decode


def completion_head(content: bytes) -> bytes:
    """The head of a completion request with this body."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(content)


@asynccontextmanager
async def leaving_client(engine: EngineUnderTest, body: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """A client that sends a completion request and leaves at the end of the block, whatever has arrived."""
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    content = msgspec.json.encode(body)
    writer.write(completion_head(content) + content)
    try:
        await writer.drain()
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()
