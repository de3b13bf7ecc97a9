"""Requests that make no tokens: passed to one decode engine, or to every engine."""

import asyncio
import uuid

from serve_table.client_side import ClientWatch, read_body
from serve_table.context import RouterContext
from serve_table.endpoints import Endpoint
from serve_table.engine_response import Headers
from serve_table.errors import EngineError, EngineTimeoutError, EngineUnreachableError, RequestError
from serve_table.fleet import Engine
from serve_table.relay import Receive, Scope, Send, forwarded_headers, path_and_query, returned_headers, send_whole
from serve_table.request_body import encode_fields, parse_fields


async def pass_to_decode(
    context: RouterContext, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send
) -> None:
    """Ask one decode engine and return its answer as it is. RequestError where none can answer."""
    body = await read_body(receive, context.config.max_body_bytes)
    if body:
        body = encode_fields(parse_fields(body))
    headers: Headers = scope["headers"]
    path = path_and_query(endpoint, scope)
    request_id = uuid.uuid4().hex
    echoed_id = next((value for name, value in headers if name == b"x-request-id"), request_id.encode())
    sent_headers = forwarded_headers(headers, request_id, context.access.passes_authorization)
    method, timeouts = scope["method"], context.config.timeouts
    tried: list[Engine] = []
    async with ClientWatch(receive):
        while True:
            engine = context.fleet.another_decode(tried, context.rotation)
            if engine is None:
                raise RequestError(503, "no decode engine can be reached")
            try:
                response = await engine.client.request(method, path, sent_headers, body, timeouts)
                try:
                    content = await response.body()
                finally:
                    response.close()
            except EngineUnreachableError as error:
                context.health.mark_failed(engine, "unreachable", error)
                tried.append(engine)
                continue
            except EngineError as error:
                late = isinstance(error, EngineTimeoutError)
                raise RequestError(504 if late else 502, "the engine did not answer") from error
            await send_whole(send, response.status, returned_headers(response.headers, echoed_id), content)
            return


async def reset_prefix_caches(context: RouterContext) -> int:
    """Reset the prefix cache of every engine and forget what they held; returns how many engines did not."""

    async def reset(engine: Engine) -> bool:
        try:
            response = await engine.client.request("POST", "/reset_prefix_cache", [], b"", context.config.timeouts)
            try:
                await response.body()
            finally:
                response.close()
        except EngineError:
            return False
        return response.status == 200

    done = await asyncio.gather(*(reset(engine) for engine in context.fleet.engines))
    # Forgotten last: what was sent during the reset may be gone as well.
    for engine in context.fleet.engines:
        context.caches.index.clear(engine.url)
    return done.count(False)
