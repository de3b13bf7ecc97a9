"""HTTP byte by byte, for requests that no client library would send."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RawAnswer:
    """One answer as it came. headers: names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def exchange(port: int, *parts: bytes, limit_s: float = 5.0, pause_s: float = 0.0) -> list[RawAnswer]:
    """Send the parts, with a pause between, and read until the server closes; AssertionError where it does not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        return answers(await asyncio.wait_for(reader.read(-1), limit_s))
    except TimeoutError as error:
        raise AssertionError("the server kept the connection open") from error
    except ConnectionError:
        return []
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader, limit_s: float = 5.0) -> RawAnswer:
    """The next answer on a connection that stays open; its length must be given."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), limit_s)
    status, headers = _head(head[:-4])
    body = await asyncio.wait_for(reader.readexactly(int(headers.get("content-length", "0"))), limit_s)
    return RawAnswer(status, headers, body)


def answers(data: bytes) -> list[RawAnswer]:
    """Every answer in what a server has sent; each must give its length."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        status, headers = _head(head)
        length = int(headers.get("content-length", "0"))
        found.append(RawAnswer(status, headers, rest[:length]))
        data = rest[length:]
    return found


def _head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split(" ")[1]), headers
