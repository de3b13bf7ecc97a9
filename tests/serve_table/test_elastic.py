"""Elastic roles: prefill engines that may serve whole requests."""

import argparse
import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from router_bench import CHAT, chat_body, router_bench
from sample_artifact import sample_artifact
from sample_row import sample_row
from stub_engines import decode_engine, prefill_engine, running
from test_decision import GREEDY, idle_fleet, request

from serve_table import explain
from serve_table.artifact import save
from serve_table.context import RouterConfig
from serve_table.errors import ConfigError
from serve_table.harm import PREFILLED_OVER_S, Residents, note_prefill, prefilled_tokens_per_s
from serve_table.journal import JournalWriter, ResidentsRow, Row
from serve_table.policy import Policy, policy
from serve_table.price import best_prefill
from serve_table.replay import decode_candidates, redecide
from serve_table.residents import ResidentBook
from serve_table.situation import ACTION_NAMES, LOCAL, NO_ENGINE, REMOTE, WHOLE, Draws, Fleet, features_of

PRICE = policy("price")
N_DECODE = 2
WANTED = request(prompt=500.0, slo_class=1, engines=(2, N_DECODE + 2))


def book_of(*bound: int) -> ResidentBook:
    """So many residents of a tight class on each decode engine, then of whole requests on each prefill engine."""
    book = ResidentBook(PRICE.params, 2, N_DECODE, lambda: 100.0, elastic=True)
    for d, n in enumerate(bound):
        for _ in range(n):
            book.bind(d, None, 1, 400.0, 200.0).streamed(1)
    return book


def elastic_fleet(book: ResidentBook, **columns: Any) -> Fleet:
    fleet = idle_fleet(2, N_DECODE + 2, decode_requests=book.requests)
    tokens = [600.0 * n for n in book.requests]
    return fleet._replace(decode_tokens=tokens, whole_engines=2, **columns)


def test_a_tight_request_goes_whole_to_an_idle_prefill_engine_where_all_others_are_crowded() -> None:
    book = book_of(120, 120)
    made = PRICE.decide(WANTED, elastic_fleet(book), 0, 0.0, GREEDY, book.seen())
    assert (made.action, made.prefill, made.decode, made.propensity) == (WHOLE, NO_ENGINE, N_DECODE, 1.0)
    down = elastic_fleet(book, decode_up=[1.0, 1.0, 0.0, 1.0])
    assert PRICE.decide(WANTED, down, 0, 0.0, GREEDY, book.seen()).decode == N_DECODE + 1
    # Without a handle that can express it, it may be whole all the same.
    assert PRICE.decide(WANTED._replace(remote_allowed=False), down, 0, 0.0, GREEDY, book.seen()).action == WHOLE
    rigid = ResidentBook(PRICE.params, 2, N_DECODE, lambda: 100.0)
    usual = idle_fleet(2, N_DECODE, decode_requests=[120.0, 120.0])
    assert PRICE.decide(WANTED, usual, 0, 0.0, GREEDY, rigid.seen()).action in (LOCAL, REMOTE)


def test_idle_decode_engines_are_preferred() -> None:
    book = book_of()
    assert PRICE.decide(WANTED, elastic_fleet(book), 0, 0.0, GREEDY, book.seen()).action != WHOLE


def test_no_whole_request_goes_where_legs_come_all_the_time() -> None:
    book = book_of(40, 40)
    seen = book.seen()._replace(prefill_since_s=[100.0, 100.0])
    busy = [0.6 * PREFILLED_OVER_S / 0.00005, 0.0]
    made = PRICE.decide(WANTED, elastic_fleet(book), 0, 0.0, GREEDY, seen._replace(prefilled_tokens=busy))
    assert (made.action, made.decode) == (WHOLE, N_DECODE + 1)
    made = PRICE.decide(WANTED, elastic_fleet(book), 0, 0.0, GREEDY, seen._replace(prefilled_tokens=[busy[0]] * 2))
    assert made.action != WHOLE


