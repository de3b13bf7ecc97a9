"""The router's residents: kept by what really streamed, and gone without a trace."""

import asyncio
import random
from pathlib import Path

import pytest
from router_bench import CHAT, chat_body, router_bench
from stub_engines import DONE, Out, StubRequest, chat_event, decode_engine, prefill_engine, running, usage_event

from serve_table.harm import N_SHARE, RENEWED_AFTER_TOKENS, context_tokens, harm, remaining_tokens
from serve_table.policy import policy
from serve_table.price_params import CONSTANT_NAMES
from serve_table.residents import BoundRequest, ResidentBook
from serve_table.step_time import A40_3B, step_time_s

PARAMS = policy("price").params
STEP = A40_3B.step.as_list()


class Clock:
    now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> ResidentBook:
    return ResidentBook(PARAMS, 2, 3, clock)


def test_tokens_count_as_they_stream(book: ResidentBook, clock: Clock) -> None:
    bound = book.bind(1, None, 0, 300.0, 100.0)
    assert (context_tokens(book.seen(), 1), remaining_tokens(book.seen(), 1)) == (300.0, 99.0)
    clock.now_s += 0.1
    bound.streamed(1)
    clock.now_s += 0.3
    bound.streamed(31)
    assert (context_tokens(book.seen(), 1), remaining_tokens(book.seen(), 1)) == pytest.approx((331.0, 69.0))
    assert context_tokens(book.seen(), 0) == 0.0


def test_one_that_streams_too_slowly_has_less_slack(book: ResidentBook, clock: Clock) -> None:
    def harm_after(gap_s: float) -> float:
        bound = book.bind(0, None, 1, 300.0, 100.0)
        bound.streamed(1)
        clock.now_s += 40 * gap_s
        bound.streamed(41)
        found = harm(PARAMS, book.seen(), 0, 1.0, 0.0005, 0.0, 0.0)
        bound.leave()
        return found

    assert harm_after(0.010) < harm_after(0.016) > harm_after(0.050)


def test_a_request_without_its_first_token_is_lost_after_its_deadline(book: ResidentBook, clock: Clock) -> None:
    bound = book.bind(2, None, 1, 300.0, 100.0)
    assert harm(PARAMS, book.seen(), 2, 1.0, 0.001, 0.0, 0.1) > 0.0
    clock.now_s = bound.deadline_s + 0.001
    assert harm(PARAMS, book.seen(), 2, 1.0, 0.001, 0.0, 0.1) == pytest.approx(0.0, abs=1e-12)
    bound.streamed(1)
    assert harm(PARAMS, book.seen(), 2, 1.0, 0.001, 0.0, 0.1) == pytest.approx(0.0, abs=1e-12)
    bound.leave()
    assert not any(book.seen().shares)


def test_the_deadline_counts_from_when_a_held_request_came(book: ResidentBook) -> None:
    at_once, held = book.bind(0, 1, 0, 300.0, 100.0), book.bind(0, 1, 0, 300.0, 100.0, waited_s=0.05)
    assert at_once.deadline_s - held.deadline_s == pytest.approx(0.05)


def test_a_prefill_engine_is_known_to_work_since_its_first_leg_or_last_answer(book: ResidentBook, clock: Clock) -> None:
    first = book.bind(0, 1, 0, 300.0, 100.0)
    clock.now_s = 6.0
    second = book.bind(0, 1, 0, 300.0, 100.0)
    assert book.seen().prefill_since_s[1] == 5.0
    clock.now_s = 7.0
    first.prefill_returned()
    clock.now_s = 8.0
    first.prefill_returned()
    assert book.seen().prefill_since_s[1] == 7.0
    second.leave()
    clock.now_s = 9.0
    book.bind(0, 1, 0, 300.0, 100.0)
    assert book.seen().prefill_since_s[1] == 9.0


def test_whatever_happens_in_which_order_nothing_is_left(book: ResidentBook, clock: Clock) -> None:
    rng = random.Random(3)
    live = []
    for _ in range(600):
        clock.now_s += rng.random() * 0.01
        if rng.random() < 0.4:
            prefill = rng.choice([None, 0, 1])
            live.append(
                book.bind(rng.randrange(3), prefill, rng.randrange(2), rng.randrange(1, 5000), rng.random() * 900)
            )
        elif live:
            bound = rng.choice(live)
            step = rng.randrange(5)
            if step == 0:
                bound.prefill_returned()
            elif step == 1:
                bound.move_to(rng.randrange(3))
            elif step == 2:
                bound.leave()
                live.remove(bound)
                bound.leave()
            else:
                bound.streamed(rng.randrange(1, 50))
        book.seen()
    assert sum(book.requests) == len(live) > 0
    for bound in live:
        bound.leave()
    assert book.requests == [0.0] * 3
    assert all((e.streaming, e.streaming_tokens, e.local_pending) == (0.0, 0.0, 0) for e in book.engines)
    assert book.seen().shares == [0.0] * (3 * N_SHARE)


