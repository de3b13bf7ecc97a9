"""An engine that the conformance suite speaks to, over plain HTTP, whatever kind it is."""

import itertools
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
HOLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""NixlConnector's parameters of a prefill leg."""
POLL_S = 0.05

_unique = itertools.count(time.time_ns())


def unique() -> str:
    """A word that no request has had before, good as a cache salt and as a request id."""
    return f"conformance-{next(_unique):x}"


def ids(n_tokens: int, seed: int = 0) -> list[int]:
    """Token ids that every vocabulary has, with no special one among them."""
    return [32 + (k * k + 7 * k * seed + seed) % 90 for k in range(n_tokens)]


@dataclass
class Engine:
    """kind: of its cluster. block_tokens: found out from a prefill leg."""

    url: str
    role: str
    kind: str
    model: str
    client: httpx.Client
    max_model_len: int = 0
    block_tokens: int = 0
    _baselines: dict[str, float] = field(default_factory=dict)

    def completion(self, n_prompt: int = 40, **fields: Any) -> dict[str, Any]:
        """The body of a greedy completion that shares no cached prefix with any other."""
        body = {"model": self.model, "prompt": ids(n_prompt), "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        return {**body, "cache_salt": unique(), **fields}

    def chat(self, **fields: Any) -> dict[str, Any]:
        """The same for chat."""
        messages = [{"role": "user", "content": "Where should this request prefill, and why there?"}]
        body = {"model": self.model, "messages": messages, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        return {**body, "cache_salt": unique(), **fields}

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(self.url + path, json=body, headers=names)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(self.url + path)

    def answer(self, path: str, body: Any, **headers: str) -> Any:
        """The document of an answer with status 200."""
        response = self.post(path, body, **headers)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, body: dict[str, Any]) -> list[bytes]:
        """The events of a stream, each with its empty line, the last one [DONE]."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        events = response.content.split(b"\n\n")
        assert events.pop() == b"", "the stream ends within an event"
        return [event + b"\n\n" for event in events]

    def chunks(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The documents of a stream's events but [DONE]."""
        *events, done = self.stream(path, body)
        assert done == DONE
        return [json.loads(event.removeprefix(b"data: ")) for event in events]

    def prefill(self, body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> dict[str, Any]:
        """The handle of a prefill leg."""
        answer = self.answer(path, {**body, "max_tokens": 1, "kv_transfer_params": HOLD}, **headers)
        handle: dict[str, Any] = answer["kv_transfer_params"]
        return handle

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that have these labels."""
        values = []
        for line in self.get("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(f'{key}="{text}"' in sample for key, text in labels.items()):
                values.append(float(value))
        assert values, f"{self.url} publishes no {name} {labels}"
        return sum(values)

    def until(self, name: str, value: float, limit_s: float = 20.0, **labels: str) -> None:
        """Wait until a metric has a value. An engine may tell of a change only with its next step, so it gets one."""
        deadline_s = time.monotonic() + limit_s
        while abs(self.metric(name, **labels) - value) > 1e-9:
            seen = self.metric(name, **labels)
            assert time.monotonic() < deadline_s, f"{self.url}: {name} is {seen}, not {value}, after {limit_s} s"
            self.step()
            time.sleep(POLL_S)

    def step(self) -> None:
        """Let the engine take a step."""
        self.answer(COMPLETIONS, self.completion(1, max_tokens=1))

    def until_idle(self) -> None:
        """Nothing runs, nothing waits, and no block is in use: everything was given back."""
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            self.until(name, 0.0)

    @contextmanager
    def leaving_client(self, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
        """A client that sends a request and leaves at the end of the block, whatever has come."""
        address = urlsplit(self.url)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        connection = socket.create_connection((address.hostname, address.port), timeout=20.0)
        try:
            connection.sendall(head.encode() + b"\r\n\r\n" + content)
            yield connection
        finally:
            connection.close()


def read_events(connection: socket.socket, n_events: int) -> None:
    """Read until this many events of a stream have come."""
    data = b""
    while data.count(b"data: ") < n_events:
        received = connection.recv(65536)
        assert received, f"the engine broke off: {data!r}"
        data += received


@dataclass
class Cluster:
    """A prefill and a decode engine of the cluster under test."""

    prefill: Engine
    decode: Engine

    @property
    def kind(self) -> str:
        return self.decode.kind
