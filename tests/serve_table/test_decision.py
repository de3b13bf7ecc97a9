"""The decision functions: edges (F29), ties, exploration and its propensities, and the table's look-up."""

import math
from collections import Counter
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_artifact import sample_artifact

from serve_table import placement, situation
from serve_table.decision import PRICE, TABLE
from serve_table.policy import POLICIES, DynamoParams, Policy, policy
from serve_table.situation import LOCAL, NO_ENGINE, REMOTE, Decision, Draws, Fleet, Request

GREEDY = Draws(1.0, 0.5, 0.5, 0.5)
ALL_POLICIES = [policy(name, artifact=sample_artifact("price")) for name in POLICIES]
# Power of two draws its own choice from the draws that pick an explored one.
FIXED_CHOICE_POLICIES = [chosen for chosen in ALL_POLICIES if chosen.name != "power_of_two"]


def request(
    prompt: float = 1000.0, cached: float = 0.0, engines: tuple[int, int] = (2, 3), **fields: object
) -> Request:
    values = {"predicted_output_tokens": 100.0, "slo_class": 0, "remote_allowed": True, **fields}
    return Request(
        prompt_tokens=prompt,
        prefill_cached_tokens=[cached] * engines[0],
        decode_cached_tokens=[cached] * engines[1],
        **values,  # type: ignore[arg-type]
    )


def idle_fleet(n_prefill: int = 2, n_decode: int = 3, **columns: list[float]) -> Fleet:
    p, d = [0.0] * n_prefill, [0.0] * n_decode
    return Fleet(p, p, [1.0] * n_prefill, d, d, d, [1.0] * n_decode)._replace(**columns)


counts = st.integers(0, 20).map(float)
tokens = st.integers(0, 100_000).map(float)
unit = st.floats(0.0, 1.0, exclude_max=True)
draws = st.builds(Draws, unit, unit, unit, unit)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Request, Fleet, int]:
    n_prefill, n_decode = draw(st.integers(0, 4)), draw(st.integers(1, 5))

    def column(n: int, values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=n, max_size=n))

    decode_up = column(n_decode, st.sampled_from([0.0, 1.0]))
    decode_up[draw(st.integers(0, n_decode - 1))] = 1.0
    fleet = Fleet(
        column(n_prefill, counts),
        column(n_prefill, tokens),
        column(n_prefill, st.sampled_from([0.0, 1.0])),
        column(n_decode, counts),
        column(n_decode, tokens),
        column(n_decode, tokens),
        decode_up,
    )
    wanted = Request(
        draw(tokens),
        draw(tokens),
        draw(st.integers(0, 1)),
        column(n_prefill, tokens),
        column(n_decode, tokens),
        draw(st.booleans()),
    )
    return wanted, fleet, draw(st.integers(0, 1000))


@given(situations(), draws, st.sampled_from([0.0, 0.001, 0.3, 1.0]), st.sampled_from(ALL_POLICIES))
def test_decisions_are_deterministic_and_name_only_live_engines(
    situation: tuple[Request, Fleet, int], drawn: Draws, explore: float, chosen: Policy
) -> None:
    wanted, fleet, rotation = situation
    decided = chosen.decide(wanted, fleet, rotation, explore, drawn)
    assert decided == chosen.decide(wanted, fleet, rotation, explore, drawn)
    assert fleet.decode_up[decided.decode] == 1.0
    if decided.action == REMOTE:
        assert wanted.remote_allowed
        assert fleet.prefill_up[decided.prefill] == 1.0
    else:
        assert decided.prefill == NO_ENGINE
    assert 0.0 < decided.propensity <= 1.0
    assert (decided.cluster == NO_ENGINE) == (chosen.number not in (TABLE, PRICE))


