"""Single requests to one engine, as checks send them: short, greedy, one at a time."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import httpx
import msgspec

from serve_table.errors import EngineError, EngineProtocolError, EngineTimeoutError, EngineUnreachableError

COMPLETIONS = "/v1/completions"
PREFILL_ONLY: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""NixlConnector's parameters of a prefill leg."""
MAX_MESSAGE_CHARACTERS = 200
RESET_RETRY_S = 0.5

Struct = TypeVar("Struct", bound=msgspec.Struct)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str | None = None


class Completion(msgspec.Struct):
    """What a check needs of an answer. kv_transfer_params: the handle of a prefill leg, opaque."""

    choices: list[_Choice]
    usage: Usage
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text


class Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Model]


class _Version(msgspec.Struct):
    version: str


class _Reset(msgspec.Struct):
    success: bool = True


class _ErrorInfo(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorInfo


@dataclass
class EngineProbe:
    """One engine. turn: held by a request, so that an engine answers one at a time and batches nothing."""

    url: str
    role: Literal["prefill", "decode"]
    client: httpx.AsyncClient
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def health(self) -> None:
        """Return where /health is 200; EngineError anywhere else."""
        await self._request("GET", "/health")

    async def models(self) -> list[Model]:
        """What the engine serves."""
        return _decoded(self.url, await self._request("GET", "/v1/models"), _Models).data

    async def version(self) -> str | None:
        """The engine's version; None where it has no /version."""
        response = await self._send("GET", "/version", None, None)
        if response.status_code == 404:
            return None
        return _decoded(self.url, self._checked(response, "/version"), _Version).version

    async def complete(
        self,
        model: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        salt: str,
        kv_transfer_params: dict[str, Any] | None = None,
        request_id: str | None = None,
    ) -> Completion:
        """A greedy completion of exactly `max_tokens`. salt: of the prefix cache, so that equal prompts share nothing.

        Raises EngineError.
        """
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = kv_transfer_params
        headers = None if request_id is None else {"x-request-id": request_id}
        async with self.turn:
            response = await self._request("POST", COMPLETIONS, body, headers)
        completion = _decoded(self.url, response, Completion)
        if not completion.choices:
            raise EngineProtocolError(f"{self.url} answered a completion without choices")
        return completion

    async def metric(self, name: str) -> float | None:
        """Sum of a metric's samples; None where the engine does not publish it."""
        text = (await self._request("GET", "/metrics")).text
        samples = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        values = [float(value) for sample, _, value in samples if sample.partition("{")[0] == name]
        return sum(values) if values else None

    async def reset_prefix_cache(self, patience_s: float) -> bool:
        """Empty the prefix cache; False where the engine has no such endpoint.

        An engine refuses while requests run or hand-offs are held: it is asked again for `patience_s`, then
        EngineError is raised.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + patience_s
        while True:
            response = await self._send("POST", "/reset_prefix_cache", None, None)
            if response.status_code in (404, 405):
                return False
            body = self._checked(response, "/reset_prefix_cache").content
            # Older versions answer without a body.
            if not body or _decoded_json(self.url, body, _Reset).success:
                return True
            if loop.time() > deadline_s:
                raise EngineError(
                    f"{self.url} could not reset its prefix cache within {patience_s:.0f} s: "
                    "requests run on it or hand-offs are held; wait for their end"
                )
            await asyncio.sleep(RESET_RETRY_S)

    async def _request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        return self._checked(await self._send(method, path, body, headers), path)

    async def _send(self, method: str, path: str, body: Any, headers: dict[str, str] | None) -> httpx.Response:
        try:
            return await self.client.request(method, self.url + path, json=body, headers=headers)
        except httpx.ConnectError as error:
            raise EngineUnreachableError(f"{self.url} cannot be reached: {error}") from error
        except httpx.TimeoutException as error:
            raise EngineTimeoutError(f"{self.url} did not answer {path} in time") from error
        except httpx.HTTPError as error:
            raise EngineProtocolError(f"{self.url} broke off its answer to {path}: {error}") from error

    def _checked(self, response: httpx.Response, path: str) -> httpx.Response:
        if response.status_code != 200:
            raise EngineError(f"{self.url} answered {path} with {response.status_code}{_message(response.content)}")
        return response


def _message(body: bytes) -> str:
    """What an error's body says, as the end of a sentence."""
    try:
        text = msgspec.json.decode(body, type=_ErrorBody).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    line = " ".join(text.split())
    return f": {line[:MAX_MESSAGE_CHARACTERS]}"


def _decoded(url: str, response: httpx.Response, kind: type[Struct]) -> Struct:
    return _decoded_json(url, response.content, kind)


def _decoded_json(url: str, body: bytes, kind: type[Struct]) -> Struct:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineProtocolError(f"{url} gave an answer that cannot be used: {error}") from error
