"""Stub engines: small HTTP servers that record what they get and answer as a test says, byte for byte."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StubRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Out:
    """Writes one answer: a chunked stream piece by piece, or a whole one."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    async def head(self, status: int = 200, content_type: str = "text/event-stream", **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}", "transfer-encoding: chunked"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        await self.writer.drain()

    async def piece(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def whole(self, status: int, body: bytes, content_type: str = "application/json", **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + body)
        await self.writer.drain()

    def cut(self) -> None:
        """Reset the connection."""
        self.writer.transport.abort()


Behaviour = Callable[[StubRequest, Out], Awaitable[None]]


@dataclass
class StubEngine:
    """One engine. `behaviour` answers everything but /health; `busy` counts answers under way."""

    behaviour: Behaviour
    requests: list[StubRequest] = field(default_factory=list)
    healthy: bool = True
    busy: int = 0
    left: int = 0
    """Answers whose client left before their end."""
    port: int = 0
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                request = await read_request(reader)
                if request is None:
                    return
                if request.path == "/health":
                    await Out(writer).whole(200 if self.healthy else 503, b"")
                    continue
                self.requests.append(request)
                await self._answer(request, reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _answer(self, request: StubRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer; end at once where the client leaves, as engines abort."""
        self.busy += 1
        answer = asyncio.ensure_future(self.behaviour(request, Out(writer)))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            # A client that has left is seen by whichever comes first: the end of what it sends, or a failed write.
            if not answer.done() or isinstance(answer.exception(), ConnectionError):
                self.left += 1
                raise ConnectionError
            answer.result()
        finally:
            self.busy -= 1
            for future in (answer, gone):
                future.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> StubRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    method, path, _ = first.split(" ")
    return StubRequest(method, path, headers, body)


@asynccontextmanager
async def running(*behaviours: Behaviour) -> AsyncIterator[list[StubEngine]]:
    engines = [StubEngine(behaviour) for behaviour in behaviours]
    for engine in engines:
        await engine.start()
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


# What a healthy engine of vLLM answers.

USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43}


def sse(document: Any) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def chat_event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return sse({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})


def text_event(text: str, finish: str | None = None) -> bytes:
    return sse(
        {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    )


def usage_event(usage: dict[str, Any] = USAGE) -> bytes:
    return sse({"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": usage})


def chat_stream(with_usage: bool, texts: tuple[str, ...] = ("one", " two", " three")) -> list[bytes]:
    """The events of a chat stream as vLLM sends them."""
    events = [chat_event({"role": "assistant", "content": ""})]
    events += [chat_event({"content": text}) for text in texts[:-1]]
    events.append(chat_event({"content": texts[-1]}, "stop"))
    return [*events, *([usage_event()] if with_usage else []), DONE]


def asks_usage(request: StubRequest) -> bool:
    return bool((request.json.get("stream_options") or {}).get("include_usage"))


def invalid(message: str) -> bytes:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return json.dumps({"error": error}).encode()


def refusal(body: dict[str, Any]) -> str | None:
    """Why vLLM would refuse a body; None if it would not."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if body.get("stream_options") is not None and not body.get("stream"):
        return "Stream options can only be defined when `stream=True`."
    if limit is not None and limit < 1:
        return "max_tokens must be at least 1"
    if limit is not None and body.get("min_tokens", 0) > limit:
        return "min_tokens must be less than or equal to max_tokens"
    return None


async def decode_engine(request: StubRequest, out: Out) -> None:
    """A healthy decode engine for chat and completions."""
    body = request.json if request.body else {}
    if not request.path.startswith(("/v1/chat/completions", "/v1/completions")):
        await out.whole(200, json.dumps({"path": request.path}).encode())
        return
    if (why := refusal(body)) is not None:
        await out.whole(400, invalid(why))
        return
    chat = "messages" in body
    if not body.get("stream"):
        message = {"message": {"role": "assistant", "content": "one two three"}} if chat else {"text": "one two three"}
        answer = {"id": "c", "choices": [{"index": 0, **message, "finish_reason": "stop"}], "usage": USAGE}
        await out.whole(200, json.dumps(answer).encode())
        return
    events = chat_stream(asks_usage(request)) if chat else completion_stream(asks_usage(request))
    await out.head()
    for event in events:
        await out.piece(event)
    await out.end()


def completion_stream(with_usage: bool) -> list[bytes]:
    events = [text_event("one"), text_event(" two"), text_event(" three", "stop")]
    return [*events, *([usage_event()] if with_usage else []), DONE]


HANDLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-1",
    "remote_block_ids": [[7, 8, 9]],
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_request_id": "cmpl-1",
    "tp_size": 12345678901234567890,
}


async def prefill_engine(request: StubRequest, out: Out) -> None:
    """A healthy prefill engine: one token, and a handle where it is asked for one."""
    if not request.body:
        await out.whole(404, invalid("no such path"))
        return
    body = request.json
    if (why := refusal(body)) is not None:
        await out.whole(400, invalid(why))
        return
    usage = {**USAGE, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 32}}
    choice = {"index": 0, "message": {"content": "one"}, "finish_reason": "length"}
    asked = body.get("kv_transfer_params") or {}
    handle = HANDLE if asked.get("do_remote_decode") else None
    await out.whole(200, json.dumps({"choices": [choice], "usage": usage, "kv_transfer_params": handle}).encode())
