"""The endpoint table of the public port: what a path is, which fields limit its output, and where its usage stands.

A path that is not in the table is answered with 404 and never reaches an engine.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["generate", "pass", "health", "ready"]
PromptField = Literal["messages", "prompt", "input"]

OUTPUT_LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Every spelling of an output limit that some endpoint knows."""


@dataclass(frozen=True)
class Endpoint:
    """One path.

    limit_fields: its spellings of the output limit, the one that wins first. default_limit_tokens: the limit
    of a request that names none; None where only the context limits it. has_choices: answers are made of
    `choices`, with `usage` at the top and `stream_options` to ask for it. remote_allowed: engines accept a KV
    handle here.
    """

    path: str
    methods: tuple[str, ...]
    kind: Kind
    prompt_field: PromptField | None = None
    limit_fields: tuple[str, ...] = ()
    default_limit_tokens: int | None = None
    has_choices: bool = True
    remote_allowed: bool = True


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", ("POST",), "generate", "messages", ("max_completion_tokens", "max_tokens")),
        # 16 is the OpenAI API's default, which vLLM keeps.
        Endpoint("/v1/completions", ("POST",), "generate", "prompt", ("max_tokens",), default_limit_tokens=16),
        Endpoint(
            "/v1/responses",
            ("POST",),
            "generate",
            "input",
            ("max_output_tokens",),
            has_choices=False,
            remote_allowed=False,
        ),
        Endpoint("/v1/models", ("GET",), "pass"),
        Endpoint("/tokenize", ("POST",), "pass"),
        Endpoint("/detokenize", ("POST",), "pass"),
        Endpoint("/version", ("GET",), "pass"),
        Endpoint("/health", ("GET", "HEAD"), "health"),
        Endpoint("/ready", ("GET", "HEAD"), "ready"),
    )
}


def find_endpoint(path: str) -> Endpoint | None:
    """The endpoint of a path; a trailing slash is ignored."""
    return ENDPOINTS.get(path.rstrip("/") or "/")
