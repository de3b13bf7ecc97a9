"""What an answer tells while it passes: when its text came, how many tokens it had, how it ended."""

from typing import Any, Literal

import msgspec

from serve_table.sse import event_data

Ending = Literal["complete", "empty", "error", "cut"]


class TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Usage as chat, completions (prompt, completion) and responses (input, output) name it."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: TokenDetails | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: TokenDetails | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None

    @property
    def has_text(self) -> bool:
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or self.refusal
            or self.tool_calls
            or self.function_call
        )


class Choice(msgspec.Struct):
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.has_text)


class ResponseState(msgspec.Struct):
    status: str | None = None
    usage: Usage | None = None


class Chunk(msgspec.Struct):
    """One event of a stream, or a whole answer. type, delta and response are those of /v1/responses."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    type: str | None = None
    delta: Any = None
    response: ResponseState | None = None
    status: str | None = None


class AnswerMeter:
    """Watches one answer. Times are of the caller's monotonic clock, None until they happened."""

    def __init__(self) -> None:
        self.first_text_s: float | None = None
        self.last_token_s: float | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.token_events = 0
        self.error_message: str | None = None
        self._usage_output_tokens: int | None = None
        self._done = False
        self._decoder = msgspec.json.Decoder(Chunk)

    @property
    def output_tokens(self) -> int | None:
        """From usage; the number of events that carried text where the engine told no usage."""
        if self._usage_output_tokens is not None:
            return self._usage_output_tokens
        return self.token_events or None

    @property
    def output_tokens_source(self) -> Literal["usage", "events"] | None:
        if self._usage_output_tokens is not None:
            return "usage"
        return "events" if self.token_events else None

    @property
    def ending(self) -> Ending:
        """How the answer ended, asked after its last byte.

        `cut`: without a finish reason and without the closing event. `empty`: no token and no finish reason.
        """
        if self.error_message is not None:
            return "error"
        if self.finish_reason is None and not self._done:
            return "cut"
        return "complete" if self.finish_reason is not None or self.output_tokens else "empty"

    def observe_event(self, event: bytes, now_s: float) -> bool:
        """Take one event of a stream; True where it is the event that has usage and nothing else."""
        if (
            self.first_text_s is not None
            and b'"finish_reason":null' in event
            and b'"usage":' not in event
            and b'"error":' not in event
        ):
            # The bulk of a stream: one more token, and nothing that the row needs.
            self.token_events += 1
            self.last_token_s = now_s
            return False
        data = event_data(event)
        if data is None:
            return False
        if data == b"[DONE]":
            self._done = True
            return False
        try:
            chunk = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return self._observe_chunk(chunk, now_s)

    def observe_body(self, body: bytes) -> None:
        """Take a whole answer that was not streamed."""
        self._done = True
        try:
            chunk = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        self._take_usage(chunk.usage)
        self.finish_reason = next((c.finish_reason for c in chunk.choices or () if c.finish_reason), chunk.status)

    def _observe_chunk(self, chunk: Chunk, now_s: float) -> bool:
        if chunk.error is not None:
            self.error_message = str(chunk.error)
        self._take_usage(chunk.usage)
        if chunk.type is not None:
            self._observe_response_event(chunk, now_s)
        if not chunk.choices:
            return chunk.usage is not None and chunk.error is None and chunk.type is None
        for choice in chunk.choices:
            has_text = choice.has_text
            if has_text and self.first_text_s is None:
                self.first_text_s = now_s
            if has_text:
                self.token_events += 1
            if has_text or choice.finish_reason:
                # A stop token has no text; its event has the reason.
                self.last_token_s = now_s
            self.finish_reason = choice.finish_reason or self.finish_reason
        return False

    def _observe_response_event(self, chunk: Chunk, now_s: float) -> None:
        """/v1/responses: typed events, with usage in the last one."""
        if str(chunk.type).endswith(".delta") and chunk.delta:
            self.first_text_s = now_s if self.first_text_s is None else self.first_text_s
            self.last_token_s = now_s
            self.token_events += 1
        if chunk.response is not None and chunk.type in ("response.completed", "response.incomplete"):
            self._take_usage(chunk.response.usage)
            self.finish_reason = chunk.response.status
        if chunk.type in ("response.failed", "error"):
            self.error_message = str(chunk.type)

    def _take_usage(self, usage: Usage | None) -> None:
        if usage is None:
            return
        details = usage.prompt_tokens_details or usage.input_tokens_details
        prompt_tokens = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
        output_tokens = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
        self.prompt_tokens = prompt_tokens if prompt_tokens is not None else self.prompt_tokens
        self._usage_output_tokens = output_tokens if output_tokens is not None else self._usage_output_tokens
        if details is not None and details.cached_tokens is not None:
            self.cached_tokens = details.cached_tokens
