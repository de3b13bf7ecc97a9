"""Requests of the OpenAI endpoints as vLLM takes them: validated, and turned into what the engine runs."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from pipelines.emulated import tokens
from pipelines.emulated.api_bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    KvTransferParams,
    Message,
    StreamOptions,
    TokenizeBody,
    decoded,
)
from pipelines.emulated.api_error import ApiError, invalid, unknown_model, unreadable, unsupported
from pipelines.emulated.tokens import Tokens

DEFAULT_COMPLETION_TOKENS = 16
"""The OpenAI API's default of max_tokens for completions, which vLLM keeps, also for null."""

MAX_SALT_CHARACTERS = 128
FORBIDDEN_IN_SALT = frozenset("@/\\\x00")


@dataclass(frozen=True)
class Limits:
    """What the served model takes."""

    model: str
    max_model_len_tokens: int


class RemoteKv(msgspec.Struct, frozen=True):
    """A complete handle: where the KV of a prompt is held. cached_tokens: found cached by its prefill."""

    host: str
    port: int
    engine_id: str
    request_id: str
    cached_tokens: int | None


@dataclass(frozen=True)
class GenerationRequest:
    """A validated request. text: the whole answer, one byte a token. remote_kv: where its prompt was prefilled.

    hold_kv: it is the prefill leg of a request that decodes elsewhere. late_error: what vLLM finds only once the
    request is in the engine, so that a stream has begun. stop_reason: the token of stop_token_ids that ended it.
    """

    chat: bool
    prompt: Tokens
    prompt_digest: bytes
    text: bytes
    finish_reason: str
    stop_reason: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    cache_salt: str
    return_token_ids: bool
    hold_kv: bool
    remote_kv: RemoteKv | None
    late_error: ApiError | None = field(default=None)


def parse_completion(body: bytes, content_type: str | None, limits: Limits) -> GenerationRequest:
    """The request of /v1/completions; raises ApiError."""
    parsed = decoded(body, content_type, CompletionBody)
    refused = {name: getattr(parsed, name) for name in ("logprobs", "suffix", "prompt_embeds")}
    refused |= {"echo": parsed.echo or None, "best_of": None if parsed.best_of in (None, 1) else parsed.best_of}
    if not parsed.prompt and not isinstance(parsed.prompt, list):
        raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    _require_supported(parsed, refused, limits)
    max_tokens = DEFAULT_COMPLETION_TOKENS if parsed.max_tokens is None else parsed.max_tokens
    return _request(parsed, False, _completion_prompt(parsed.prompt), max_tokens, "max_tokens", limits)


def parse_chat(body: bytes, content_type: str | None, limits: Limits) -> GenerationRequest:
    """The request of /v1/chat/completions; raises ApiError."""
    parsed = decoded(body, content_type, ChatBody)
    refused = {"logprobs": parsed.logprobs or None, "top_logprobs": parsed.top_logprobs or None}
    _require_supported(parsed, refused | {"tools": parsed.tools or None}, limits)
    max_tokens, name = parsed.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, name = parsed.max_tokens, "max_tokens"
    return _request(parsed, True, _chat_prompt(parsed.messages, limits.model), max_tokens, name, limits)


def parse_tokenize(body: bytes, content_type: str | None, limits: Limits) -> Tokens:
    """The prompt of /tokenize as tokens; raises ApiError."""
    parsed = decoded(body, content_type, TokenizeBody)
    if parsed.messages is None and parsed.prompt is None:
        raise unreadable("one of the fields prompt and messages is required", "body.prompt")
    _require_model(parsed.model, limits)
    if parsed.messages is not None:
        return _chat_prompt(parsed.messages, limits.model)
    return tokens.encode(parsed.prompt or "")


def parse_detokenize(body: bytes, content_type: str | None, limits: Limits) -> str:
    """The text of /detokenize's tokens; raises ApiError."""
    parsed = decoded(body, content_type, DetokenizeBody)
    _require_model(parsed.model, limits)
    return tokens.decode(parsed.tokens)


def _require_model(model: str | None, limits: Limits) -> None:
    if model and model != limits.model:
        raise unknown_model(model, limits.model)


def _require_supported(parsed: GenerationBody, refused: dict[str, Any], limits: Limits) -> None:
    # An empty object is let through, as no truth in vLLM's own check.
    if parsed.stream_options not in (None, StreamOptions()) and not parsed.stream:
        raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    _require_salt(parsed.cache_salt)
    _require_model(parsed.model, limits)
    refused |= {
        "n": None if parsed.n in (None, 1) else parsed.n,
        "prompt_logprobs": parsed.prompt_logprobs,
        "stop": parsed.stop or None,
        "response_format": None if parsed.response_format in (None, {"type": "text"}) else parsed.response_format,
        "structured_outputs": parsed.structured_outputs,
        "use_beam_search": parsed.use_beam_search or None,
        "return_token_ids": (parsed.return_token_ids and parsed.stream) or None,
    }
    for name, value in refused.items():
        if value is not None:
            raise unsupported(name)


