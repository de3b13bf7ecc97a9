"""What single requests end with, as vLLM 0.32 answers them: the specification, in one table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine_under_test import CHAT, COMPLETIONS, Engine

MAX = "{max_model_len}"
"""In a message: stands for the model's context length."""
VALIDATION = "1 validation error:\n  "


@dataclass(frozen=True)
class Outcome:
    """Status, and for errors message, type and field. message: exact, or with a trailing ... its beginning; None:
    not compared.
    """

    status: int
    message: str | None = None
    kind: str | None = None
    param: str | None = None


@dataclass(frozen=True)
class Case:
    """One request. body: made for an engine; bytes are sent as they are."""

    name: str
    path: str
    body: Callable[[Engine], dict[str, Any] | bytes]
    outcome: Outcome


def ok() -> Outcome:
    return Outcome(200)


def bad_value(message: str, param: str | None = None) -> Outcome:
    """A value that is refused once the body was read."""
    return Outcome(400, message, "BadRequestError", param)


def bad_form(param: str | None, message: str = VALIDATION + "...") -> Outcome:
    """A body of the wrong form."""
    return Outcome(400, message, "Bad Request", param)


def completion(**fields: Any) -> Callable[[Engine], dict[str, Any]]:
    return lambda engine: engine.completion(**fields)


def chat(**fields: Any) -> Callable[[Engine], dict[str, Any]]:
    return lambda engine: engine.chat(**fields)


def without(name: str, make: Callable[[Engine], dict[str, Any]]) -> Callable[[Engine], dict[str, Any]]:
    return lambda engine: {key: value for key, value in make(engine).items() if key != name}


STREAM_OPTIONS = bad_value(
    "Stream options can only be defined when `stream=True`. (parameter=stream_options)", "stream_options"
)
NO_PROMPT = bad_value("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt")

