"""Bodies of the OpenAI endpoints: their fields and types, read as leniently as vLLM reads them."""

import re
from typing import Any, TypeVar

import msgspec

from pipelines.emulated.api_error import unreadable

JSON_TYPE = "application/json"
Body = TypeVar("Body", bound=msgspec.Struct)

_FIELD = re.compile(r"`\$((?:\.\w+|\[[^\]]*\])*)`")


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | msgspec.UnsetType | None = msgspec.UNSET
    continuous_usage_stats: bool | msgspec.UnsetType | None = msgspec.UNSET


class KvTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """NixlConnector's field of both legs; what this engine does not use is still checked for its type."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_block_ids: list[list[int]] | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int | None = None
    remote_num_tokens: int | None = None
    remote_prefill_cached_tokens: int | None = None


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[Part] | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What both endpoints share. Sampling parameters are let through: answers are greedy whatever they say."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kv_transfer_params: KvTransferParams | None = None
    cache_salt: str | None = None
    n: int | None = None
    return_token_ids: bool | None = None
    # These change the answer's content or shape in ways that no emulated answer has.
    prompt_logprobs: int | None = None
    stop: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    use_beam_search: bool = False


class CompletionBody(GenerationBody, kw_only=True):
    n: int = 1
    prompt: str | list[int | str | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None


class TokenizeBody(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


def decoded(body: bytes, content_type: str | None, kind: type[Body]) -> Body:
    """A body as its fields; raises ApiError."""
    if (content_type or "").lower().partition(";")[0] != JSON_TYPE:
        raise unreadable("Unsupported Media Type: Only 'application/json' is allowed")
    if not body:
        raise unreadable("the body is missing", "body")
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unreadable(str(error), _field(str(error))) from error


def _field(message: str) -> str:
    """The field at fault as vLLM names it, of msgspec's words."""
    found = _FIELD.search(message)
    missing = re.search(r"missing required field `(\w+)`", message)
    return "body" + (found.group(1) if found else "") + (f".{missing.group(1)}" if missing else "")
