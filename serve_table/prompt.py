"""The prompt of a request, whatever its kind: what the length and the prefix hashes are taken from.

Kinds never meet: token ids [1, 2, 3] and the text "1,2,3" have different hashes.
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from serve_table.endpoints import Endpoint
from serve_table.request_body import Fields

PromptKind = Literal["text", "ids", "messages", "unknown"]
TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]


@dataclass(frozen=True)
class Prompt:
    """One prompt. text: canonical UTF-8 bytes, empty for `ids`. plain: one prompt, and nothing in it but text."""

    kind: PromptKind
    text: bytes
    ids: list[int] | None
    plain: bool


class Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class Message(msgspec.Struct):
    role: str = ""
    content: str | list[msgspec.Raw] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"")
    tool_call_id: str | None = None


_TEXT_PARTS = ("text", "input_text", "output_text")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_prompt(fields: Fields, endpoint: Endpoint) -> Prompt:
    """The prompt of a request body; kind `unknown` where the field is missing or of a shape we do not know."""
    raw = fields.get(endpoint.prompt_field or "")
    if raw is None:
        return Prompt("unknown", b"", None, plain=False)
    try:
        if endpoint.prompt_field == "prompt":
            return _completion_prompt(raw)
        if endpoint.prompt_field == "input" and bytes(raw)[:1] == b'"':
            return Prompt("text", msgspec.json.decode(raw, type=str).encode(), None, plain=True)
        return _chat_prompt(raw, fields)
    except _UNREADABLE:
        return Prompt("unknown", bytes(raw), None, plain=False)


def _completion_prompt(raw: msgspec.Raw) -> Prompt:
    """A text, a list of token ids, or a list of one or several such prompts."""
    value: Any = msgspec.json.decode(raw, type=str | list[msgspec.Raw])
    if isinstance(value, str):
        return Prompt("text", value.encode(), None, plain=True)
    if len(value) == 1 and bytes(value[0])[:1] in (b'"', b"["):
        return _completion_prompt(value[0])
    if value and bytes(value[0])[:1].isdigit():
        return Prompt("ids", b"", msgspec.json.decode(raw, type=TokenIds), plain=True)
    return Prompt("unknown", bytes(raw), None, plain=False)


def _chat_prompt(raw: msgspec.Raw, fields: Fields) -> Prompt:
    """Messages as text, in order, so that a longer conversation starts with the bytes of a shorter one."""
    pieces: list[bytes] = []
    plain = True
    # Chat templates put the tools in front.
    for name in ("chat_template_kwargs", "tools"):
        if name in fields and bytes(fields[name]) != b"null":
            pieces.append(bytes(fields[name]) + b"\n")
    for message in msgspec.json.decode(raw, type=list[Message]):
        pieces.append(message.role.encode() + b"\n")
        if isinstance(message.content, str):
            pieces.append(message.content.encode())
        elif message.content is not None:
            for part in message.content:
                text = _part_text(part)
                plain = plain and text is not None
                # Two pictures behind one text are two prompts; their bytes are not text.
                pieces.append(hashlib.blake2b(part, digest_size=16).digest() if text is None else text)
        pieces.append(bytes(message.tool_calls) + b"\n")
    return Prompt("messages", b"".join(pieces), None, plain)


def _part_text(raw: msgspec.Raw) -> bytes | None:
    """The text of one part of a message; None for pictures, sound and whatever else."""
    part = msgspec.json.decode(raw, type=Part)
    return part.text.encode() if part.text is not None and part.type in _TEXT_PARTS else None
