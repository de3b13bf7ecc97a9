"""The order of held requests: the guard's, with turns between tenants."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from serve_table.guard import held_key
from serve_table.held_queue import HeldQueue, HeldRequest
from serve_table.policy import policy
from serve_table.situation import Request

PARAMS = policy("price", {"hold_s": 0.01, "late_hold": 3.0, "deadline_share": 1.0, "rush": 0.0}).params
NOW_S = 100.0

Drawn = tuple[int, int, float, int]
requests = st.tuples(
    st.integers(0, 1), st.integers(1, 8000), st.floats(0.0, 5.0), st.integers(0, 3)
)  # class, prompt tokens, waited_s, tenant


def held(drawn: Drawn, one_tenant: bool = False) -> HeldRequest:
    slo_class, prompt_tokens, waited_s, tenant = drawn
    return HeldRequest(
        request=Request(float(prompt_tokens), 100.0, slo_class, [], [], True),
        since_s=NOW_S - waited_s,
        tokens=float(prompt_tokens),
        tenant=b"" if one_tenant else bytes([tenant]),
    )


def queue_of(all_held: list[HeldRequest]) -> HeldQueue[HeldRequest]:
    queue: HeldQueue[HeldRequest] = HeldQueue(PARAMS)
    for one in all_held:
        queue.add(one)
    return queue


def waiting(one: HeldRequest) -> Request:
    return one.request._replace(waited_s=NOW_S - one.since_s)


def keys_of(all_held: list[HeldRequest]) -> dict[HeldRequest, tuple[int, float]]:
    """The guard's, of requests in the order they came."""
    before = accumulate((one.tokens for one in all_held), initial=0.0)
    return {one: held_key(PARAMS, waiting(one), tokens) for one, tokens in zip(all_held, before, strict=False)}


@given(st.lists(requests, max_size=20))
def test_with_one_tenant_the_order_is_the_guards(drawn: list[Drawn]) -> None:
    all_held = [held(one, one_tenant=True) for one in drawn]
    assert queue_of(all_held).in_order(NOW_S) == sorted(all_held, key=keys_of(all_held).__getitem__)


@given(st.lists(requests, max_size=20))
def test_tiers_go_in_order_and_each_tenants_requests_in_the_guards(drawn: list[Drawn]) -> None:
    all_held = [held(one) for one in drawn]
    order = queue_of(all_held).in_order(NOW_S)
    assert sorted(map(id, order)) == sorted(map(id, all_held))
    of_all = keys_of(all_held)
    tiers = [of_all[one][0] for one in order]
    assert tiers == sorted(tiers)
    for tenant in {one.tenant for one in all_held}:
        keys = [of_all[one] for one in order if one.tenant == tenant]
        assert keys == sorted(keys)


@given(st.lists(requests, max_size=30))
def test_tenants_that_compete_get_equal_tokens_up_to_one_prompt(drawn: list[Drawn]) -> None:
    queue = queue_of([held((0, tokens, 0.0, tenant % 2)) for _, tokens, _, tenant in drawn])
    released = {b"\0": 0.0, b"\1": 0.0}
    while len({one.tenant for one in queue.in_order(NOW_S)}) == 2:
        first = queue.in_order(NOW_S)[0]
        queue.remove(first, released=True)
        released[first.tenant] += first.tokens
        assert abs(released[b"\0"] - released[b"\1"]) <= 8000.0


@given(st.lists(requests, max_size=20), requests)
def test_what_is_ahead_of_a_coming_request_is_what_will_go_before_it(drawn: list[Drawn], last: Drawn) -> None:
    for one_tenant in (True, False):
        queue = queue_of([held(one, one_tenant) for one in drawn])
        coming = held(last, one_tenant)
        ahead_tokens = queue.ahead_tokens(coming, NOW_S)
        assert coming not in queue
        queue.add(coming)
        order = queue.in_order(NOW_S)
        assert ahead_tokens == sum(one.tokens for one in order[: order.index(coming)])


def test_an_earlier_deadline_overtakes_and_what_is_late_waits_until_it_is_overdue() -> None:
    loose, tight, short = held((0, 2000, 0.0, 0)), held((1, 2000, 0.0, 0)), held((0, 600, 0.0, 0))
    late, overdue = held((1, 2000, 0.5, 0)), held((1, 2000, 1.1, 0))
    queue = queue_of([loose, late, tight, overdue, short])
    assert queue.in_order(NOW_S) == [overdue, short, tight, loose, late]
    assert [queue.first(), len(queue)] == [loose, 5]


def test_nobody_saves_up_turns() -> None:
    busy = [held((0, 1000, 0.0, 1)) for _ in range(9)]
    queue = queue_of(busy)
    for one in busy[:3]:
        queue.remove(one, released=True)
    new = [held((0, 1000, 0.0, 2)) for _ in range(3)]
    for one in new:
        queue.add(one)
    tenants = [one.tenant[0] for one in queue.in_order(NOW_S)]
    assert tenants == [1, 2, 1, 2, 1, 2, 1, 1, 1]


def test_who_was_served_is_not_first_again_by_coming_one_at_a_time() -> None:
    queue = queue_of([held((0, 1000, 0.0, 1)) for _ in range(4)])
    order = []
    for _ in range(4):
        queue.add(held((0, 1000, 0.1, 2)))
        for _ in range(2):
            first = queue.in_order(NOW_S)[0]
            queue.remove(first, released=True)
            order.append(first.tenant[0])
    assert all(one != other for one, other in pairwise(order))


def test_who_left_by_itself_has_had_no_turn_and_an_empty_queue_begins_anew() -> None:
    one, other = held((0, 5000, 0.0, 1)), held((0, 600, 0.0, 2))
    queue = queue_of([one, other])
    queue.remove(other, released=False)
    again = held((0, 600, 0.0, 2))
    queue.add(again)
    assert queue.in_order(NOW_S) == [again, one]
    queue.remove(again, released=True)
    queue.remove(one, released=True)
    fresh = [held((0, 2000, 0.0, 1)), held((0, 3000, 0.0, 2))]
    for new in fresh:
        queue.add(new)
    assert queue.in_order(NOW_S) == fresh