def test_a_leg_spares_the_engine_whose_whole_requests_it_would_make_miss() -> None:
    book = book_of(0, 0, 80, 0)
    long = request(prompt=6000.0, engines=(2, 4))
    assert best_prefill(PRICE.params, long, elastic_fleet(book), book.seen(), 0)[0] == 1
    nobody = book_of()
    assert best_prefill(PRICE.params, long, elastic_fleet(nobody), nobody.seen(), 0)[0] == 0


def test_exploring_never_draws_a_whole_request() -> None:
    book = book_of(120, 120)
    fleet, seen, explore = elastic_fleet(book), book.seen(), 0.3
    own = PRICE.decide(WANTED, fleet, 0, explore, GREEDY, seen)
    assert (own.action, own.propensity) == (WHOLE, 0.7)
    found = {}
    for action in (0.25, 0.75):
        for p in (0.25, 0.75):
            for d in (0.25, 0.75):
                made = PRICE.decide(WANTED, fleet, 0, explore, Draws(0.0, action, p, d), seen)
                found[made.action, made.prefill, made.decode] = made.propensity
    assert {decode for _, _, decode in found} == {0, 1}
    assert math.isclose(sum(found.values()), explore)


def test_features_are_of_the_decode_engines() -> None:
    book = book_of(4, 2, 90, 90)
    wanted = WANTED._replace(decode_cached_tokens=[0.0, 100.0, 400.0, 400.0])
    found = features_of(wanted, elastic_fleet(book))
    assert (found.decode_pressure_requests, found.uncached_decode_tokens) == (3.0, 400.0)


def test_what_was_prefilled_fades() -> None:
    seen = Residents(5.0, [0.0], [], (), [0.0])
    note_prefill(seen, 0, 1000.0, 5.0)
    note_prefill(seen, 0, 500.0, 5.0)
    assert prefilled_tokens_per_s(seen, 0) == 1500.0 / PREFILLED_OVER_S
    later = seen._replace(now_s=5.0 + PREFILLED_OVER_S)
    assert prefilled_tokens_per_s(later, 0) == pytest.approx(1500.0 / PREFILLED_OVER_S / math.e)


def test_the_book_counts_a_whole_request_on_its_engine_until_it_leaves() -> None:
    now_s = 10.0
    book = ResidentBook(PRICE.params, 2, N_DECODE, lambda: now_s, elastic=True)
    bound = book.bind(N_DECODE + 1, None, 1, 400.0, 200.0, 300.0)
    assert book.requests == [0.0, 0.0, 0.0, 1.0]
    assert book.seen().prefill_since_s == [0.0, 10.0]
    now_s = 11.0
    bound.streamed(1)
    assert book.seen().prefill_since_s == [0.0, 11.0]
    assert list(book.seen().prefilled_tokens) == [0.0, 300.0]
    bound.leave()
    assert not any(book.requests)
    assert not any(book.seen().shares)


def agrees(row: Row, chosen: Policy) -> bool:
    made = redecide(row, chosen)
    return (ACTION_NAMES[made.action], decode_candidates(row)[made.decode]) == (row.action, row.decode_engine)