@given(situations(), st.floats(0.01, 0.99), st.sampled_from(FIXED_CHOICE_POLICIES), unit)
def test_propensities_of_all_choices_sum_to_one(
    situation: tuple[Request, Fleet, int], explore: float, chosen: Policy, drawn: float
) -> None:
    wanted, fleet, rotation = situation
    # The policy's own choice, and every choice that exploring can make.
    n_prefill, n_decode = placement.count_up(fleet.prefill_up), placement.count_up(fleet.decode_up)
    own = chosen.decide(wanted, fleet, rotation, explore, Draws(0.999, drawn, drawn, drawn))
    choices: dict[tuple[int, int, int], Decision] = {(own.action, own.prefill, own.decode): own}
    for action in (0.25, 0.75):
        for p in range(max(n_prefill, 1)):
            for d in range(n_decode):
                at = Draws(0.0, action, (p + 0.5) / max(n_prefill, 1), (d + 0.5) / n_decode)
                made = chosen.decide(wanted, fleet, rotation, explore, at)
                before = choices.setdefault((made.action, made.prefill, made.decode), made)
                assert math.isclose(before.propensity, made.propensity)
    assert math.isclose(sum(made.propensity for made in choices.values()), 1.0)


@pytest.mark.parametrize("chosen", ALL_POLICIES, ids=lambda p: p.name)
def test_equal_engines_take_turns(chosen: Policy) -> None:
    made = [
        chosen.decide(request(), idle_fleet(), k, 0.0, Draws(1.0, k % 7 / 7, k % 2 / 2, k % 3 / 3)) for k in range(42)
    ]
    decodes = Counter(d.decode for d in made)
    if chosen.name == "length_threshold":  # 100 predicted tokens belong to the side of short answers
        assert set(decodes) == {2}
    elif chosen.name == "class_aware":  # the first engine prefers tight requests, and these are loose
        assert set(decodes) == {1, 2}
    elif chosen.name == "power_of_two":
        assert set(decodes) == {0, 1, 2}
    else:
        assert set(decodes.values()) == {14}
    prefills = Counter(d.prefill for d in made if d.action == REMOTE)
    assert not prefills or set(prefills.values()) == {21}


def test_without_prefill_engines_every_policy_goes_local() -> None:
    for chosen in ALL_POLICIES:
        made = chosen.decide(request(engines=(0, 3)), idle_fleet(0), 0, 0.0, GREEDY)
        assert made.action == LOCAL
        down = chosen.decide(request(), idle_fleet(prefill_up=[0.0, 0.0]), 0, 0.0, GREEDY)
        assert down.action == LOCAL


def test_reason_says_why_remote_was_not_possible() -> None:
    chosen = policy("round_robin")
    refused = chosen.decide(request(remote_allowed=False), idle_fleet(), 0, 0.0, GREEDY)
    assert situation.REASON_NAMES[refused.reason] == "unsupported_remote"
    alone = chosen.decide(request(), idle_fleet(prefill_up=[0.0, 0.0]), 0, 0.0, GREEDY)
    assert situation.REASON_NAMES[alone.reason] == "no_prefill_engine"
    assert alone.propensity == 1.0


def dynamo(**params: object) -> Policy:
    return policy("dynamo_style", params)


BLOCK = 16.0
# (prompt tokens, cached share, tokens queued on each prefill engine, threshold) -> action of Dynamo's isl_or_load
F29_DYNAMO = [
    (0.0, 0.0, 0.0, 2048.0, REMOTE),  # nothing is below a ratio of nothing
    (1.0, 0.0, 0.0, 2048.0, REMOTE),  # all of it is uncached: over the ratio
    (1.0, 0.0, 0.0, 0.0, REMOTE),  # a threshold of 0 never goes local by length
    (BLOCK - 1, 0.9, 0.0, 2048.0, LOCAL),
    (BLOCK, 0.9, 0.0, 2048.0, LOCAL),
    (BLOCK, 1.0, 0.0, 0.0, REMOTE),  # even when nothing is left to compute
    (BLOCK + 1, 1.0, 0.0, 2048.0, LOCAL),
    (1e6, 0.9, 0.0, 2048.0, REMOTE),  # 100,000 uncached tokens
    (1e6, 1.0, 0.0, 2048.0, LOCAL),
    (20480.0, 0.9, 0.0, 2048.0, REMOTE),  # equal to the threshold is not below it
    (1e6, 0.0, 50 * 1000.0, 2048.0, LOCAL),  # a busy prefill pool
    (1e6, 0.0, 4096.0, 2048.0, REMOTE),  # equal to busy is not busy
]


