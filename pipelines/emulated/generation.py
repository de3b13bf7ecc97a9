"""The life of one generation request on an emulated engine: queue, pull, tokens, hand-over, departure."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from learn.core import LOCAL, PREFILL_LEG, PULL
from pipelines.emulated.api_error import error_body, internal
from pipelines.emulated.api_reply import Reply
from pipelines.emulated.api_request import GenerationRequest, RemoteKv
from pipelines.emulated.counters import Counters
from pipelines.emulated.engine_config import EngineConfig
from pipelines.emulated.engine_loop import EngineLoop, Sequence
from pipelines.emulated.http_connection import HttpConnection
from pipelines.emulated.kv_handles import Claim, KvHandles, Release
from pipelines.emulated.kv_peers import KvPeers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """The parts of one engine that its requests work with. start: runs a coroutine beside the requests."""

    config: EngineConfig
    loop: EngineLoop
    handles: KvHandles
    peers: KvPeers
    counters: Counters
    start: Callable[[Coroutine[Any, Any, None]], None]


class Generation(Sequence):
    """One request and its answer. A stream's head is sent at once, as vLLM does: a hand-off that fails later is an
    event of the stream.
    """

    def __init__(self, engine: Engine, request: GenerationRequest, request_id: str, connection: HttpConnection) -> None:
        kind = PREFILL_LEG if request.hold_kv else PULL if request.remote_kv is not None else LOCAL
        super().__init__(request.prompt, request.cache_salt, len(request.text), kind)
        self._engine = engine
        self._request = request
        self._connection = connection
        self._reply = Reply(request, request_id, engine.config.model, engine.config.profile.block_tokens)
        # Clients may reuse their request ids, engines may not.
        self._kv_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
        self._pulling = False
        self._left = False

    def begin(self) -> None:
        """Queue the request; RequestError where the engine takes no more or cannot run it."""
        late_error = self._request.late_error
        if late_error is not None:
            if not self._request.stream:
                raise late_error
            self._connection.begin_stream()
            self._connection.end_stream(self._reply.failed(late_error, begun=False))
            return
        self._engine.loop.submit(self)
        self._connection.on_disconnect = self._leave
        if self._request.stream:
            self._connection.begin_stream()

    def on_token(self, last: bool) -> None:
        if self.emitted == 1:
            self._count_prompt()
        if last:
            self._finish()
        elif self._request.stream:
            self._connection.write(self._reply.token(self.emitted))

    def on_pull(self, complete_s: float) -> None:
        if self._request.remote_kv is not None:
            self._pulling = True
            self._engine.start(self._pull(self._request.remote_kv, complete_s))

    def _count_prompt(self) -> None:
        counters = self._engine.counters
        prompt_tokens = len(self.prompt)
        counters.prompt_tokens += prompt_tokens
        counters.prefix_queries_tokens += prompt_tokens
        counters.prefix_hits_tokens += self.cached_tokens
        remote = self._request.remote_kv
        if remote is None:
            self._reply.cached_tokens = self.cached_tokens
        else:
            # What the prefill found cached; where its handle does not tell, all that was there before the last token.
            told = remote.cached_tokens
            self._reply.cached_tokens = prompt_tokens if told is None else told
            counters.external_hits_tokens += prompt_tokens - self.cached_tokens

    def _finish(self) -> None:
        self._engine.counters.finished[self._request.finish_reason] += 1
        kv_transfer_params = self._hand_over() if self._request.hold_kv else None
        if self._request.stream:
            self._connection.end_stream(self._reply.last_token(self.emitted))
        else:
            self._connection.respond(200, self._reply.whole(kv_transfer_params))

    def _hand_over(self) -> dict[str, Any]:
        """Hold the blocks and make their handle."""
        engine = self._engine
        block_labels = engine.loop.block_labels(self)
        engine.handles.hold(self._kv_id, self, self._request.prompt_digest.hex())
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [block_labels],
            "remote_engine_id": engine.handles.engine_id,
            "remote_request_id": self._kv_id,
            "remote_host": engine.config.host,
            "remote_port": engine.config.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(self.prompt) + self.emitted - 1,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": self.cached_tokens,
        }

    async def _pull(self, remote: RemoteKv, complete_s: float) -> None:
        """Claim the handle and wait out the transfer beside it, then join the batch."""
        engine = self._engine
        began_s = time.monotonic()
        claim = Claim(remote.engine_id, remote.request_id, self._request.prompt_digest.hex())
        refusal = await engine.peers.claim(remote.host, remote.port, claim)
        if refusal is not None:
            engine.counters.failed_transfers += 1
            self._fail(f"the KV of the prompt could not be loaded from {remote.host}:{remote.port}: {refusal}")
            return
        claimed_s = time.monotonic()
        await asyncio.sleep(max(complete_s - claimed_s, 0.0))
        engine.counters.observe_transfer(time.monotonic() - began_s)
        if not self._left:
            engine.loop.loaded(self, max(complete_s, claimed_s))
        await self._release(remote, claimed=True)

    async def _release(self, remote: RemoteKv, claimed: bool) -> None:
        release = Release(remote.engine_id, remote.request_id, claimed)
        await self._engine.peers.release(remote.host, remote.port, release)

    def _fail(self, reason: str) -> None:
        """End the request as vLLM does, which tells its log why and its client nothing."""
        log.warning("request %s failed: %s", self._kv_id, reason)
        if self._left:
            return
        self._engine.loop.abort(self)
        self._engine.counters.finished["error"] += 1
        if self._request.stream:
            self._connection.end_stream(self._reply.failed(internal(), begun=True))
        else:
            self._connection.respond(500, error_body(internal()))

    def _leave(self) -> None:
        """The client is gone: free everything, at the prefill engine too."""
        self._left = True
        self._engine.loop.abort(self)
        self._engine.counters.aborted += 1
        remote = self._request.remote_kv
        if remote is not None and self.emitted == 0 and not self._pulling:
            self._engine.start(self._release(remote, claimed=False))
