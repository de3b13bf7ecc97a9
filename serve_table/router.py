"""The router: a raw ASGI application over one context."""

import logging

import msgspec

from serve_table.client_side import ClientLeftError
from serve_table.context import RouterContext
from serve_table.endpoints import Endpoint, find_endpoint
from serve_table.engine_response import Headers
from serve_table.errors import RequestError
from serve_table.generation import JSON_HEADER, generate
from serve_table.openai_error import error_body
from serve_table.pass_through import pass_to_decode, reset_prefix_caches
from serve_table.relay import Receive, Scope, Send, send_whole

logger = logging.getLogger("rutter")

PROMETHEUS_HEADER = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class Router:
    """ASGI application. State is that of its context; several routers can live in one process."""

    def __init__(self, context: RouterContext) -> None:
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)

    async def start(self) -> None:
        """Learn which engines are up, and follow their KV events."""
        if self.context.kv_subscriber is not None:
            self.context.kv_subscriber.start()
        await self.context.health.start()

    async def stop(self) -> None:
        if self.context.holding is not None:
            self.context.holding.stop()
        await self.context.health.stop()
        if self.context.kv_subscriber is not None:
            await self.context.kv_subscriber.stop()
        for engine in self.context.fleet.engines:
            engine.client.close()
        self.context.journal.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = find_endpoint(scope["path"])
        method = scope["method"]
        try:
            if endpoint is None or (endpoint.kind == "broadcast" and not self.context.config.allow_admin):
                raise RequestError(404, f"no such path: {scope['path'][:100]}")
            if method not in endpoint.methods:
                raise RequestError(405, f"{endpoint.path} takes {' or '.join(endpoint.methods)}")
            if endpoint.kind == "generate":
                await generate(self.context, endpoint, scope, receive, send)
            elif endpoint.kind == "pass":
                await pass_to_decode(self.context, endpoint, scope, receive, send)
            else:
                await self._own(endpoint, send)
        except RequestError as error:
            headers: Headers = [JSON_HEADER]
            if error.status == 413:
                headers.append((b"connection", b"close"))
            await send_whole(send, error.status, headers, error_body(error.status, str(error)))
        except ClientLeftError:
            logger.debug("a client left before its request was complete")

    async def _own(self, endpoint: Endpoint, send: Send) -> None:
        """Endpoints that the router answers itself."""
        if endpoint.kind == "metrics":
            await send_whole(send, 200, [PROMETHEUS_HEADER], self.context.metrics.text())
        elif endpoint.kind == "health":
            await send_whole(send, 200, [JSON_HEADER], b'{"status":"ok"}')
        elif endpoint.kind == "ready":
            ready, reasons = self.readiness()
            body = msgspec.json.encode({"ready": ready, "reasons": reasons})
            await send_whole(send, 200 if ready else 503, [JSON_HEADER], body)
        else:
            failed = await reset_prefix_caches(self.context)
            if failed:
                raise RequestError(502, f"{failed} of {len(self.context.fleet.engines)} engines did not reset")
            await send_whole(send, 200, [JSON_HEADER], b'{"status":"ok"}')

    def readiness(self) -> tuple[bool, list[str]]:
        """Whether a request can be served, and what is not as it should be. Ready with one decode engine."""
        fleet = self.context.fleet
        reasons = [
            f"{engine.role} engine {number} is down: {engine.down_reason}"
            for engines in (fleet.prefill, fleet.decode)
            for number, engine in enumerate(engines)
            if not engine.up
        ]
        ready = any(engine.up for engine in fleet.decode)
        if not ready:
            reasons.insert(0, "no decode engine is up")
        elif not any(engine.up for engine in fleet.prefill):
            reasons.insert(0, "no prefill engine is up: every request prefills locally")
        return ready, reasons