@pytest.mark.parametrize(("prompt", "share", "queued", "threshold", "action"), F29_DYNAMO)
def test_f29_dynamo_style_at_its_edges(
    prompt: float, share: float, queued: float, threshold: float, action: int
) -> None:
    chosen = dynamo(mode="isl_or_load", eff_isl_threshold_tokens=threshold)
    wanted = request(prompt, math.floor(prompt * share))
    made = chosen.decide(wanted, idle_fleet(prefill_tokens=[queued, queued]), 0, 0.0, GREEDY)
    assert made.action == action


def test_f29_busy_decode_engines_veto_local() -> None:
    chosen = dynamo(decode_busy_requests=5.0)
    cached = request(1000.0, 990.0)
    assert chosen.decide(cached, idle_fleet(decode_requests=[4.0] * 3), 0, 0.0, GREEDY).action == LOCAL
    assert chosen.decide(cached, idle_fleet(decode_requests=[5.0] * 3), 0, 0.0, GREEDY).action == REMOTE


# (prompt tokens, tokens queued on each prefill engine) -> action of the sample table
F29_TABLE = [
    (0.0, 0.0, LOCAL),
    (1.0, 0.0, LOCAL),
    (98.0, 0.0, LOCAL),
    (100.0, 0.0, REMOTE),
    (1e9, 0.0, REMOTE),
    (math.inf, 0.0, REMOTE),
    (math.nan, 0.0, LOCAL),  # an absent feature falls into the lowest bin
    (100.0, 3999.0, REMOTE),
    (100.0, 4000.0, LOCAL),  # a border belongs to the regime above it
    (100.0, 50 * 1000.0, LOCAL),
]


@pytest.mark.parametrize(("prompt", "queued", "action"), F29_TABLE)
def test_f29_table_at_its_edges(prompt: float, queued: float, action: int) -> None:
    chosen = policy("table", artifact=sample_artifact())
    made = chosen.decide(request(prompt), idle_fleet(prefill_tokens=[queued, queued]), 0, 0.0, GREEDY)
    assert made.action == action
    assert made.regime == (2 if queued >= 4000.0 else 0)


@pytest.mark.parametrize("cached", [0.0, 900.0, 1000.0])
def test_f29_features_use_uncached_tokens_of_live_engines(cached: float) -> None:
    wanted = request(1000.0)._replace(prefill_cached_tokens=[cached, 1000.0], decode_cached_tokens=[0.0, cached, 0.0])
    fleet = idle_fleet(prefill_up=[1.0, 0.0], prefill_tokens=[300.0, 9e9], decode_requests=[3.0, 6.0, 0.0])
    features = situation.features_of(wanted, fleet)
    assert features.uncached_prefill_tokens == 1000.0 - cached
    assert features.uncached_decode_tokens == 1000.0 - cached
    assert (features.prefill_pressure_tokens, features.decode_pressure_requests) == (300.0, 3.0)


def test_table_prefers_the_engine_that_holds_the_prefix_unless_it_is_busy() -> None:
    chosen = policy("table", artifact=sample_artifact())
    wanted = request(1000.0)._replace(prefill_cached_tokens=[0.0, 900.0])
    assert chosen.decide(wanted, idle_fleet(), 0, 0.0, GREEDY).prefill == 1
    busy = idle_fleet(prefill_tokens=[0.0, 3000.0])
    assert chosen.decide(wanted, busy, 0, 0.0, GREEDY).prefill == 0
    params = chosen.params
    loads = [placement.prefill_load(busy, params, wanted, i) for i in range(2)]
    assert loads == [0.0, pytest.approx(2.1)]


def test_local_decode_placement_counts_the_prefix_and_remote_does_not() -> None:
    params = list(astuple(POLICIES["table"][1]()))
    wanted = request(1000.0)._replace(decode_cached_tokens=[0.0, 0.0, 800.0])
    fleet = idle_fleet(decode_requests=[0.0, 0.0, 0.5])
    assert placement.place_decode(fleet, params, wanted, LOCAL, 0) == 2
    assert placement.place_decode(fleet, params, wanted, REMOTE, 0) == 0


