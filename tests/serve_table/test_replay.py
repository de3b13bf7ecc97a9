"""A journal row holds all that its decision saw (F14)."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
from router_bench import CHAT, COMPLETIONS, chat_body, router_bench
from sample_artifact import sample_artifact
from sample_row import sample_row
from stub_engines import Out, StubRequest, decode_engine, prefill_engine, running
from test_decision import GREEDY

from serve_table.errors import JournalError
from serve_table.harm import N_SHARE
from serve_table.journal import FleetRow, ResidentsRow, Row
from serve_table.policy import POLICIES, Policy, policy
from serve_table.price import decode_values
from serve_table.price_params import with_constants
from serve_table.replay import redecide, request_and_fleet, residents_of
from serve_table.situation import ACTION_NAMES, NO_ENGINE, REASON_NAMES


@pytest.mark.parametrize("name", POLICIES)
async def test_f14_every_row_decides_again_to_what_was_journaled(tmp_path: Path, name: str) -> None:
    calls = 0

    async def flaky_prefill(request: StubRequest, out: Out) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.005)
        if calls % 7 == 0:
            out.cut()
        else:
            await prefill_engine(request, out)

    chosen = policy(name, artifact=sample_artifact("price"))
    async with (
        running(flaky_prefill, flaky_prefill, decode_engine, decode_engine, decode_engine) as (p, q, *decodes),
        router_bench(tmp_path, [p, q], decodes, chosen, explore=0.3, seed=5) as bench,
    ):
        await asyncio.gather(
            *(
                bench.client.post(CHAT, json=chat_body(n=2 if i % 9 == 0 else 1, stream=i % 2 == 0, max_tokens=i + 1))
                for i in range(20)
            ),
            *(
                bench.client.post(COMPLETIONS, json={"model": "m", "prompt": list(range(i * 40))}, headers={})
                for i in range(1, 20)
            ),
        )
        rows = await bench.rows(39)
        assert bench.idle()
    same = [agrees(row, chosen) for row in rows]
    assert same == [True] * 39
    assert len({row.reason for row in rows}) >= 2
    assert {row.policy_digest for row in rows} == {chosen.digest}
    assert [row.rotation for row in sorted(rows, key=lambda row: row.rotation)] == list(range(39))


def agrees(row: Row, chosen: Policy) -> bool:
    made = redecide(row, chosen)
    return (
        ACTION_NAMES[made.action],
        None if made.prefill == NO_ENGINE else row.prefill_engines[made.prefill],
        row.decode_engines[made.decode],
        None if made.cluster == NO_ENGINE else made.cluster,
        None if made.regime == NO_ENGINE else made.regime,
        made.propensity,
        REASON_NAMES[made.reason],
    ) == (row.action, row.prefill_engine, row.decode_engine, row.cluster, row.regime, row.propensity, row.reason)


async def test_f14_equal_seeds_draw_alike(tmp_path: Path) -> None:
    draws = []
    for run in ("a", "b"):
        async with running(decode_engine) as (d,), router_bench(tmp_path / run, [], [d], seed=11) as bench:
            for _ in range(3):
                await bench.client.post(CHAT, json=chat_body())
            draws.append([row.draws for row in await bench.rows(3)])
    assert draws[0] == draws[1]
    assert all(len(drawn) == 4 for drawn in draws[0])


async def test_f14_a_step_of_the_wall_clock_changes_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        for step_s in (3600.0, -3600.0):
            monkeypatch.setattr(time, "time", lambda step_s=step_s: real() + step_s)
            await bench.client.post(CHAT, json=chat_body(stream=True))
        rows = await bench.rows(2)
    for row in rows:
        assert row.ttft_s is not None
        assert 0.0 < row.ttft_s <= row.e2e_s < 1.0
    assert 0.0 < rows[0].arrival_s < rows[1].arrival_s < 5.0


async def test_a_failing_policy_takes_the_safe_route(tmp_path: Path) -> None:
    broken = Policy("table", POLICIES["table"][0], [], sample_artifact().table(), "digest")
    async with (
        running(prefill_engine, decode_engine) as (p, d),
        router_bench(tmp_path, [p], [d], broken) as bench,
    ):
        assert (await bench.client.post(CHAT, json=chat_body())).status_code == 200
        row = await bench.row()
        assert "rutter_decision_errors_total 1.0" in (await bench.admin.get("/metrics")).text
    assert (row.executed, row.reason, row.propensity) == ("local", "decision_error", None)


def test_a_row_without_a_decision_cannot_be_decided_again() -> None:
    with pytest.raises(JournalError, match="refused before a decision"):
        redecide(sample_row(fleet=None), policy("round_robin"))


def test_a_row_without_residents_is_not_decided_again_by_the_price() -> None:
    with pytest.raises(JournalError, match="'round_robin' journaled no residents, which policy 'price' decides by"):
        redecide(sample_row(), policy("price"))


async def test_rows_hold_the_residents_where_the_policy_decides_by_them(tmp_path: Path) -> None:
    for name in ("round_robin", "price"):
        async with (
            running(prefill_engine, decode_engine) as (p, d),
            router_bench(tmp_path / name, [p], [d], policy(name)) as bench,
        ):
            await bench.client.post(CHAT, json=chat_body())
            row = await bench.row()
        assert (row.residents is not None) == (name == "price")


def test_a_row_is_decided_again_by_the_constants_of_its_time() -> None:
    """As estimated then, steps took far too long for a tight request beside others; by the artifact's they do not."""
    price = policy("price")
    shares = [0.0] * (2 * N_SHARE)
    fleet = FleetRow([0.0], [0.0], [1.0], [20.0, 90.0], [0.0] * 2, [0.0] * 2, [1.0] * 2, [0.0], [0.0] * 2)
    row = sample_row(fleet=fleet, prompt_tokens=200.0, slo_class=1, draws=[1.0] * 4, explore=0.0)

    def value_of(constants: list[float]) -> tuple[float, float]:
        residents = ResidentsRow(0.0, [0.0], shares, constants)
        again = msgspec.json.decode(msgspec.json.encode(residents), type=ResidentsRow)
        seen = msgspec.structs.replace(row, residents=again)
        request, found = request_and_fleet(seen)
        assert redecide(seen, price) == price.decide(request, found, row.rotation, 0.0, GREEDY, residents_of(seen))
        params = with_constants(price.params, residents_of(seen).constants)
        return decode_values(params, request, found, residents_of(seen), 0.01, 0.0, 0)

    assert value_of([]) == value_of(price.params[:7])
    assert value_of([7.0 * value for value in price.params[:7]]) < value_of([])
    assert residents_of(sample_row()).constants == ()
