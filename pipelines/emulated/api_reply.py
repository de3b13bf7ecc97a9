"""Answers of the OpenAI endpoints as vLLM frames them, built once a request and cut once a token."""

import time
from typing import Any

import msgspec

from pipelines.emulated.api_request import GenerationRequest

DONE = b"data: [DONE]\n\n"


def chunk(event: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def _split_at_text(event: bytes) -> tuple[bytes, bytes]:
    """The framed event before and after its text, which is one NUL here and one letter later."""
    before, after = event.rsplit(b"\\u0000", 1)
    return b"%x\r\n%b" % (len(before) + 1 + len(after), before), after + b"\r\n"


class Reply:
    """The bytes of one request's answer. request_id: as vLLM makes it, with its `cmpl-` or `chatcmpl-`."""

    def __init__(self, request: GenerationRequest, request_id: str, model: str) -> None:
        self._request = request
        self._common = {
            "id": request_id,
            "object": "chat.completion.chunk" if request.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self.cached_tokens = 0
        # Every token is one ASCII letter, so all events but the last differ in one byte alone.
        self._head, self._tail = _split_at_text(self._token_event("\x00")) if request.stream else (b"", b"")

    def usage(self, completion_tokens: int) -> dict[str, Any]:
        prompt_tokens = len(self._request.prompt)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def token(self, n: int) -> bytes:
        """The framed events of token `n` of the stream, from 1; not of the last."""
        request = self._request
        if n == 1 and request.chat:
            return chunk(self._role_event()) + self._token(n)
        return self._token(n)

    def last_token(self, n: int) -> bytes:
        """The framed events of the last token, usage if asked for, and [DONE]."""
        request = self._request
        events = [self._role_event()] if n == 1 and request.chat else []
        events.append(self._token_event(chr(request.text[n - 1]), request.finish_reason, n))
        if request.include_usage:
            events.append(_event({**self._common, "choices": [], "usage": self.usage(n)}))
        return b"".join(map(chunk, [*events, DONE]))

    def whole(self, kv_transfer_params: dict[str, Any] | None) -> bytes:
        """The body of an answer that is not streamed."""
        request = self._request
        text = request.text.decode("ascii")
        choice: dict[str, Any] = {"index": 0}
        if request.chat:
            choice |= {"message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}}
        else:
            choice |= {"text": text}
        choice |= {"logprobs": None, "finish_reason": request.finish_reason, "stop_reason": None}
        kind = {"object": "chat.completion"} if request.chat else {}
        return msgspec.json.encode(
            {
                **self._common,
                **kind,
                "choices": [choice],
                "usage": self.usage(len(request.text)),
                "kv_transfer_params": kv_transfer_params,
            }
        )

    def _token(self, n: int) -> bytes:
        if self._request.continuous_usage:
            return chunk(self._token_event(chr(self._request.text[n - 1]), None, n))
        return self._head + self._request.text[n - 1 : n] + self._tail

    def _role_event(self) -> bytes:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._chunk_event(choice, 0)

    def _token_event(self, text: str, finish_reason: str | None = None, n: int = 0) -> bytes:
        content: dict[str, Any] = {"delta": {"content": text}} if self._request.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None or not self._request.chat:
            choice["stop_reason"] = None
        return self._chunk_event(choice, n)

    def _chunk_event(self, choice: dict[str, Any], n: int) -> bytes:
        fields: dict[str, Any] = {**self._common, "choices": [choice]}
        if self._request.continuous_usage:
            fields["usage"] = self.usage(n)
        elif not self._request.chat:
            fields["usage"] = None
        return _event(fields)