CASES = (
    # Output limits.
    Case(
        "max_tokens of zero",
        COMPLETIONS,
        completion(max_tokens=0),
        bad_value("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "max_tokens"),
    ),
    Case(
        "negative max_tokens",
        COMPLETIONS,
        completion(max_tokens=-5),
        bad_value("max_tokens must be at least 1, got -5. (parameter=max_tokens, value=-5)", "max_tokens"),
    ),
    Case(
        "max_completion_tokens of zero",
        CHAT,
        chat(max_completion_tokens=0),
        bad_value("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "max_tokens"),
    ),
    Case(
        "max_tokens beyond the context",
        COMPLETIONS,
        completion(max_tokens=10_000_000),
        bad_value(
            f"max_tokens=10000000 cannot be greater than max_model_len={MAX}. Please request fewer output tokens. "
            "(parameter=max_tokens, value=10000000)",
            "max_tokens",
        ),
    ),
    Case(
        "max_completion_tokens beyond the context",
        CHAT,
        chat(max_completion_tokens=10_000_000),
        bad_value(
            f"max_completion_tokens=10000000 cannot be greater than max_model_len={MAX}. Please request fewer output "
            "tokens. (parameter=max_completion_tokens, value=10000000)",
            "max_completion_tokens",
        ),
    ),
    Case(
        "min_tokens above max_tokens",
        COMPLETIONS,
        completion(min_tokens=7),
        bad_value("min_tokens must be less than or equal to max_tokens=6, got 7."),
    ),
    Case(
        "negative min_tokens",
        COMPLETIONS,
        completion(min_tokens=-1),
        bad_value("min_tokens must be greater than or equal to 0, got -1."),
    ),
    Case("min_tokens equal to max_tokens", COMPLETIONS, completion(min_tokens=6), ok()),
    Case("null max_tokens", COMPLETIONS, completion(max_tokens=None), ok()),
    Case("null min_tokens", COMPLETIONS, completion(min_tokens=None), bad_form("body.min_tokens")),
    # Prompts.
    Case("no prompt", COMPLETIONS, without("prompt", completion()), NO_PROMPT),
    Case("empty prompt", COMPLETIONS, completion(prompt=""), NO_PROMPT),
    Case("text prompt", COMPLETIONS, completion(prompt="Where should this prefill?"), ok()),
    Case("prompt in a list", COMPLETIONS, completion(prompt=["Where should this prefill?"]), ok()),
    Case("token ids in a list", COMPLETIONS, completion(prompt=[[40, 41, 42]]), ok()),
    Case("prompt of a wrong type", COMPLETIONS, completion(prompt={"text": "x"}), Outcome(400, kind="Bad Request")),
    Case(
        "token id out of the vocabulary",
        COMPLETIONS,
        completion(prompt=[40, 2_000_000]),
        bad_value("Token id 2000000 is out of vocabulary"),
    ),
    Case("negative token id", COMPLETIONS, completion(prompt=[40, -1]), Outcome(400, kind="Bad Request")),
    Case(
        "prompt longer than the context",
        COMPLETIONS,
        lambda engine: engine.completion(prompt=[40] * (engine.max_model_len + 2)),
        bad_value(
            f"This model's maximum context length is {MAX} tokens. However, your prompt contains ...", "input_tokens"
        ),
    ),
    Case(
        "prompt one longer than the context",
        COMPLETIONS,
        lambda engine: engine.completion(prompt=[40] * (engine.max_model_len + 1)),
        bad_value(
            f"This model's maximum context length is {MAX} tokens. However, your prompt contains at least ...",
            "input_tokens",
        ),
    ),
    Case(
        "prompt that fills the context",
        COMPLETIONS,
        lambda engine: engine.completion(prompt=[40] * engine.max_model_len),
        bad_value("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "max_tokens"),
    ),
    Case("no ids", COMPLETIONS, completion(prompt=[]), bad_value("You must pass at least one prompt")),
    Case("no ids in a list", COMPLETIONS, completion(prompt=[[]]), bad_value("The decoder prompt cannot be empty")),
    # Messages.
    Case("no messages", CHAT, without("messages", chat()), bad_form("body.messages")),
    Case(
        "an empty conversation",
        CHAT,
        chat(messages=[]),
        bad_value("Cannot apply chat template to an empty conversation. Provide at least one message."),
    ),
    Case("content in parts", CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}]), ok()),
    Case("no content", CHAT, chat(messages=[{"role": "user", "content": None}]), Outcome(400, kind="Bad Request")),
    Case("an unknown role", CHAT, chat(messages=[{"role": "weird", "content": "a"}]), ok()),
    # Models.
    Case(
        "unknown model",
        COMPLETIONS,
        completion(model="no-such-model"),
        Outcome(404, "The model `no-such-model` does not exist. Valid aliases: {model}.", "NotFoundError", "model"),
    ),
    Case(
        "unknown model in chat",
        CHAT,
        chat(model="no-such-model"),
        Outcome(404, "The model `no-such-model` does not exist. Valid aliases: {model}.", "NotFoundError", "model"),
    ),
    Case("no model", COMPLETIONS, without("model", completion()), ok()),
    Case("empty model", COMPLETIONS, completion(model=""), ok()),
    # Forms.
    Case("malformed JSON", COMPLETIONS, lambda _: b'{"prompt": "x", ', Outcome(400, VALIDATION + "...", "Bad Request")),
    Case("no object", COMPLETIONS, lambda _: b"[1, 2]", bad_form("body")),
    Case("max_tokens that is no number", COMPLETIONS, completion(max_tokens="many"), bad_form("body.max_tokens")),
    Case("max_tokens that is a list", COMPLETIONS, completion(max_tokens=[6]), bad_form("body.max_tokens")),
    Case("max_tokens with a fraction", COMPLETIONS, completion(max_tokens=6.5), bad_form("body.max_tokens")),
    Case("max_tokens as a text of digits", COMPLETIONS, completion(max_tokens="6"), ok()),
    Case("max_tokens with a zero fraction", COMPLETIONS, completion(max_tokens=6.0), ok()),
    Case("no body", COMPLETIONS, lambda _: b"", bad_form("body")),
    Case("null n", COMPLETIONS, completion(n=None), bad_form("body.n")),
    Case("null n in chat", CHAT, chat(n=None), ok()),
    Case("stream that is no truth", COMPLETIONS, completion(stream="perhaps"), bad_form("body.stream")),
    Case("unknown field", COMPLETIONS, completion(no_such_field=1), ok()),
    # Streams.
    Case(
        "stream options without stream", COMPLETIONS, completion(stream_options={"include_usage": True}), STREAM_OPTIONS
    ),
    Case("empty stream options without stream", COMPLETIONS, completion(stream_options={}), ok()),
    Case("stream options without stream in chat", CHAT, chat(stream_options={"include_usage": True}), STREAM_OPTIONS),
    Case(
        "a refusal of a stream has a status",
        COMPLETIONS,
        completion(max_tokens=0, stream=True),
        bad_value("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "max_tokens"),
    ),
    # Cache salts.
    Case(
        "empty cache_salt",
        COMPLETIONS,
        completion(cache_salt=""),
        bad_value(
            "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)", "cache_salt"
        ),
    ),
    Case(
        "cache_salt with a slash",
        COMPLETIONS,
        completion(cache_salt="a/b"),
        Outcome(400, None, "BadRequestError", "cache_salt"),
    ),
    # Hand-offs.
    Case(
        "kv_transfer_params that are no object",
        COMPLETIONS,
        completion(kv_transfer_params="handle"),
        bad_form("body.kv_transfer_params"),
    ),
    Case("empty kv_transfer_params", COMPLETIONS, completion(kv_transfer_params={}), ok()),
    # Tokens.
    Case(
        "unknown model to tokenize",
        "/tokenize",
        lambda _: {"model": "no-such-model", "prompt": "x"},
        Outcome(404, "The model `no-such-model` does not exist. Valid aliases: {model}.", "NotFoundError", "model"),
    ),
    Case("nothing to tokenize", "/tokenize", lambda _: {}, Outcome(400, kind="Bad Request")),
    Case("nothing to detokenize", "/detokenize", lambda _: {}, bad_form("body.tokens")),
    # What vLLM does and emulated engines refuse: see differences.py.
    Case("logprobs", COMPLETIONS, completion(logprobs=1), ok()),
    Case("logprobs in chat", CHAT, chat(logprobs=True, top_logprobs=1), ok()),
    Case("echo", COMPLETIONS, completion(echo=True), ok()),
    Case("several answers", COMPLETIONS, completion(n=2, temperature=1.0), ok()),
    Case("several prompts", COMPLETIONS, completion(prompt=["a", "b"]), ok()),
    Case("stop text", COMPLETIONS, completion(stop=["no such text"]), ok()),
    # What vLLM refuses and emulated engines let through: see differences.py.
    Case(
        "temperature out of range",
        COMPLETIONS,
        completion(temperature=3.0),
        Outcome(400, None, "BadRequestError", "temperature"),
    ),
)
