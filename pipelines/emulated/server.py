"""One emulated engine behind HTTP: its routes, and its way up and down."""

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from pipelines.emulated import api_request
from pipelines.emulated.api_error import error_body, internal, no_route_body, unreadable
from pipelines.emulated.api_request import GenerationRequest, Limits
from pipelines.emulated.counters import Counters
from pipelines.emulated.engine_config import EngineConfig
from pipelines.emulated.engine_loop import EngineLoop
from pipelines.emulated.generation import Engine, Generation
from pipelines.emulated.http_connection import HttpConnection, HttpRequest
from pipelines.emulated.kv_handles import Claim, KvHandles, Release
from pipelines.emulated.kv_peers import CLAIM_PATH, RELEASE_PATH, KvPeers
from pipelines.emulated.metrics import Metrics
from pipelines.pacing import Pacing
from serve_table.errors import RequestError

VERSION = "rutter-emulated"
METRICS_TYPE = b"text/plain; version=1.0.0; charset=utf-8"
BACKLOG = 2048

log = logging.getLogger(__name__)

Route = Callable[[HttpRequest, HttpConnection], None]


class EngineServer:
    """Made and used inside a running loop: `start`, then `close`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._limits = Limits(config.model, config.max_model_len_tokens)
        self._started = int(time.time())
        self._permission = {
            "id": f"modelperm-{uuid.uuid4().hex[:16]}",
            "object": "model_permission",
            "created": self._started,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[HttpConnection] = set()
        self._server: asyncio.Server | None = None
        loop = EngineLoop(config.profile, config.dilation, Pacing(config.dilation))
        self.engine = Engine(
            config=config,
            loop=loop,
            handles=KvHandles(str(uuid.uuid4()), config.lease_s * config.dilation, loop.release),
            peers=KvPeers(),
            counters=Counters(),
            start=self._start_task,
        )
        self._metrics = Metrics(self.engine)
        self._routes: dict[tuple[str, str], Route] = {
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/chat/completions"): self._chat,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics_text,
            ("GET", "/version"): self._version,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("POST", CLAIM_PATH): self._claim,
            ("POST", RELEASE_PATH): self._release,
            ("GET", "/emulator/pacing"): self._pacing,
            ("POST", "/emulator/pacing/reset"): self._reset_pacing,
        }
        self._paths = {path for _, path in self._routes}

    async def start(self, listening: socket.socket) -> None:
        """Serve a socket that listens already."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: HttpConnection(self.handle, self._connections), sock=listening, backlog=BACKLOG
        )

    async def close(self) -> None:
        """Stop at once: connections are closed, requests are dropped."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        await asyncio.sleep(0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.engine.handles.close()
        self.engine.peers.close()
        self.engine.loop.close()

    def handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        """Answer a request, or begin to."""
        try:
            route = self._routes.get((request.method, request.path.rstrip("/") or "/"))
            if route is None:
                known_path = request.path in self._paths
                connection.respond(405 if known_path else 404, no_route_body(known_path))
                return
            route(request, connection)
        except RequestError as error:
            connection.respond(error.status, error_body(error))
        except Exception:  # one request's defect must not end the engine
            log.exception("%s %s failed", request.method, request.path)
            connection.respond(500, error_body(internal()))

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _completions(self, request: HttpRequest, connection: HttpConnection) -> None:
        parsed = api_request.parse_completion(request.body, request.header(b"content-type"), self._limits)
        self._generate(parsed, "cmpl-", request, connection)

    def _chat(self, request: HttpRequest, connection: HttpConnection) -> None:
        parsed = api_request.parse_chat(request.body, request.header(b"content-type"), self._limits)
        self._generate(parsed, "chatcmpl-", request, connection)

    def _generate(
        self, parsed: GenerationRequest, prefix: str, request: HttpRequest, connection: HttpConnection
    ) -> None:
        request_id = prefix + (request.header(b"x-request-id") or uuid.uuid4().hex)
        Generation(self.engine, parsed, request_id, connection).begin()

    def _models(self, _: HttpRequest, connection: HttpConnection) -> None:
        model = {
            "id": self.config.model,
            "object": "model",
            "created": self._started,
            "owned_by": "vllm",
            "root": self.config.model,
            "parent": None,
            "max_model_len": self.config.max_model_len_tokens,
            "permission": [self._permission],
        }
        connection.respond(200, msgspec.json.encode({"object": "list", "data": [model]}))

    def _health(self, _: HttpRequest, connection: HttpConnection) -> None:
        connection.respond(200, b"")

    def _metrics_text(self, _: HttpRequest, connection: HttpConnection) -> None:
        connection.respond(200, self._metrics.text(), METRICS_TYPE)

    def _version(self, _: HttpRequest, connection: HttpConnection) -> None:
        connection.respond(200, msgspec.json.encode({"version": VERSION}))

    def _tokenize(self, request: HttpRequest, connection: HttpConnection) -> None:
        ids = api_request.parse_tokenize(request.body, request.header(b"content-type"), self._limits).tolist()
        limit = self.config.max_model_len_tokens
        connection.respond(
            200, msgspec.json.encode({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None})
        )

    def _detokenize(self, request: HttpRequest, connection: HttpConnection) -> None:
        text = api_request.parse_detokenize(request.body, request.header(b"content-type"), self._limits)
        connection.respond(200, msgspec.json.encode({"prompt": text}))

    def _reset_prefix_cache(self, _: HttpRequest, connection: HttpConnection) -> None:
        # Like vLLM: all or nothing, and nothing while blocks are in use.
        idle = self.engine.loop.kv_usage == 0.0
        if idle:
            self.engine.loop.reset_prefix_cache()
        connection.respond(200, msgspec.json.encode({"success": idle}))

    def _claim(self, request: HttpRequest, connection: HttpConnection) -> None:
        refusal = self.engine.handles.claim(_decoded(request.body, Claim))
        if refusal is None:
            connection.respond(200, b"{}")
        else:
            connection.respond(409, refusal.encode(), b"text/plain; charset=utf-8")

    def _release(self, request: HttpRequest, connection: HttpConnection) -> None:
        self.engine.handles.release(_decoded(request.body, Release))
        connection.respond(200, b"{}")

    def _pacing(self, _: HttpRequest, connection: HttpConnection) -> None:
        connection.respond(200, msgspec.json.encode(self.engine.loop.pacing.report()))

    def _reset_pacing(self, _: HttpRequest, connection: HttpConnection) -> None:
        self.engine.loop.pacing.reset()
        connection.respond(200, b"{}")


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise unreadable(str(error)) from error
