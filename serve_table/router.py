"""The router: a raw ASGI application over one context."""

import logging

import msgspec

from serve_table.client_side import ClientLeftError
from serve_table.context import RouterContext
from serve_table.endpoints import Endpoint, find_endpoint
from serve_table.errors import RequestError
from serve_table.generation import generate
from serve_table.pass_through import pass_to_decode
from serve_table.readiness import readiness
from serve_table.relay import JSON_HEADER, Receive, Scope, Send, send_refusal, send_whole

logger = logging.getLogger("rutter")


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
            self.context.access.check(endpoint, scope["headers"])
            if endpoint is None:
                raise RequestError(404, f"no such path: {scope['path'][:100]}")
            if method not in endpoint.methods:
                allow = (b"allow", ", ".join(endpoint.methods).encode())
                raise RequestError(405, f"{endpoint.path} takes {' or '.join(endpoint.methods)}", (allow,))
            if endpoint.kind == "generate":
                await generate(self.context, endpoint, scope, receive, send)
            elif endpoint.kind == "pass":
                await pass_to_decode(self.context, endpoint, scope, receive, send)
            else:
                await self._own(endpoint, send)
        except RequestError as error:
            self.context.metrics.refusals.labels(str(error.status)).inc()
            await send_refusal(send, error)
        except ClientLeftError:
            logger.debug("a client left before its request was complete")

    async def _own(self, endpoint: Endpoint, send: Send) -> None:
        """Endpoints that the router answers itself, and with no more than anybody may know."""
        if endpoint.kind == "health":
            await send_whole(send, 200, [JSON_HEADER], b'{"status":"ok"}')
            return
        ready, _ = readiness(self.context.fleet)
        await send_whole(send, 200 if ready else 503, [JSON_HEADER], msgspec.json.encode({"ready": ready}))