async def test_the_router_serves_whole_requests_and_says_so(tmp_path: Path) -> None:
    async def either(*args: Any) -> None:
        stub, out = args
        legs = b"do_remote_decode" in stub.body
        await (prefill_engine if legs else decode_engine)(stub, out)

    async with (
        running(either, decode_engine) as (p, d),
        router_bench(tmp_path, [p], [d], PRICE, elastic=True) as bench,
    ):
        fleet = bench.context.fleet
        while not fleet.prefill[0].up:
            await asyncio.sleep(0.01)
        # As if the decode engine were full.
        book = bench.context.residents
        assert book is not None
        crowd = [book.bind(0, None, 1, 400.0, 200.0) for _ in range(120)]
        for bound in crowd:
            bound.streamed(1)
        fleet.decode[0].requests += 120.0
        headers = {"x-rutter-slo-class": "tight"}
        answers = [bench.client.post(CHAT, json=chat_body(stream=True), headers=headers) for _ in range(3)]
        assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}
        rows = await bench.rows(3)
        for bound in crowd:
            bound.leave()
        fleet.decode[0].requests -= 120.0
        await bench.until_idle()
        assert [engine.requests + engine.tokens + engine.local_prefill_tokens for engine in fleet.whole] == [0.0]
        text = (await bench.admin.get("/metrics")).text
    whole = [row for row in rows if row.action == "whole"]
    assert whole
    for row in whole:
        assert (row.executed, row.prefill_engine, row.executed_prefill_engine) == ("whole", None, None)
        assert row.decode_engine == row.executed_decode_engine == p.url
        assert (row.status, row.handoff_age_s) == ("ok", None)
        assert row.fleet is not None
        assert (len(row.fleet.prefill_up), len(row.fleet.decode_up)) == (1, 2)
    assert all(agrees(row, PRICE) for row in rows)
    assert f'rutter_engine_requests{{engine="{p.url}",role="whole"}} 0.0' in text
    assert 'action="whole"' in text


async def test_a_whole_request_whose_engine_is_gone_is_served_by_a_decode_engine(tmp_path: Path) -> None:
    async with (
        running(decode_engine, decode_engine) as (p, d),
        router_bench(tmp_path, [p], [d], PRICE, elastic=True) as bench,
    ):
        fleet = bench.context.fleet
        while not fleet.prefill[0].up:
            await asyncio.sleep(0.01)
        await p.stop()
        fleet.decode[0].requests += 500.0
        fleet.decode[0].tokens += 90_000.0
        answer = await bench.client.post(CHAT, json=chat_body(stream=True), headers={"x-rutter-slo-class": "tight"})
        fleet.decode[0].requests -= 500.0
        fleet.decode[0].tokens -= 90_000.0
        row = await bench.row()
        assert answer.status_code == 200
        assert (row.action, row.executed, row.executed_decode_engine) == ("whole", "local", d.url)
        assert row.fallback_reason == "decode_unreachable"
        assert not fleet.prefill[0].up
        await bench.until_idle()


@pytest.mark.parametrize("name", ["round_robin", "dynamo_style"])
async def test_other_policies_refuse_elastic_roles(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"--elastic: policy '{name}' never gives a whole request"):
        async with running(decode_engine) as (d,), router_bench(tmp_path, [d], [d], name, elastic=True):
            pass
    with pytest.raises(ConfigError, match="give their URLs with --prefill"):
        RouterConfig((), ("http://d0",), elastic=True)


def test_explain_shows_what_a_whole_request_is_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(sample_artifact("price"), tmp_path / "policy.safetensors")
    book = ResidentBook(PRICE.params, 2, 3, lambda: 100.0, elastic=True)
    for d in range(3):
        for _ in range(120):
            book.bind(d, None, 1, 400.0, 200.0).streamed(1)
    row = sample_row(slo_class=1, residents=ResidentsRow(*book.seen()))
    fleet = row.fleet
    assert fleet is not None
    columns = {name: [*getattr(fleet, name), 0.0, 0.0] for name in ("decode_tokens", "decode_prefill_tokens")}
    columns |= {"decode_requests": book.requests, "decode_up": [1.0] * 5, "decode_cached_tokens": [0.0] * 5}
    writer = JournalWriter(tmp_path / "journal")
    writer.append(msgspec.structs.replace(row, fleet=msgspec.structs.replace(fleet, **columns), policy="rutter"))
    writer.close()
    flags = ["--artifact", str(tmp_path / "policy.safetensors"), "--journal", str(tmp_path / "journal")]
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    assert explain.run(parser.parse_args([*flags, "--request-id", row.request_id])) == 0
    text = capsys.readouterr().out
    assert "price      http://p0: whole 0." in text
    assert "choice     whole, decode http://p" in text