def test_least_loaded_and_power_of_two_choose_less_load() -> None:
    fleet = idle_fleet(decode_requests=[5.0, 1.0, 3.0])
    assert policy("least_loaded").decide(request(), fleet, 0, 0.0, GREEDY).decode == 1
    for drawn in (0.0, 0.3, 0.6, 0.9):
        made = policy("power_of_two").decide(request(), fleet, 0, 0.0, Draws(1.0, drawn, drawn, drawn))
        assert made.decode != 0


def test_length_threshold_splits_the_pool_at_the_threshold() -> None:
    chosen = policy("length_threshold", {"threshold_tokens": 256, "long_share": 0.34})

    def decode(predicted: float, up: list[float]) -> int:
        wanted = request(predicted_output_tokens=predicted)
        return chosen.decide(wanted, idle_fleet(decode_up=up), 0, 0.0, GREEDY).decode

    assert decode(256.0, [1.0] * 3) == 0
    assert decode(255.0, [1.0] * 3) == 1
    assert decode(256.0, [0.0, 1.0, 1.0]) == 1  # its side is down: the whole pool serves


# (SLO class, requests on each decode engine, live engines) -> engine of class_aware; the first prefers tight requests
CLASS_AWARE = [
    (1, [3.0, 0.0, 0.0], [1.0, 1.0, 1.0], 0),
    (1, [5.0, 1.0, 0.0], [1.0, 1.0, 1.0], 2),  # five requests more: it is not worth it any longer
    (1, [9.0, 9.0, 9.0], [0.0, 1.0, 1.0], 1),  # its side is down: the other serves
    (0, [0.0, 6.0, 5.0], [1.0, 1.0, 1.0], 2),
    (0, [0.0, 8.0, 7.0], [1.0, 1.0, 1.0], 0),
    (0, [0.0, 8.0, 7.0], [1.0, 0.0, 0.0], 0),
]


@pytest.mark.parametrize(("slo_class", "requests", "up", "decode"), CLASS_AWARE)
def test_class_aware_prefers_its_side_until_that_is_so_many_requests_busier(
    slo_class: int, requests: list[float], up: list[float], decode: int
) -> None:
    chosen = policy("class_aware", {"tight_share": 0.3, "tight_added_requests": 4, "loose_added_requests": 6})
    fleet = idle_fleet(decode_requests=requests, decode_up=up)
    assert chosen.decide(request(slo_class=slo_class), fleet, 0, 0.0, GREEDY).decode == decode


@given(situations(), draws)
def test_class_aware_without_a_preference_is_dynamo_style(situation: tuple[Request, Fleet, int], drawn: Draws) -> None:
    wanted, fleet, rotation = situation
    shared = {"mode": "isl_or_load", "eff_isl_threshold_tokens": 30_000, "prefill_busy_tokens": 20_000}
    indifferent = policy("class_aware", {**shared, "tight_added_requests": 0, "loose_added_requests": 0})
    incumbent = policy("dynamo_style", shared)
    assert indifferent.decide(wanted, fleet, rotation, 0.1, drawn) == incumbent.decide(
        wanted, fleet, rotation, 0.1, drawn
    )


def test_marginal_cost_weighs_backlog_cache_and_kv_pressure() -> None:
    chosen = policy("marginal_cost")
    backlog = idle_fleet(prefill_tokens=[2000.0, 0.0], decode_tokens=[0.0, 50_000.0, 50_000.0])
    assert chosen.decide(request(), backlog, 0, 0.0, GREEDY)[1:3] == (1, 0)
    cached = request(4000.0)._replace(prefill_cached_tokens=[3500.0, 0.0])
    assert chosen.decide(cached, backlog, 0, 0.0, GREEDY).prefill == 0


def test_explored_choice_that_is_the_policys_own_has_both_shares() -> None:
    chosen = policy("always_local")
    made = chosen.decide(request(), idle_fleet(), 0, 0.5, Draws(0.0, 0.0, 0.0, 0.0))
    assert (made.action, made.decode, made.reason) == (LOCAL, 0, situation.REASON_EXPLORED)
    assert made.propensity == pytest.approx(0.5 + 0.5 / (2 * 3))


def test_f29_dynamo_defaults_are_dynamos() -> None:
    assert astuple(DynamoParams()) == (0.0, 2048.0, 0.7, 4096.0, 1e9)