def _require_salt(salt: str | None) -> None:
    if salt is None:
        return
    if not salt:
        raise invalid("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > MAX_SALT_CHARACTERS or FORBIDDEN_IN_SALT & set(salt):
        raise invalid(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL.",
            "cache_salt",
        )


def _completion_prompt(prompt: str | list[Any] | None) -> Tokens:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        if prompt[0] == []:
            return np.zeros(0, np.int32)
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokens.encode(prompt)
    prompt = prompt or []
    if prompt == []:
        raise invalid("You must pass at least one prompt")
    if not all(isinstance(item, int) for item in prompt):
        raise ApiError(
            400,
            "more than one prompt in a request is not supported by the emulated engine",
            "BadRequestError",
            "prompt",
        )
    if any(not 0 <= item < 2**31 for item in prompt):
        raise unreadable("a token id is out of range", "body.prompt")
    return np.array(prompt, np.int32)


def _chat_prompt(messages: list[Message], model: str) -> Tokens:
    if not messages:
        raise invalid("Cannot apply chat template to an empty conversation. Provide at least one message.")
    return tokens.encode(tokens.chat_text((message.role, _content(message, model)) for message in messages))


def _content(message: Message, model: str) -> str:
    if message.content is None and message.role != "assistant":
        raise unreadable("the content of a message is missing", "body.messages")
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    if any(part.type != "text" for part in message.content):
        raise invalid(f"{model} is not a multimodal model")
    return "\n".join(part.text or "" for part in message.content)


def _request(
    parsed: GenerationBody, chat: bool, prompt: Tokens, max_tokens: int | None, name: str, limits: Limits
) -> GenerationRequest:
    limit_tokens = _output_limit(len(prompt), max_tokens, name, limits)
    if parsed.min_tokens < 0:
        raise invalid(f"min_tokens must be greater than or equal to 0, got {parsed.min_tokens}.")
    if parsed.min_tokens > limit_tokens:
        raise invalid(f"min_tokens must be less than or equal to max_tokens={limit_tokens}, got {parsed.min_tokens}.")
    digest = tokens.prompt_digest(prompt)
    text, finish_reason, stop_reason = _answer(parsed, digest, limit_tokens)
    options = parsed.stream_options or StreamOptions()
    hold_kv, remote_kv = _legs(parsed.kv_transfer_params)
    return GenerationRequest(
        chat=chat,
        prompt=prompt,
        prompt_digest=digest,
        text=text,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        stream=bool(parsed.stream),
        include_usage=options.include_usage is True,
        continuous_usage=options.include_usage is True and options.continuous_usage_stats is True,
        cache_salt=parsed.cache_salt or "",
        return_token_ids=bool(parsed.return_token_ids),
        hold_kv=hold_kv,
        remote_kv=remote_kv,
        late_error=_late_error(prompt),
    )


def _answer(parsed: GenerationBody, digest: bytes, limit_tokens: int) -> tuple[bytes, str, int | None]:
    """Text, finish reason and stop reason of the answer."""
    answer_tokens = max(tokens.answer_length_tokens(digest), parsed.min_tokens)
    ends_itself = answer_tokens <= limit_tokens and not parsed.ignore_eos
    text = tokens.answer_text(digest, answer_tokens if ends_itself else limit_tokens)
    stops = {token - tokens.FIRST_BYTE_ID for token in parsed.stop_token_ids or ()}
    for k, byte in enumerate(text):
        if byte in stops and k + 1 > parsed.min_tokens:
            return text[: k + 1], "stop", byte + tokens.FIRST_BYTE_ID
    return text, "stop" if ends_itself else "length", None


def _late_error(prompt: Tokens) -> ApiError | None:
    if len(prompt) == 0:
        return invalid("The decoder prompt cannot be empty")
    if int(prompt.max()) >= tokens.VOCABULARY_TOKENS:
        return invalid(f"Token id {int(prompt.max())} is out of vocabulary")
    return None


def _output_limit(prompt_tokens: int, max_tokens: int | None, name: str, limits: Limits) -> int:
    """Tokens that the answer may have: what was asked for, as far as the context holds it."""
    context = limits.max_model_len_tokens
    if max_tokens is not None and max_tokens > context:
        raise invalid(
            f"{name}={max_tokens} cannot be greater than max_model_len={context}. Please request fewer output tokens.",
            name,
            max_tokens,
        )
    if prompt_tokens > context:
        qualifier = "at least " if prompt_tokens == context + 1 else ""
        raise invalid(
            f"This model's maximum context length is {context} tokens. However, your prompt contains {qualifier}"
            f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            prompt_tokens,
        )
    left_tokens = context - prompt_tokens
    limit_tokens = left_tokens if max_tokens is None else min(max_tokens, left_tokens)
    if limit_tokens < 1:
        raise invalid(f"max_tokens must be at least 1, got {limit_tokens}.", "max_tokens", limit_tokens)
    return limit_tokens


def _legs(params: KvTransferParams | None) -> tuple[bool, RemoteKv | None]:
    """Whether to hold the KV, and where to pull it from."""
    if params is None:
        return False, None
    if not params.do_remote_prefill:
        return bool(params.do_remote_decode), None
    field_name = "kv_transfer_params"
    if params.do_remote_decode:
        raise invalid("do_remote_prefill and do_remote_decode cannot both be true", field_name)
    host, port = params.remote_host, params.remote_port
    engine_id, request_id = params.remote_engine_id, params.remote_request_id
    if not host or port is None or not engine_id or not request_id:
        names = "remote_host, remote_port, remote_engine_id and remote_request_id"
        raise invalid(f"do_remote_prefill needs {names}", field_name)
    if not 0 < port < 65536:
        raise invalid(f"remote_port {port} is no port", field_name)
    return False, RemoteKv(host, port, engine_id, request_id, params.remote_prefill_cached_tokens)
