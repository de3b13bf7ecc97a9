"""The relay: an engine's answer to the client, byte for byte, while a meter watches a copy."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from serve_table.answer import AnswerMeter
from serve_table.endpoints import Endpoint
from serve_table.engine_response import EngineResponse, Headers
from serve_table.errors import EngineError, EngineTimeoutError, RequestError
from serve_table.harm import RENEWED_AFTER_TOKENS
from serve_table.openai_error import error_body, error_event
from serve_table.sse import EventSplitter

Message = MutableMapping[str, Any]
Scope = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

# RFC 9110, 7.6.1, and what the router sets itself.
_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"x-request-id",
    )
)
# An engine must not compress what the meter reads, nor wait for a go-ahead for a body that is complete.
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"accept-encoding", b"expect"}
OWN_HEADER_PREFIX = b"x-rutter-"
JSON_HEADER = (b"content-type", b"application/json")


def path_and_query(endpoint: Endpoint, scope: Scope) -> str:
    """What an engine is asked for: the endpoint's own path and the client's query."""
    query: str = scope["query_string"].decode("latin-1")
    return f"{endpoint.path}?{query}" if query else endpoint.path


def forwarded_headers(headers: Headers, request_id: str, with_authorization: bool) -> Headers:
    """A client's headers as an engine gets them, with the router's own request id."""
    dropped = _listed_in_connection(headers) | _NOT_FORWARDED
    if not with_authorization:
        dropped = dropped | {b"authorization"}
    kept = [(name, value) for name, value in headers if name not in dropped and not name.startswith(OWN_HEADER_PREFIX)]
    kept.append((b"x-request-id", request_id.encode()))
    return kept


def returned_headers(headers: Headers, client_id: bytes) -> Headers:
    """An engine's headers as the client gets them, with the client's own request id."""
    listed = _listed_in_connection(headers)
    kept = [(name, value) for name, value in headers if name not in _HOP_BY_HOP and name not in listed]
    kept.append((b"x-request-id", client_id))
    return kept


def _listed_in_connection(headers: Headers) -> set[bytes]:
    """Headers that the `Connection` header declares to be of this hop only."""
    lists = [value for name, value in headers if name == b"connection"]
    return {name.strip().lower() for value in lists for name in value.split(b",")}


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """A complete response."""
    framed = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": framed})
    await send({"type": "http.response.body", "body": body})


async def send_refusal(send: Send, error: RequestError, headers: Headers | None = None) -> None:
    """The router's own error in the shape of the OpenAI API. headers: more than those that the error brings."""
    sent = [JSON_HEADER, *error.headers, *(headers or [])]
    if error.status == 413:
        # What is left of the body need not be read.
        sent.append((b"connection", b"close"))
    await send_whole(send, error.status, sent, error_body(error.status, str(error)))


class StreamRelay:
    """Relays one stream of events.

    Without `remove_usage` every chunk is passed on as it came. With it only whole events are, and the one event
    that holds nothing but the usage we asked for on our own account is left out. on_tokens: told how many tokens have
    come, at the first and then now and again.
    """

    def __init__(
        self, meter: AnswerMeter, remove_usage: bool, clock: Callable[[], float], on_tokens: Callable[[int], None]
    ) -> None:
        self.meter = meter
        self.failure: EngineError | None = None
        self._remove_usage = remove_usage
        self._clock = clock
        self._on_tokens = on_tokens
        self._next_told = 1
        self._splitter = EventSplitter()

    async def run(self, response: EngineResponse, first: bytes, send: Send) -> None:
        """Relay until the end. An engine that breaks off is told to the client by one error event in the stream
        and kept in `failure`."""
        chunk = first
        try:
            while chunk:
                out = self._observed(chunk)
                if out:
                    await send({"type": "http.response.body", "body": out, "more_body": True})
                chunk = await response.chunk()
            self._observe_tail()
            if self.meter.ending == "cut":
                raise EngineError("the engine ended its answer without a finish reason")
            rest = self._splitter.tail if self._remove_usage else b""
        except EngineError as error:
            self.failure = error
            status = 504 if isinstance(error, EngineTimeoutError) else 502
            # Half an event that has been passed on must not swallow ours.
            begun = bool(self._splitter.tail) and not self._remove_usage
            rest = (b"\n\n" if begun else b"") + error_event(status, "the engine broke off its answer")
        await send({"type": "http.response.body", "body": rest})

    def _observed(self, chunk: bytes) -> bytes:
        """What of this chunk, or of those before, is to be sent now."""
        now_s = self._clock()
        meter = self.meter
        had_tail = bool(self._splitter.tail)
        events = self._splitter.feed(chunk)
        usage_only = [event for event in events if meter.observe_event(event, now_s)]
        if meter.token_events >= self._next_told:
            self._next_told = meter.token_events + RENEWED_AFTER_TOKENS
            self._on_tokens(meter.token_events)
        if not self._remove_usage or not (usage_only or had_tail or self._splitter.tail):
            return chunk
        if usage_only:
            events = [event for event in events if event not in usage_only]
        return b"".join(events)

    def _observe_tail(self) -> None:
        """A last event that lacks its empty line, as servers send that close right after `data: [DONE]`."""
        tail = self._splitter.tail
        if tail and self.meter.observe_event(tail.rstrip(b"\r\n") + b"\n\n", self._clock()) and self._remove_usage:
            self._splitter.tail = b""
