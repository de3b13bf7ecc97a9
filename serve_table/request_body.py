"""The JSON body of a request: what the router reads from it and the few fields it owns.

A body is a dictionary of undecoded values, so that unknown fields and big integers reach the engines exactly
as the client wrote them.
"""

from typing import Any, TypeVar

import msgspec

from serve_table.endpoints import OUTPUT_LIMIT_FIELDS, Endpoint
from serve_table.errors import RequestError

Fields = dict[str, msgspec.Raw]
T = TypeVar("T")

MAX_LIMIT_TOKENS = 10**9
"""Above any context length; JSON integers have no bound, floats have."""

KV_FIELD = "kv_transfer_params"
CACHE_SALT_FIELD = "cache_salt"
EXTRA_FIELDS = ("vllm_xargs", "extra_args", "extra_body", "sampling_params")
"""Dictionaries whose entries engines read as if they stood at the top, or hand to the KV connector."""

PREFILL_HANDLE_REQUEST = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What asks a prefill engine to keep its blocks for a decode engine."""

# Values that leave a field at one sequence and a prompt that need not be scored.
_HARMLESS = {
    "n": (b"null", b"1"),
    "best_of": (b"null", b"1"),
    "echo": (b"null", b"false"),
    "prompt_logprobs": (b"null",),
    "use_beam_search": (b"null", b"false"),
    "prompt_embeds": (b"null",),
}

# Values with which a prompt is taken as it is.
_USUAL_TOKENS = {
    "add_special_tokens": (b"null", b"true"),
    "truncate_prompt_tokens": (b"null",),
    "prompt_embeds": (b"null",),
}


def parse_fields(content: bytes) -> Fields:
    """The top-level fields, without any KV hand-off parameters of the client; RequestError where it is no object."""
    try:
        fields = msgspec.json.decode(content, type=Fields)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the body is not a JSON object: {error}") from error
    except RecursionError as error:
        raise RequestError(400, "the body is nested too deeply") from error
    # The handle names hosts and memory of the cluster, so only what a prefill engine returned may be sent.
    fields.pop(KV_FIELD, None)
    for name in EXTRA_FIELDS:
        if name in fields:
            fields[name] = _without_kv_field(fields[name])
    return fields


def _without_kv_field(raw: msgspec.Raw) -> msgspec.Raw:
    """The same value without the KV field at any depth; unchanged bytes where it is not an object."""
    try:
        inner = msgspec.json.decode(raw, type=Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw
    cleaned = {name: _without_kv_field(value) for name, value in inner.items() if name != KV_FIELD}
    return msgspec.Raw(msgspec.json.encode(cleaned))


def encode_fields(fields: Fields) -> bytes:
    """The body of these fields."""
    return msgspec.json.encode(fields)


def read(fields: Fields, name: str, kind: type[T]) -> T | None:
    """The value of a field, or None where it is absent or of another type (the engine will complain of that)."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def output_limit_tokens(fields: Fields, endpoint: Endpoint) -> int | None:
    """The request's own output limit; None where it sets none."""
    for name in endpoint.limit_fields:
        limit = read(fields, name, int)
        if limit is not None:
            return min(limit, MAX_LIMIT_TOKENS)
    return endpoint.default_limit_tokens


def expressible_as_handle(fields: Fields) -> bool:
    """Whether one KV handle can express the request: one sequence, and no scores of the prompt's tokens."""
    return all(bytes(fields[name]).strip() in harmless for name, harmless in _HARMLESS.items() if name in fields)


def is_taken_as_it_is(fields: Fields, endpoint: Endpoint) -> bool:
    """Whether engines compute the tokens of the prompt itself: no chat template, nothing cut off or embedded."""
    return endpoint.prompt_field == "prompt" and all(
        bytes(fields[name]).strip() in usual for name, usual in _USUAL_TOKENS.items() if name in fields
    )


def cache_identity(fields: Fields) -> bytes:
    """What keeps equal prompts apart in caches: the model and the salt, however they are spelled."""
    return msgspec.json.encode([read(fields, name, str) for name in ("model", CACHE_SALT_FIELD)])


def needs_usage_injected(fields: Fields, endpoint: Endpoint) -> bool:
    """Whether a stream must be asked for its usage on our account, because the client does not ask for it."""
    if not endpoint.has_choices or read(fields, "stream", bool) is not True:
        return False
    raw = fields.get("stream_options")
    if raw is None or bytes(raw) == b"null":
        return True
    options = read(fields, "stream_options", dict[str, Any])
    # Options that are no object are left for the engine to refuse.
    return options is not None and options.get("include_usage") is not True


def prefill_body(fields: Fields, endpoint: Endpoint) -> bytes:
    """The prefill leg's copy: one output token, not streamed, blocks kept."""
    dropped = (*OUTPUT_LIMIT_FIELDS, "min_tokens", "stream_options", "stream")
    copy: dict[str, Any] = {name: raw for name, raw in fields.items() if name not in dropped}
    for name in endpoint.limit_fields:
        copy[name] = 1
    copy["stream"] = False
    copy[KV_FIELD] = PREFILL_HANDLE_REQUEST
    return msgspec.json.encode(copy)


def decode_body(fields: Fields, handle: msgspec.Raw | None, inject_usage: bool) -> bytes:
    """The decode leg's copy: the client's fields, the handle of this very request, and usage for our accounting."""
    copy: dict[str, Any] = dict(fields)
    if handle is not None:
        copy[KV_FIELD] = handle
    if inject_usage:
        options = read(fields, "stream_options", Fields) or {}
        # Without include_usage this has no effect; with ours it would change the client's events.
        options.pop("continuous_usage_stats", None)
        copy["stream_options"] = {**options, "include_usage": True}
    return msgspec.json.encode(copy)
