"""Engines without sockets, for gates: an httpx transport that answers as vLLM does, and that can be told to err."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "tiny"
BLOCK_TOKENS = 16


@dataclass
class FakeEngine:
    """One engine. The attributes after `url` are its faults, all off."""

    url: str
    model: str = MODEL
    version: str = "1.0"
    max_model_len: int = 4096
    text_salt: str = ""
    extra_prompt_tokens: int = 0
    missing_output_tokens: int = 0
    refuses_handles_of: str | None = None
    gives_handles: bool = True
    has_reset: bool = True
    reset_works: bool = True
    tells_cached_tokens: bool = True
    tells_metrics: bool = True
    resets_refused: int = 0
    healthy: bool = True
    cache: set[str] = field(default_factory=set)
    requests: list[dict[str, Any]] = field(default_factory=list)
    hits: int = 0

    def answer(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if not self.healthy:
            raise httpx.ConnectError("refused")
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": self.model, "max_model_len": self.max_model_len}]})
        if path == "/version":
            return httpx.Response(200, json={"version": self.version})
        if path == "/metrics":
            text = f'vllm:prefix_cache_hits_total{{engine="0"}} {self.hits}\n' if self.tells_metrics else ""
            return httpx.Response(200, text=text)
        if path == "/reset_prefix_cache" and self.has_reset:
            return self._reset()
        if path == "/v1/completions":
            return self._complete(body)
        return httpx.Response(200 if path == "/health" else 404)

    def _reset(self) -> httpx.Response:
        if self.resets_refused:
            self.resets_refused -= 1
            return httpx.Response(200, json={"success": False})
        if self.reset_works:
            self.cache.clear()
        return httpx.Response(200, json={"success": True})

    def _complete(self, body: dict[str, Any]) -> httpx.Response:
        self.requests.append(body)
        params = body.get("kv_transfer_params") or {}
        if params.get("remote_host") == self.refuses_handles_of and params.get("do_remote_prefill"):
            return httpx.Response(500, json={"error": {"message": "Internal server error"}})
        prompt = body["prompt"]
        key = f"{body['cache_salt']} {prompt}"
        cached = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS if key in self.cache else 0
        self.cache.add(key)
        self.hits += cached
        n_tokens = body["max_tokens"] - self.missing_output_tokens
        usage = {"prompt_tokens": len(prompt) + self.extra_prompt_tokens, "completion_tokens": n_tokens}
        if self.tells_cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        text = hashlib.sha256(f"{prompt}{self.text_salt}".encode()).hexdigest()[:n_tokens]
        handle = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_host": self.url}
        holds = self.gives_handles and params.get("do_remote_decode")
        return httpx.Response(
            200,
            json={
                "choices": [{"text": text, "finish_reason": "length"}],
                "usage": usage,
                "kv_transfer_params": handle if holds else None,
            },
        )


@dataclass
class FakeCluster:
    """Engines by role, and the transport that reaches them."""

    prefill: list[FakeEngine]
    decode: list[FakeEngine]

    @property
    def prefill_urls(self) -> Sequence[str]:
        return [engine.url for engine in self.prefill]

    @property
    def decode_urls(self) -> Sequence[str]:
        return [engine.url for engine in self.decode]

    @property
    def transport(self) -> httpx.MockTransport:
        engines = {engine.url: engine for engine in (*self.prefill, *self.decode)}

        def handle(request: httpx.Request) -> httpx.Response:
            engine = engines[f"http://{request.url.host}"]
            return engine.answer(request.url.path, json.loads(request.content or b"{}"))

        return httpx.MockTransport(handle)


def fake_cluster(n_prefill: int = 2, n_decode: int = 2) -> FakeCluster:
    """A cluster without a fault."""
    return FakeCluster(
        [FakeEngine(f"http://prefill-{i}") for i in range(n_prefill)],
        [FakeEngine(f"http://decode-{i}") for i in range(n_decode)],
    )
