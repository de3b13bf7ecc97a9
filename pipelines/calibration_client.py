"""Requests to one engine for measuring it: prompts that no cache holds, and every token's time of arrival."""

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from pipelines.engine_probe import COMPLETIONS, PREFILL_ONLY
from pipelines.prompts import FIRST_TOKEN, LAST_TOKEN
from pipelines.stream_timing import Event
from serve_table.engine_client import EngineClient
from serve_table.engine_response import EngineTimeouts
from serve_table.errors import EngineError, EngineProtocolError

JSON_HEADERS = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
CONNECT_S = 5.0
ANSWER_S = 120.0
"""Engine time without a byte after which an engine is taken to be stuck."""

_EVENTS = msgspec.json.Decoder(Event)
_ERROR_CHARACTERS = 200


class Prompts:
    """Prompts of token ids, each unlike any other: equal ones would be answered from a warm prefix cache.

    nonce: to be another one in every calibration, since a cluster remembers the last one's prompts.
    """

    def __init__(self, nonce: int) -> None:
        self._rng = np.random.default_rng(nonce)

    def take(self, n_tokens: int) -> list[int]:
        ids: list[int] = self._rng.integers(FIRST_TOKEN, LAST_TOKEN + 1, n_tokens).tolist()
        return ids


@dataclass
class Stream:
    """One streamed answer, filled as it comes. Times are of the monotonic clock."""

    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    _tail: bytes = b""
    _done: bool = False

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def events_per_token(self) -> float:
        """1 but where an engine puts several tokens into an event."""
        return min(len(self.token_times_s) / self.output_tokens, 1.0) if self.output_tokens else 1.0

    def feed(self, data: bytes, now_s: float) -> None:
        """Bytes that arrived at `now_s`. An event with a choice is a token, even where its text is still empty, as
        of half a character. EngineProtocolError for an error event.
        """
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                self._done = True
                continue
            event = _EVENTS.decode(content)
            if event.error is not None:
                raise EngineProtocolError(f"error event: {_shown(msgspec.json.encode(event.error))}")
            if event.choices:
                self.token_times_s.append(now_s)
            if event.usage is not None:
                self.prompt_tokens = event.usage.prompt_tokens
                self.output_tokens = event.usage.completion_tokens

    def end(self) -> None:
        """EngineProtocolError where the answer is not whole."""
        if not self._done or not self.token_times_s:
            raise EngineProtocolError("the stream ended without a token or without [DONE]")
        if self.output_tokens is not None:
            # Some servers send the finish reason as an event of its own.
            del self.token_times_s[max(self.output_tokens, 1) :]


class _LegAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True)
class PrefillLeg:
    """A finished prefill leg: how long it took, wall, and the handle to its KV."""

    wall_s: float
    handle: msgspec.Raw


class CalibratedEngine:
    """One engine. name: its place in the cluster, as `decode 0`. Methods raise EngineError naming it."""

    def __init__(self, name: str, url: str, model: str, dilation: float) -> None:
        self.name = name
        self.url = url
        self._model = model
        limit_s = ANSWER_S * max(dilation, 1.0)
        self._timeouts = EngineTimeouts(CONNECT_S, limit_s, limit_s)
        self._client = EngineClient(url, self._timeouts)

    async def stream(
        self, prompt: list[int], output_tokens: int, stream: Stream, handle: msgspec.Raw | None = None
    ) -> Stream:
        """Ask for exactly so many tokens and fill `stream`, which is returned. handle: of its prefill leg."""
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        body = self._body(prompt, output_tokens, fields if handle is None else {**fields, "kv_transfer_params": handle})
        response = await self._client.request("POST", COMPLETIONS, JSON_HEADERS, body, self._timeouts)
        try:
            if response.status != 200:
                raise self._refused(response.status, await response.body())
            stream.sent_s = response.sent_s
            while data := await response.chunk():
                stream.feed(data, time.monotonic())
            stream.end()
        except (EngineProtocolError, msgspec.DecodeError) as error:
            raise EngineProtocolError(f"{self.name} at {self.url}: {error}") from error
        finally:
            response.close()
        return stream

    async def prefill_leg(self, prompt: list[int]) -> PrefillLeg:
        """Prefill for another engine to decode."""
        body = self._body(prompt, 1, {"stream": False, "kv_transfer_params": PREFILL_ONLY})
        response = await self._client.request("POST", COMPLETIONS, JSON_HEADERS, body, self._timeouts)
        try:
            content = await response.body()
            wall_s = time.monotonic() - response.sent_s
        finally:
            response.close()
        if response.status != 200:
            raise self._refused(response.status, content)
        try:
            handle = msgspec.json.decode(content, type=_LegAnswer).kv_transfer_params
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineProtocolError(f"{self.name} at {self.url} answered no JSON: {error}") from error
        if bytes(handle)[:1] != b"{":
            raise EngineProtocolError(
                f"{self.name} at {self.url} gave no kv_transfer_params for a prefill leg: is its KV connector on?"
            )
        return PrefillLeg(wall_s, handle)

    async def round_trip_s(self) -> float:
        """Wall time of a request that does no work."""
        response = await self._client.request("GET", "/health", [], b"", self._timeouts)
        try:
            await response.body()
            return time.monotonic() - response.sent_s
        finally:
            response.close()

    def close(self) -> None:
        """Close the idle connections."""
        self._client.close()

    def _body(self, prompt: list[int], output_tokens: int, fields: dict[str, Any]) -> bytes:
        common = {"model": self._model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0}
        return msgspec.json.encode({**common, "ignore_eos": True, **fields})

    def _refused(self, status: int, content: bytes) -> EngineError:
        return EngineError(f"{self.name} at {self.url} answered {status}: {_shown(content)}")


def _shown(data: bytes) -> str:
    return " ".join(data.decode("utf-8", "replace").split())[:_ERROR_CHARACTERS]
