"""Answers of the OpenAI endpoints as vLLM 0.32 frames them, to the order of the fields, built once a request and cut
once a token.
"""

import time
from typing import Any

import msgspec

from pipelines.emulated.api_error import ApiError, error_event
from pipelines.emulated.api_request import GenerationRequest
from pipelines.emulated.tokens import FIRST_BYTE_ID

DONE = b"data: [DONE]\n\n"
FINGERPRINT = "rutter-emulated"


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

    def __init__(self, request: GenerationRequest, request_id: str, model: str, block_tokens: int) -> None:
        self._request = request
        self._block_tokens = block_tokens
        self._common = {
            "id": request_id,
            "object": "chat.completion.chunk" if request.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self.cached_tokens = 0
        # Every token is one ASCII letter, so all events but the last differ in one byte alone.
        self._head, self._tail = _split_at_text(self._token_event("\x00")) if request.stream else (b"", b"")

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
        # A token that stops an answer has no text.
        text = "" if request.finish_reason == "stop" else chr(request.text[n - 1])
        events.append(self._token_event(text, request.finish_reason, n))
        if request.include_usage:
            details = {name: value for name, value in self._prompt_details().items() if value is not None}
            usage = {**self._usage(n), "prompt_tokens_details": details}
            events.append(_event({**self._common, "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}))
        return b"".join(map(chunk, [*events, DONE]))

    def failed(self, error: ApiError, begun: bool) -> bytes:
        """The framed end of a stream that fails before its first token. begun: the request was in the engine."""
        events = [self._role_event()] if begun and self._request.chat else []
        return b"".join(map(chunk, [*events, error_event(error), DONE]))

    def whole(self, kv_transfer_params: dict[str, Any] | None) -> bytes:
        """The body of an answer that is not streamed."""
        chat = self._request.chat
        usage = {
            **self._usage(len(self._request.text)),
            "prompt_tokens_details": self._prompt_details(),
            "completion_tokens_details": None,
        }
        fields: dict[str, Any] = {
            **self._common,
            **({"object": "chat.completion"} if chat else {}),
            "choices": [self._whole_choice()],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage,
        }
        if chat:
            ids = self._request.prompt.tolist() if self._request.return_token_ids else None
            fields |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
        fields |= {"kv_transfer_params": kv_transfer_params, "ec_transfer_params": None, "metrics": None}
        return msgspec.json.encode(fields)

    def _whole_choice(self) -> dict[str, Any]:
        request = self._request
        letters = request.text[:-1] if request.finish_reason == "stop" else request.text
        text = letters.decode("ascii")
        ids = [byte + FIRST_BYTE_ID for byte in request.text] if request.return_token_ids else None
        end = {"logprobs": None, "finish_reason": request.finish_reason, "stop_reason": request.stop_reason}
        if request.chat:
            names = ("refusal", "annotations", "audio", "function_call", "reasoning")
            message = {"role": "assistant", "content": text, **dict.fromkeys(names)}
            return {"index": 0, "message": message, **end, "token_ids": ids, "routed_experts": None}
        prompt_ids = request.prompt.tolist() if request.return_token_ids else None
        own = {"token_ids": ids, "prompt_logprobs": None, "prompt_token_ids": prompt_ids, "routed_experts": None}
        return {"index": 0, "text": text, **end, **own}

    def _usage(self, completion_tokens: int) -> dict[str, Any]:
        prompt_tokens = len(self._request.prompt)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }

    def _prompt_details(self) -> dict[str, int | None]:
        """Only chat tells what of the prompt was written to the cache: its whole blocks that were not there."""
        created = None
        if self._request.chat:
            whole_tokens = len(self._request.prompt) // self._block_tokens * self._block_tokens
            created = max(whole_tokens - self.cached_tokens, 0)
        return {"cached_tokens": self.cached_tokens, "created_cache_tokens": created, "multimodal_tokens": None}

    def _token(self, n: int) -> bytes:
        if self._request.continuous_usage:
            return chunk(self._token_event(chr(self._request.text[n - 1]), None, n))
        return self._head + self._request.text[n - 1 : n] + self._tail

    def _role_event(self) -> bytes:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._chunk_event(choice, 0, {"prompt_token_ids": None, "prompt_text": None})

    def _token_event(self, text: str, finish_reason: str | None = None, n: int = 0) -> bytes:
        request = self._request
        content: dict[str, Any] = {"delta": {"content": text}} if request.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None or not request.chat:
            choice["stop_reason"] = None if finish_reason is None else request.stop_reason
        choice |= {"token_ids": None} if request.chat else {"prompt_token_ids": None, "token_ids": None}
        # The usage chunk, where there is one, has the fingerprint in the end.
        ends = finish_reason is not None and not request.include_usage
        return self._chunk_event(choice, n, {"system_fingerprint": FINGERPRINT} if ends else {})

    def _chunk_event(self, choice: dict[str, Any], n: int, more: dict[str, Any]) -> bytes:
        fields: dict[str, Any] = {**self._common, "choices": [choice]}
        if self._request.continuous_usage:
            details = {"completion_tokens_details": None} if self._request.chat else {}
            fields["usage"] = {**self._usage(n), **details}
        return _event(fields | more)