def test_the_constants_are_told_from_what_streams(clock: Clock) -> None:
    """Engines four times faster than their artifact has it; what waits, pends or was prefilled elsewhere counts too."""
    slow = policy("price", {name: 4.0 * value for name, value in zip(CONSTANT_NAMES[:2], STEP[:2], strict=True)}).params
    book = ResidentBook(slow, 1, 1, clock)
    rng = random.Random(4)
    live: dict[BoundRequest, int] = {}
    for step in range(6000):
        if step % 9 == 0:
            bound = book.bind(0, 0, 0, float(rng.randrange(100, 900)), 300.0)
            clock.now_s += 0.001
            bound.prefill_returned()
            live[bound] = 0
        context = sum(bound._resident.prompt_tokens + tokens for bound, tokens in live.items())
        clock.now_s += step_time_s(STEP, len(live), context)
        for bound in list(live):
            live[bound] += 1
            if live[bound] % RENEWED_AFTER_TOKENS == 1:
                bound.streamed(live[bound])
            if live[bound] > 200 and rng.random() < 0.02:
                bound.leave()
                del live[bound]
    assert book.engines[0].streaming == len(live)
    requests, context = float(len(live)), 600.0 * len(live)
    assert step_time_s(book.params, requests, context) == pytest.approx(step_time_s(STEP, requests, context), rel=0.03)
    assert list(book.seen().constants) == list(book.params[:7]) != slow[:7]
    assert book.params[7:] == slow[7:]
    for bound in live:
        bound.leave()
    assert (book.engines[0].streaming, book.engines[0].streaming_tokens) == (0.0, 0.0)


async def test_the_router_keeps_what_it_relays(tmp_path: Path) -> None:
    half_way, go_on = asyncio.Event(), asyncio.Event()

    async def decode(request: StubRequest, out: Out) -> None:
        if not request.body:
            await out.whole(200, b"{}")
            return
        await out.head()
        for k in range(60):
            await out.piece(chat_event({"content": "a"}))
            if k == 40:
                half_way.set()
                await go_on.wait()
        await out.piece(chat_event({}, "stop") + usage_event() + DONE)
        await out.end()

    async with (
        running(prefill_engine, decode) as (p, d),
        router_bench(tmp_path, [p], [d], "price", dilation=2.0) as bench,
    ):
        book = bench.context.residents
        assert book is not None
        streaming = asyncio.create_task(bench.stream(CHAT, chat_body(stream=True)))
        await half_way.wait()
        await asyncio.sleep(0.05)
        bound = bench.context.fleet.decode[0].tokens
        assert book.requests == [1.0]
        # 200 tokens are predicted where nothing is known; shares are renewed after the 1st, 17th and 33rd token.
        assert 0.0 < context_tokens(book.seen(), 0) - (bound - 200.0) <= 41.0
        assert remaining_tokens(book.seen(), 0) < 199.0
        go_on.set()
        await streaming
        await bench.until_idle()
        row = await bench.row()
        assert row.policy == "price"
        assert row.residents is not None
        assert len(row.residents.constants) == 7
        text = (await bench.admin.get("/metrics")).text
        assert 'rutter_constant{constant="step_floor_s"}' in text
        assert 'rutter_constant_ratio{constant="handoff_per_token_s"}' in text
        assert "rutter_length_ratio " in text


async def test_answers_teach_how_long_answers_are(tmp_path: Path) -> None:
    async with (
        running(prefill_engine, decode_engine) as (p, d),
        router_bench(tmp_path, [p], [d], "price") as bench,
    ):
        for _ in range(30):
            await bench.stream(CHAT, chat_body(stream=True))
        predicted = [row.predicted_output_tokens for row in await bench.rows(30)]
        assert predicted[0] == 200.0
        assert predicted[-1] < 100.0
        # Neither an answer that was limited to fewer, nor one that its client knew the length of, tells more of it.
        await bench.stream(CHAT, chat_body(stream=True, max_tokens=5))
        await bench.stream(CHAT, chat_body(stream=True), **{"x-rutter-predicted-output-tokens": "70"})
        await bench.stream(CHAT, chat_body(stream=True))
        *_, limited, known, after = [row.predicted_output_tokens for row in await bench.rows(33)]
        assert (limited, known) == (5.0, 70.0)
        book = bench.context.residents
        assert book is not None
        assert after == pytest.approx(predicted[-1], rel=0.1)
        assert book.lengths[-2] == pytest.approx(sum(0.995**k for k in range(31)))
