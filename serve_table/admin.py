"""The admin port: what operators ask of a router and clients may not.

A route is a handler and its line in ROUTES.
"""

import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from serve_table.api_keys import KeySet
from serve_table.client_side import ClientLeftError, read_body
from serve_table.context import RouterContext
from serve_table.engine_response import Headers
from serve_table.errors import RequestError
from serve_table.pass_through import reset_prefix_caches
from serve_table.readiness import readiness
from serve_table.relay import JSON_HEADER, Receive, Scope, Send, send_refusal, send_whole

MAX_ADMIN_BODY_BYTES = 2**20
PROMETHEUS_HEADER = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


@dataclass(frozen=True)
class AdminRequest:
    """query: undecoded, without the question mark."""

    query: bytes
    body: bytes


@dataclass(frozen=True)
class AdminAnswer:
    body: bytes
    status: int = 200
    content_type: tuple[bytes, bytes] = JSON_HEADER


Handler = Callable[[RouterContext, AdminRequest], Awaitable[AdminAnswer]]
"""Answers one route. Raises RequestError, and RequestError only, for what it refuses."""


def json_answer(document: Any, status: int = 200) -> AdminAnswer:
    """document: whatever msgspec can write as JSON."""
    return AdminAnswer(msgspec.json.encode(document), status)


async def _health(_: RouterContext, __: AdminRequest) -> AdminAnswer:
    return json_answer({"status": "ok"})


async def _ready(context: RouterContext, _: AdminRequest) -> AdminAnswer:
    ready, reasons = readiness(context.fleet)
    return json_answer({"ready": ready, "reasons": reasons}, 200 if ready else 503)


async def _metrics(context: RouterContext, _: AdminRequest) -> AdminAnswer:
    return AdminAnswer(context.metrics.text(), content_type=PROMETHEUS_HEADER)


async def _reset_prefix_cache(context: RouterContext, _: AdminRequest) -> AdminAnswer:
    failed = await reset_prefix_caches(context)
    if failed:
        raise RequestError(502, f"{failed} of {len(context.fleet.engines)} engines did not reset")
    return json_answer({"status": "ok"})


ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", "/health"): _health,
    ("GET", "/ready"): _ready,
    ("GET", "/metrics"): _metrics,
    ("POST", "/reset_prefix_cache"): _reset_prefix_cache,
}


class Admin:
    """ASGI application of the admin port. keys: None where whoever reaches the port may ask."""

    def __init__(self, context: RouterContext, keys: KeySet | None) -> None:
        self._context = context
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            self._check_caller(scope["headers"])
            handler = _find(scope["method"], scope["path"])
            body = await read_body(receive, MAX_ADMIN_BODY_BYTES)
            answer = await handler(self._context, AdminRequest(scope["query_string"], body))
            await send_whole(send, answer.status, [answer.content_type], answer.body)
        except RequestError as error:
            await send_refusal(send, error)
        except ClientLeftError:
            pass

    def _check_caller(self, headers: Headers) -> None:
        if self._keys is not None:
            self._keys.check(headers)
        elif not _is_of_this_machine(headers):
            raise RequestError(403, "without --admin-keys only localhost may be named as Host, and no web page may ask")


def _is_of_this_machine(headers: Headers) -> bool:
    """Whether the caller is no web page in a browser of this machine, led here by a link or by a name of its own."""
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    return len(hosts) == 1 and _names_this_machine(hosts[0]) and not any(name == b"origin" for name, _ in headers)


def _names_this_machine(host: str) -> bool:
    """host: as in the header, with or without a port."""
    bare = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return is_loopback(bare)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this address; a name other than localhost may mean anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _find(method: str, path: str) -> Handler:
    path = path.rstrip("/") or "/"
    # Whoever may GET may look at the head of it.
    handler = ROUTES.get(("GET" if method == "HEAD" else method, path))
    if handler is not None:
        return handler
    allowed = [known for known, route in ROUTES if route == path]
    if not allowed:
        raise RequestError(404, f"no such path: {path[:100]}")
    allow = ", ".join(allowed + ["HEAD"] * ("GET" in allowed))
    raise RequestError(405, f"{path} takes {allow}", ((b"allow", allow.encode()),))
