"""F31: nothing that a client sends becomes a label, and what fails is no success."""

import asyncio
import gc
import json
import random
import resource
from collections import deque
from pathlib import Path

from raw_http import read_answer
from router_bench import CHAT, Bench, chat_body, router_bench
from stub_engines import Out, StubRequest, decode_engine, invalid, prefill_engine, running

KNOWN = "m"
N_REQUESTS = 10_000


async def knows_its_model(request: StubRequest, out: Out) -> None:
    """As vLLM: 404 for a model that it does not serve."""
    if request.body and request.json["model"] != KNOWN:
        await out.whole(404, invalid("The model does not exist."))
    elif "kv_transfer_params" in request.json:
        await prefill_engine(request, out)
    else:
        await decode_engine(request, out)


def odd_requests(seed: int) -> list[tuple[bytes, int]]:
    """Requests, each with the status that it must have."""
    rng = random.Random(seed)
    made = []
    for number in range(N_REQUESTS):
        word = f"{number}-{rng.getrandbits(64):x}"
        kind = rng.randrange(10)
        path, status, model, method, more = CHAT, 200, KNOWN, "POST", ""
        if kind < 5:
            path, status = rng.choice((f"/{word}.php", f"/v1/{word}", f"{CHAT}/{word}", f"/metrics/{word}")), 404
        elif kind < 7:
            method, status = rng.choice(("PUT", "DELETE", "PATCH", "SEARCH")), 405
        elif kind < 9:
            model, status = word, 404
        more += f"user: {word}\r\nx-session-id: {word}\r\nx-request-id: {word}\r\nuser-agent: {word}\r\n"
        body = json.dumps(chat_body(model=model, user=word)) if path == CHAT and method == "POST" else ""
        head = f"{method} {path}?q={word} HTTP/1.1\r\nhost: {word}\r\n{more}content-length: {len(body)}\r\n\r\n"
        made.append(((head + body).encode(), status))
    return made


async def send_all(port: int, requests: list[tuple[bytes, int]]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for request, status in requests:
        writer.write(request)
        answer = await read_answer(reader)
        assert answer.status == status
        assert b"error" in answer.body or status == 200
    writer.close()


def resident_bytes() -> int:
    """Of this process, without what is garbage already."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def successes(bench: Bench) -> float:
    text = (await bench.admin.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("rutter_requests_total{") and 'status="ok"' in line]
    return sum(float(line.split()[-1]) for line in lines)


async def series(bench: Bench) -> int:
    return sum(not line.startswith("#") for line in (await bench.admin.get("/metrics")).text.splitlines())


async def test_ten_thousand_odd_requests_leave_no_series_behind(tmp_path: Path) -> None:
    async with (
        running(knows_its_model, knows_its_model) as (p, d),
        router_bench(tmp_path, [p], [d]) as bench,
    ):
        for engine in (p, d):
            engine.requests = deque(maxlen=1)  # type: ignore[assignment] - what is measured is the router's memory
        requests = odd_requests(seed=1)
        for request, status in requests[:200]:
            await send_all(bench.port, [(request, status)])
        before, served = await series(bench), await successes(bench)
        used_bytes = resident_bytes()
        rest = requests[200:]
        await asyncio.gather(*(send_all(bench.port, rest[i::4]) for i in range(4)))
        await bench.until_idle()
        assert await series(bench) - before < 20
        assert await successes(bench) - served == sum(status == 200 for _, status in rest)
        assert resident_bytes() - used_bytes < 10e6
        text = (await bench.admin.get("/metrics")).text
        unknown = sum(b"model" in request and status == 404 for request, status in requests)
        assert f'endpoint="{CHAT}",policy="round_robin",status="client_error"}} {unknown}.0' in text
        words = {request.split(b"host: ")[1].split(b"\r")[0].decode() for request, _ in requests}
        assert not [word for word in words if word in text]
