"""The price: what it prefers, and why."""

from collections import Counter
from dataclasses import asdict, fields, replace

import pytest
from test_decision import GREEDY, idle_fleet, request

from serve_table import price_params
from serve_table.harm import CONTEXT, Residents
from serve_table.policy import policy
from serve_table.price_params import LEARNED_FIELDS, PriceParams
from serve_table.residents import ResidentBook
from serve_table.situation import LOCAL, REMOTE, Fleet

PRICE = policy("price")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def crowd(*engines: list[tuple[int, int]]) -> tuple[Fleet, Residents]:
    """Per decode engine its residents' SLO class and number, all of 400 prompt and 200 predicted tokens."""
    book = ResidentBook(PRICE.params, 2, len(engines), Clock())
    for d, kinds in enumerate(engines):
        for slo_class, n in kinds:
            for _ in range(n):
                book.bind(d, None, slo_class, 400.0, 200.0).streamed(1)
    fleet = idle_fleet(2, len(engines), decode_requests=book.requests, decode_tokens=[600.0 * n for n in book.requests])
    return fleet, book.seen()


def test_equal_engines_take_turns() -> None:
    fleet, residents = crowd([], [], [])
    made = [PRICE.decide(request(prompt=300.0), fleet, k, 0.0, GREEDY, residents) for k in range(12)]
    assert Counter(d.decode for d in made) == {0: 4, 1: 4, 2: 4}
    fleet, residents = crowd([(1, 20)], [(1, 20)], [(1, 20)])
    made = [PRICE.decide(request(prompt=3000.0), fleet, k, 0.0, GREEDY, residents) for k in range(12)]
    assert {d.action for d in made} == {REMOTE}
    assert Counter(d.prefill for d in made) == {0: 6, 1: 6}


def test_a_tight_request_goes_where_it_can_meet_its_tpot() -> None:
    fleet, residents = crowd([(0, 90)], [(0, 90)], [(0, 10)])
    assert PRICE.decide(request(slo_class=1), fleet, 0, 0.0, GREEDY, residents).decode == 2


def test_a_loose_request_is_kept_from_engines_whose_residents_it_would_make_miss() -> None:
    # Engine 1 has fewer requests, but they are tight and near their target; engine 0's are loose and have slack.
    fleet, residents = crowd([(0, 95)], [(1, 88)])
    wanted = request(slo_class=0, prompt=250.0, engines=(2, 2))
    assert PRICE.decide(wanted, fleet, 1, 0.0, GREEDY, residents).decode == 0
    careless = policy("price", {"harm_weight": 0.0})
    assert careless.decide(wanted, fleet, 1, 0.0, GREEDY, residents).decode == 1


def test_prefill_goes_local_when_prefill_engines_are_too_far_behind() -> None:
    fleet, residents = crowd([(0, 5)], [(0, 5)], [(0, 5)])
    residents = residents._replace(prefill_since_s=[residents.now_s] * 2)
    busy = fleet._replace(prefill_tokens=[40_000.0, 40_000.0])
    wanted = request(prompt=1500.0, slo_class=1)
    assert PRICE.decide(wanted, busy, 0, 0.0, GREEDY, residents).action == LOCAL
    assert PRICE.decide(wanted._replace(prompt_tokens=6000.0), fleet, 0, 0.0, GREEDY, residents).action == REMOTE


def test_who_is_late_anyway_goes_where_it_waits_least() -> None:
    fleet, residents = crowd([(0, 5)], [(0, 5)], [(0, 5)])
    residents = residents._replace(prefill_since_s=[residents.now_s] * 2)
    behind = fleet._replace(prefill_tokens=[200_000.0, 200_000.0], decode_prefill_tokens=[30_000.0] * 3)
    wanted = request(prompt=1500.0)
    none = {"ttft_weight": 0.0, "local_weight": 0.2}
    patient, hurried = (policy("price", {**none, "late_weight": weight}) for weight in (0.0, 0.5))
    assert patient.decide(wanted, behind, 0, 0.0, GREEDY, residents).action == REMOTE
    assert hurried.decide(wanted, behind, 0, 0.0, GREEDY, residents).action == LOCAL
    # In time either way, nothing changes.
    for chosen in (patient, hurried):
        assert chosen.decide(wanted, fleet, 0, 0.0, GREEDY, residents).action == REMOTE


def test_a_prefill_backlog_shrinks_with_the_time_spent_on_it() -> None:
    fleet, residents = crowd([(1, 20)], [(1, 20)])
    busy = fleet._replace(prefill_tokens=[2000.0, 2000.0])
    wanted = request(prompt=3000.0, engines=(2, 2))
    since = residents._replace(prefill_since_s=[residents.now_s - 0.08, residents.now_s])
    assert {PRICE.decide(wanted, busy, k, 0.0, GREEDY, since).prefill for k in range(4)} == {0}
    stuck = residents._replace(prefill_since_s=[residents.now_s - 60.0, residents.now_s])
    idle = busy._replace(prefill_tokens=[2000.0, 0.0])
    assert {PRICE.decide(wanted, idle, k, 0.0, GREEDY, stuck).prefill for k in range(4)} == {1}


def test_an_engine_without_room_for_the_kv_is_left_alone() -> None:
    fleet, residents = crowd([(0, 20)], [(0, 60)])
    residents.shares[CONTEXT] += 21_000.0  # few requests, long prompts
    wanted = request(prompt=2000.0, engines=(2, 2))
    for kv_tokens, decode in ((70_000.0, 0), (26_100.0, 1)):
        chosen = policy("price", {"kv_tokens": kv_tokens})
        assert chosen.decide(wanted, fleet, 0, 0.0, GREEDY, residents).decode == decode


def test_defaults_are_the_profiles_and_every_field_has_its_place() -> None:
    assert len(PRICE.params) == len(fields(PriceParams))
    defaults = asdict(PriceParams())
    for name in LEARNED_FIELDS:
        assert PRICE.params[getattr(price_params, name.upper())] == defaults[name]
    with pytest.raises(Exception, match="greater than 0"):
        replace(PriceParams(), step_floor_s=0.0)
