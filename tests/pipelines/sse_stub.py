"""A server for tests of the load generator: records requests, answers each as `answer` says."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass

SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: dict
    at_s: float


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(fields):
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


async def stream_tokens(writer, body, gap_s=0.001):
    """As vLLM streams a completion: a token an event, usage, [DONE]."""
    n_tokens = body["max_tokens"]
    writer.write(SSE_HEAD)
    for _ in range(n_tokens):
        await asyncio.sleep(gap_s)
        choice = {"index": 0, "text": " w", "finish_reason": None}
        writer.write(chunk(event({"id": "c", "choices": [choice], "usage": None})))
    usage = {"prompt_tokens": len(body.get("prompt", "")), "completion_tokens": n_tokens}
    writer.write(chunk(event({"id": "c", "choices": [], "usage": usage})))
    writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


@asynccontextmanager
async def stub_server(answer=stream_tokens):
    """Yields the URL and the list of requests seen. answer(writer, body) writes one whole answer."""
    seen = []

    async def serve(reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                request_line, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                path = request_line.split()[1]
                seen.append(Seen(path, headers, body, asyncio.get_running_loop().time()))
                await answer(writer, body)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**22)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}", seen
    finally:
        server.close()
