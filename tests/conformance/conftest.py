"""The cluster that the suite runs against: a running one by name or URLs, or emulated engines of the suite's own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import httpx
import pytest
from engine_under_test import Cluster, Engine

from pipelines.emulated.engine_config import EngineConfig
from pipelines.emulated.engine_process import listening_socket
from pipelines.emulated.server import EngineServer
from pipelines.engine_urls import named_cluster
from serve_table.step_time import A40_3B, Handoff, StepTime

FAST = replace(
    A40_3B,
    max_model_len_tokens=2048,
    step=StepTime(
        floor_s=0.001, per_token_s=0.0, knee_tokens=0.0, per_token_beyond_s=0.000001, per_context_token_s=0.0
    ),
    handoff=Handoff(latency_s=0.001, per_token_s=0.0),
)
EMULATED_LEASE_S = 1.5
TIMEOUT_S = 120.0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--cluster", metavar="NAME", help="a running cluster of `rutter cluster up`")
    group.addoption("--prefill-url", metavar="URL", help="one engine of an existing cluster")
    group.addoption("--decode-url", metavar="URL", help="one engine of an existing cluster")


def _option(config: pytest.Config, name: str) -> str | None:
    # Not known where the whole of tests/ is collected: then the engines are emulated.
    value = config.getoption(name, default=None)
    return value if isinstance(value, str) else None


@contextmanager
def _emulated_engine(role: str) -> Iterator[str]:
    """One engine in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=f"emulated {role}", daemon=True)
    thread.start()
    listening = listening_socket("127.0.0.1", None, role)
    listening.setblocking(False)
    port = listening.getsockname()[1]
    config = EngineConfig(
        name=role, role=role, host="127.0.0.1", port=port, model="tiny", profile=FAST, lease_s=EMULATED_LEASE_S
    )

    async def start() -> EngineServer:
        server = EngineServer(config)
        await server.start(listening)
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(60.0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()


@contextmanager
def _urls(config: pytest.Config) -> Iterator[tuple[str, str, str]]:
    """Kind, and the URLs of a prefill and a decode engine."""
    prefill, decode = _option(config, "prefill_url"), _option(config, "decode_url")
    if prefill is not None or decode is not None:
        if prefill is None or decode is None:
            raise pytest.UsageError("--prefill-url and --decode-url go together")
        yield "existing", prefill.rstrip("/"), decode.rstrip("/")
        return
    name = _option(config, "cluster")
    if name is not None:
        urls = named_cluster(name)
        if not urls.prefill_urls:
            raise pytest.UsageError(f"cluster {name!r} has no prefill engine")
        yield urls.kind or "existing", urls.prefill_urls[0], urls.decode_urls[-1]
        return
    with _emulated_engine("prefill") as prefill_url, _emulated_engine("decode") as decode_url:
        yield "emulated", prefill_url, decode_url


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """The engines under test, found idle."""
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=TIMEOUT_S, trust_env=False))
        kind, *urls = stack.enter_context(_urls(pytestconfig))
        engines = []
        for role, url in zip(("prefill", "decode"), urls, strict=True):
            model = client.get(f"{url}/v1/models").json()["data"][0]
            engines.append(Engine(url, role, kind, model["id"], client, max_model_len=model["max_model_len"]))
        found = Cluster(*engines)
        body = found.prefill.completion(256, max_tokens=1)
        handle = found.prefill.prefill(body)
        found.decode.answer("/v1/completions", {**body, "kv_transfer_params": handle})
        for engine in engines:
            engine.block_tokens = 256 // len(handle["remote_block_ids"][0])
            engine.until_idle()
        yield found


@pytest.fixture(params=["prefill", "decode"])
def engine(request: pytest.FixtureRequest, cluster: Cluster) -> Engine:
    """Each of the two engines: both roles speak the whole protocol."""
    return cluster.prefill if request.param == "prefill" else cluster.decode
