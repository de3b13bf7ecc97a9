"""The prefill leg: the request with one output token on a prefill engine, for the handle to its KV blocks."""

from dataclasses import dataclass

import msgspec

from serve_table.answer import Usage
from serve_table.engine_response import EngineTimeouts, Headers
from serve_table.errors import EngineProtocolError
from serve_table.fleet import Engine


@dataclass(frozen=True)
class PrefillAnswer:
    """A prefill engine's whole answer. handle: opaque, for one use; None where the engine gave none."""

    status: int
    headers: Headers
    body: bytes
    handle: msgspec.Raw | None
    cached_tokens: int | None


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: Usage | None = None


async def run_prefill(
    engine: Engine, path: str, headers: Headers, body: bytes, timeouts: EngineTimeouts
) -> PrefillAnswer:
    """One prefill leg. Raises EngineError where the engine is unreachable, late or broken off."""
    response = await engine.client.request("POST", path, headers, body, timeouts)
    try:
        content = await response.body()
    finally:
        response.close()
    if response.status != 200:
        return PrefillAnswer(response.status, response.headers, content, None, None)
    try:
        answer = msgspec.json.decode(content, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineProtocolError(f"{engine.url} answered a prefill with something else than JSON: {error}") from error
    given = answer.kv_transfer_params
    handle = given if bytes(given)[:1] == b"{" else None
    details = answer.usage.prompt_tokens_details if answer.usage is not None else None
    return PrefillAnswer(200, response.headers, content, handle, details.cached_tokens if details else None)
