"""Requests held in the router: overtaken, released, left, journaled."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_bench import COMPLETIONS, Bench, router_bench
from stub_engines import Out, StubEngine, StubRequest, decode_engine, prefill_engine, running
from test_replay import agrees

from serve_table.admission import Arrival, Hints, admit
from serve_table.endpoints import find_endpoint
from serve_table.health import ProbePolicy
from serve_table.policy import policy
from serve_table.record import Record
from serve_table.request_body import Fields, parse_fields

REMOTE_ONLY = {"local_weight": 50.0, "harm_weight": 0.0}
HOLDS = policy("price", {**REMOTE_ONLY, "hold_s": 0.01, "late_hold": 3.0, "deadline_share": 1.0})
LONG = 2000
"""Tokens whose backlog is longer than hold_s until their prefill returns; of fewer than some 1,800 it is short enough
before."""
SLOW = 20.0
"""Dilation: what the test does in between takes hardly any time of the engines."""
TIGHT = {"x-rutter-slo-class": "tight"}


class Gate:
    """A prefill engine that answers one request each time it is told to."""

    def __init__(self) -> None:
        self.permits = asyncio.Semaphore(0)
        self.status = 200

    async def __call__(self, request: StubRequest, out: Out) -> None:
        await self.permits.acquire()
        if self.status == 200:
            await prefill_engine(request, out)
        else:
            await out.whole(self.status, b"{}")

    def open(self, times: int = 1) -> None:
        for _ in range(times):
            self.permits.release()


class GatedBench:
    """A router in front of one gated prefill engine."""

    def __init__(self, bench: Bench, gate: Gate, prefill: StubEngine) -> None:
        self.bench = bench
        self.gate = gate
        self.prefill = prefill
        self.sent: list[asyncio.Task[httpx.Response]] = []

    @property
    def held(self) -> int:
        holding = self.bench.context.holding
        return 0 if holding is None else len(holding)

    async def send(self, tokens: int, **headers: str) -> None:
        """A prompt of so many tokens, like no other; returns once the router has it."""
        number = len(self.sent)
        body = {"model": "m", "prompt": [number] * tokens, "stream": True}
        call = self.bench.client.post(
            COMPLETIONS, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        self.sent.append(asyncio.create_task(call))
        await until(lambda: self.bench.context.rotation > number)

    async def answers(self) -> list[int]:
        return [answer.status_code for answer in await asyncio.gather(*self.sent)]

    def order(self) -> list[int]:
        """The numbers of the requests, as the prefill engine got them."""
        return [request.json["prompt"][0] for request in self.prefill.requests]

    async def metric(self, name: str) -> float:
        text = (await self.bench.admin.get("/metrics")).text
        return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} ")), 0.0)


async def until(condition: Any) -> None:
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to that")


@asynccontextmanager
async def gated_bench(tmp_path: Path, chosen: Any = HOLDS, **config: Any) -> AsyncIterator[GatedBench]:
    config.setdefault("dilation", SLOW)
    gate = Gate()
    async with (
        running(gate, decode_engine, decode_engine) as (p, d, e),
        router_bench(tmp_path, [p], [d, e], chosen, **config) as bench,
    ):
        yield GatedBench(bench, gate, p)


async def test_the_earlier_deadline_goes_first_and_a_later_one_is_overtaken(tmp_path: Path) -> None:
    async with gated_bench(tmp_path) as gated:
        await gated.send(LONG)
        await gated.send(LONG)
        await gated.send(LONG, **TIGHT)
        await gated.send(600)
        await until(lambda: len(gated.prefill.requests) == 1)
        assert gated.held == await gated.metric("rutter_held_requests") == 3
        for n in range(4):
            await until(lambda n=n: len(gated.prefill.requests) > n)
            gated.gate.open()
        assert await gated.answers() == [200] * 4
        assert gated.order() == [0, 3, 2, 1]
        rows = await gated.bench.rows(4)
        assert gated.bench.idle()
        assert await gated.metric('rutter_held_ended_total{reason="free"}') == 3
        assert await gated.metric("rutter_held_seconds_count") == 3
    assert [agrees(row, HOLDS) for row in rows] == [True] * 4
    first, *held = sorted(rows, key=lambda row: row.rotation)
    assert (first.waited_s, first.held_ahead_tokens) == (None, 0.0)
    for row in held:
        assert row.waited_s is not None and row.ttft_s is not None
        assert 0.0 < row.waited_s < row.ttft_s < row.e2e_s
        assert row.executed == "remote"


async def test_the_first_decision_counts_what_is_held_before_it(tmp_path: Path) -> None:
    seen: list[float] = []
    decide = Arrival.decide

    def noted(arrival: Arrival, waited_s: float, held_ahead_tokens: float) -> None:
        seen.append(held_ahead_tokens)
        decide(arrival, waited_s, held_ahead_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arrival, "decide", noted)
        async with gated_bench(tmp_path) as gated:
            for tokens in (LONG, LONG, 600, LONG):
                await gated.send(tokens)
            await gated.send(LONG, **TIGHT)
            gated.gate.open(5)
            await gated.answers()
    assert seen[:5] == [0.0, 0.0, 0.0, LONG + 600.0, 600.0]


async def test_without_hold_s_nothing_is_held(tmp_path: Path) -> None:
    for name, chosen in (("price", policy("price", REMOTE_ONLY)), ("other", "round_robin")):
        async with gated_bench(tmp_path / name, chosen) as gated:
            assert gated.bench.context.holding is None
            for _ in range(3):
                await gated.send(LONG)
            await until(lambda gated=gated: len(gated.prefill.requests) == 3)
            gated.gate.open(3)
            assert await gated.answers() == [200] * 3
            rows = await gated.bench.rows(3)
            assert await gated.metric("rutter_held_seconds_count") == 0
        assert {(row.waited_s, row.held_ahead_tokens) for row in rows} == {(None, 0.0)}


async def test_what_prefills_locally_is_not_held(tmp_path: Path) -> None:
    async with gated_bench(tmp_path) as gated:
        await gated.send(LONG)
        await gated.send(LONG)
        body = {"model": "m", "prompt": [7] * LONG, "n": 2}
        assert (await gated.bench.client.post(COMPLETIONS, json=body)).status_code == 200
        assert gated.held == 1
        gated.gate.open(2)
        await gated.answers()
        rows = await gated.bench.rows(3)
    assert [(row.executed, row.waited_s) for row in rows if not row.remote_allowed] == [("local", None)]


async def test_a_client_that_leaves_is_held_no_longer(tmp_path: Path) -> None:
    async with gated_bench(tmp_path) as gated:
        await gated.send(LONG)
        _, writer = await asyncio.open_connection("127.0.0.1", gated.bench.port)
        body = json.dumps({"model": "m", "prompt": [5] * LONG}).encode()
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (COMPLETIONS.encode(), len(body)))
        writer.write(body)
        await until(lambda: gated.held == 1)
        writer.close()
        row = await gated.bench.row()
        assert gated.held == await gated.metric("rutter_held_requests") == 0
        assert await gated.metric('rutter_held_ended_total{reason="cancelled"}') == 1
        assert [engine.requests for engine in gated.bench.context.fleet.engines] == [1, 1, 0]
        gated.gate.open()
        assert await gated.answers() == [200]
        await gated.bench.until_idle()
        assert gated.order() == [0]
    assert (row.status, row.action, row.executed, row.attempts) == ("aborted", "remote", None, 0)
    assert (row.waited_s, row.slo_met) == (0.0, None)
    assert agrees(row, HOLDS)


async def test_who_leaves_just_after_its_turn_has_come_leaves_nothing_behind(tmp_path: Path) -> None:
    def coming(prompt: list[int]) -> Any:
        fields: Fields = parse_fields(json.dumps({"model": "m", "prompt": prompt}).encode())
        record = Record(endpoint, arrival_s=0.0, client_id=None)
        return admit(gated.bench.context, endpoint, fields, Hints(0, None), [], record)

    endpoint = find_endpoint(COMPLETIONS)
    assert endpoint is not None
    async with gated_bench(tmp_path) as gated:
        first = await coming([1] * LONG)
        held = asyncio.create_task(coming([2] * LONG))
        await until(lambda: gated.held == 1)
        first.reservation.release()
        await asyncio.sleep(0)
        assert (gated.held, held.done()) == (0, False)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        assert gated.bench.idle()


async def test_tenants_take_turns_by_their_keys(tmp_path: Path) -> None:
    async with gated_bench(tmp_path) as gated:
        for _ in range(4):
            await gated.send(LONG, authorization="Bearer a", x_rutter_tenant="b")
        await gated.send(LONG, authorization="Bearer b")
        gated.gate.open(5)
        assert await gated.answers() == [200] * 5
        assert gated.order() == [0, 1, 4, 2, 3]
        journal = b"".join(path.read_bytes() for path in gated.bench.journal.iterdir())
    assert b"Bearer" not in journal


async def test_tenants_take_turns_by_the_operators_header_where_that_is_believed(tmp_path: Path) -> None:
    async with gated_bench(tmp_path, tenant_header=True) as gated:
        for tenant in ("a", "a", "a", "a", "b"):
            await gated.send(LONG, authorization="Bearer all", x_rutter_tenant=tenant)
        gated.gate.open(5)
        assert await gated.answers() == [200] * 5
        assert gated.order() == [0, 1, 4, 2, 3]
        assert "x-rutter-tenant" not in gated.prefill.requests[0].headers


async def test_a_backlog_that_must_be_done_by_now_releases_the_next(tmp_path: Path) -> None:
    async with gated_bench(tmp_path, dilation=10.0) as gated:
        await gated.send(600)
        await gated.send(600)
        assert gated.held == 1
        # Nothing comes back: after 26 ms of engine time the first is taken to be nearly done.
        await until(lambda: len(gated.prefill.requests) == 2)
        gated.gate.open(2)
        assert await gated.answers() == [200, 200]
        rows = await gated.bench.rows(2)
    first, held = sorted(rows, key=lambda row: row.rotation)
    assert held.waited_s is not None
    assert 0.026 < held.arrival_s + held.waited_s - first.arrival_s < 0.06
    assert [agrees(row, HOLDS) for row in rows] == [True, True]


async def test_nothing_is_held_for_longer_than_allowed(tmp_path: Path) -> None:
    async with gated_bench(tmp_path, dilation=1.0, max_hold_s=0.15) as gated:
        for _ in range(3):
            await gated.send(LONG)
        await until(lambda: len(gated.prefill.requests) == 3)
        assert await gated.metric('rutter_held_ended_total{reason="overdue"}') == 2
        gated.gate.open(3)
        assert await gated.answers() == [200] * 3
        rows = await gated.bench.rows(3)
    assert all(row.waited_s is None or 0.15 <= row.waited_s < 2.0 for row in rows)
    assert [agrees(row, HOLDS) for row in rows] == [True] * 3


@pytest.mark.parametrize("comes_back", [True, False])
async def test_without_a_prefill_engine_everything_held_goes_local(tmp_path: Path, comes_back: bool) -> None:
    probes = ProbePolicy(interval_s=0.05 if comes_back else 30.0)
    async with gated_bench(tmp_path, probes=probes) as gated:
        for _ in range(20):
            await gated.send(LONG)
        assert gated.held == 19
        gated.gate.status = 500
        gated.gate.open()
        assert await gated.answers() == [200] * 20
        assert await gated.metric('rutter_held_ended_total{reason="no_prefill_engine"}') == 19
        rows = await gated.bench.rows(20)
        assert gated.bench.idle()
    assert sorted(row.action or "" for row in rows) == ["local"] * 19 + ["remote"]
    assert {row.executed for row in rows} == {"local"}
    assert [agrees(row, HOLDS) for row in rows] == [True] * 20


async def test_a_failed_prefill_wakes_the_held_and_none_goes_to_the_engine_that_is_down(tmp_path: Path) -> None:
    other = Gate()
    gate = Gate()
    async with (
        running(gate, other, decode_engine) as (p, q, d),
        router_bench(tmp_path, [p, q], [d], HOLDS, dilation=SLOW, probes=ProbePolicy(30.0)) as bench,
    ):
        gated = GatedBench(bench, gate, p)
        for _ in range(4):
            await gated.send(LONG)
        assert gated.held == 2
        gate.status = 500
        gate.open()
        other.open(3)
        assert await gated.answers() == [200] * 4
        assert len(p.requests) == 1
        assert len(q.requests) == 3
        assert bench.idle()


async def test_deciding_again_may_fail_without_leaving_anyone_behind(tmp_path: Path) -> None:
    decide = Arrival.decide

    def faulty(arrival: Arrival, waited_s: float, held_ahead_tokens: float) -> None:
        if waited_s > 0.0 and arrival.request.slo_class == 1:
            raise RuntimeError("no")
        decide(arrival, waited_s, held_ahead_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arrival, "decide", faulty)
        async with gated_bench(tmp_path) as gated:
            await gated.send(LONG)
            await gated.send(LONG, **TIGHT)
            await gated.send(LONG)
            gated.gate.open(3)
            assert await gated.answers() == [200, 500, 200]
            assert await gated.metric('rutter_held_ended_total{reason="failed"}') == 1
            await gated.bench.until_idle()
