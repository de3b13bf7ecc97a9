"""Bodies of the OpenAI endpoints as vLLM takes them: typed, validated, and turned into what the engine runs."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pipelines.emulated import tokens
from pipelines.emulated.api_error import ApiError
from pipelines.emulated.tokens import Tokens

DEFAULT_COMPLETION_TOKENS = 16
"""The OpenAI API's default of max_tokens for completions, which vLLM keeps."""


@dataclass(frozen=True)
class Limits:
    """What the served model takes."""

    model: str
    max_model_len_tokens: int


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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


class RemoteKv(msgspec.Struct, frozen=True):
    """A complete handle: where the KV of a prompt is held."""

    host: str
    port: int
    engine_id: str
    request_id: str


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part] | None = None


class _Body(msgspec.Struct, kw_only=True):
    """What both endpoints share. Sampling parameters are let through: answers are greedy whatever they say."""

    model: str | None = None
    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kv_transfer_params: KvTransferParams | None = None
    cache_salt: str | None = None
    n: int | None = None
    # These change the answer's content or shape in ways that no emulated answer has.
    prompt_logprobs: int | None = None
    stop: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    use_beam_search: bool | None = None


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[int | str | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None


class _ChatBody(_Body, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None


class _TokenizeBody(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[_Message] | None = None


class _DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """A validated request. text: the whole answer, one byte a token. remote_kv: where its prompt was prefilled.

    hold_kv: it is the prefill leg of a request that decodes elsewhere.
    """

    chat: bool
    prompt: Tokens
    prompt_digest: bytes
    text: bytes
    finish_reason: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    cache_salt: str
    hold_kv: bool
    remote_kv: RemoteKv | None


def parse_completion(body: bytes, limits: Limits) -> GenerationRequest:
    """The request of /v1/completions; raises ApiError."""
    parsed = _decoded(body, _CompletionBody)
    refused = {name: getattr(parsed, name) for name in ("logprobs", "suffix", "prompt_embeds")}
    refused |= {"echo": parsed.echo or None, "best_of": None if parsed.best_of in (None, 1) else parsed.best_of}
    _require_supported(parsed, refused, limits)
    max_tokens = DEFAULT_COMPLETION_TOKENS if parsed.max_tokens is msgspec.UNSET else parsed.max_tokens
    return _request(parsed, False, _completion_prompt(parsed.prompt), max_tokens, "max_tokens", limits)


def parse_chat(body: bytes, limits: Limits) -> GenerationRequest:
    """The request of /v1/chat/completions; raises ApiError."""
    parsed = _decoded(body, _ChatBody)
    refused = {"logprobs": parsed.logprobs or None, "top_logprobs": parsed.top_logprobs or None}
    _require_supported(parsed, refused | {"tools": parsed.tools or None}, limits)
    max_tokens, field = parsed.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None and parsed.max_tokens is not msgspec.UNSET:
        max_tokens, field = parsed.max_tokens, "max_tokens"
    return _request(parsed, True, _chat_prompt(parsed.messages), max_tokens, field, limits)


def parse_tokenize(body: bytes, limits: Limits) -> Tokens:
    """The prompt of /tokenize as tokens; raises ApiError."""
    parsed = _decoded(body, _TokenizeBody)
    _require_model(parsed.model, limits)
    if parsed.messages is not None:
        return _chat_prompt(parsed.messages)
    if parsed.prompt is None:
        raise ApiError(400, "either prompt or messages must be given", "prompt")
    return tokens.encode(parsed.prompt)


def parse_detokenize(body: bytes, limits: Limits) -> str:
    """The text of /detokenize's tokens; raises ApiError."""
    parsed = _decoded(body, _DetokenizeBody)
    _require_model(parsed.model, limits)
    return tokens.decode(parsed.tokens)


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body cannot be used: {error}") from error


def _require_model(model: str | None, limits: Limits) -> None:
    if model is not None and model != limits.model:
        raise ApiError(404, f"The model `{model}` does not exist.", "model")


def _require_supported(parsed: _Body, refused: dict[str, Any], limits: Limits) -> None:
    _require_model(parsed.model, limits)
    refused |= {
        "n": None if parsed.n in (None, 1) else parsed.n,
        "prompt_logprobs": parsed.prompt_logprobs,
        "stop": parsed.stop or None,
        "response_format": None if parsed.response_format in (None, {"type": "text"}) else parsed.response_format,
        "structured_outputs": parsed.structured_outputs,
        "use_beam_search": parsed.use_beam_search or None,
    }
    for name, value in refused.items():
        if value is not None:
            raise ApiError(400, f"{name} is not supported by the emulated engine", name)
    if parsed.stream_options is not None and not parsed.stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", "stream_options")


def _completion_prompt(prompt: str | list[Any] | None) -> Tokens:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokens.encode(prompt)
    if prompt is None:
        raise ApiError(400, "Either prompt or prompt_embeds must be provided.", "prompt")
    if not all(isinstance(item, int) for item in prompt):
        raise ApiError(400, "more than one prompt in a request is not supported by the emulated engine", "prompt")
    if prompt and (min(prompt) < 0 or max(prompt) >= tokens.VOCABULARY_TOKENS):
        wrong = next(item for item in prompt if not 0 <= item < tokens.VOCABULARY_TOKENS)
        raise ApiError(400, f"Token id {wrong} is out of vocabulary", "prompt")
    return np.array(prompt, np.int32)


def _chat_prompt(messages: list[_Message]) -> Tokens:
    if not messages:
        raise ApiError(400, "messages must not be empty", "messages")
    return tokens.encode(tokens.chat_text((message.role, _content(message)) for message in messages))


def _content(message: _Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type != "text":
            raise ApiError(400, f"content of type {part.type!r}: the emulated model reads text only", "messages")
    return "\n".join(part.text or "" for part in message.content)


def _request(
    parsed: _Body, chat: bool, prompt: Tokens, max_tokens: int | None, field: str, limits: Limits
) -> GenerationRequest:
    limit_tokens = _output_limit(len(prompt), max_tokens, field, limits)
    min_tokens = parsed.min_tokens or 0
    if min_tokens < 0:
        raise ApiError(400, f"min_tokens must be greater than or equal to 0, got {min_tokens}.", "min_tokens")
    if min_tokens > limit_tokens:
        raise ApiError(
            400, f"min_tokens must be less than or equal to max_tokens={limit_tokens}, got {min_tokens}.", "min_tokens"
        )
    if parsed.cache_salt == "":
        raise ApiError(400, "cache_salt must be a non-empty string", "cache_salt")
    digest = tokens.prompt_digest(prompt)
    answer_tokens = max(tokens.answer_length_tokens(digest), min_tokens)
    ends_itself = answer_tokens <= limit_tokens and not parsed.ignore_eos
    options = parsed.stream_options or StreamOptions()
    hold_kv, remote_kv = _legs(parsed.kv_transfer_params)
    return GenerationRequest(
        chat=chat,
        prompt=prompt,
        prompt_digest=digest,
        text=tokens.answer_text(digest, answer_tokens if ends_itself else limit_tokens),
        finish_reason="stop" if ends_itself else "length",
        stream=bool(parsed.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        cache_salt=parsed.cache_salt or "",
        hold_kv=hold_kv,
        remote_kv=remote_kv,
    )


def _output_limit(prompt_tokens: int, max_tokens: int | None, field: str, limits: Limits) -> int:
    """Tokens that the answer may have."""
    context = limits.max_model_len_tokens
    if prompt_tokens == 0:
        raise ApiError(400, "The decoder prompt cannot be empty", "prompt")
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(400, f"{field} must be at least 1, got {max_tokens}.", field)
    asked = 1 if max_tokens is None else max_tokens
    if prompt_tokens + asked > context:
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, you requested {asked} output tokens "
            f"and your prompt contains {prompt_tokens} input tokens, for a total of {prompt_tokens + asked} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens",
        )
    return context - prompt_tokens if max_tokens is None else max_tokens


def _legs(params: KvTransferParams | None) -> tuple[bool, RemoteKv | None]:
    """Whether to hold the KV, and where to pull it from."""
    if params is None:
        return False, None
    if not params.do_remote_prefill:
        return bool(params.do_remote_decode), None
    if params.do_remote_decode:
        raise ApiError(400, "do_remote_prefill and do_remote_decode cannot both be true", "kv_transfer_params")
    host, port = params.remote_host, params.remote_port
    engine_id, request_id = params.remote_engine_id, params.remote_request_id
    if not host or port is None or not engine_id or not request_id:
        raise ApiError(
            400,
            "do_remote_prefill needs remote_host, remote_port, remote_engine_id and remote_request_id",
            "kv_transfer_params",
        )
    if not 0 < port < 65536:
        raise ApiError(400, f"remote_port {port} is no port", "kv_transfer_params")
    return False, RemoteKv(host, port, engine_id, request_id)
