"""The compiled simulator: against the reference cluster, its events, its decisions, the router's view."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_cases import SMALL
from reference_cluster import ReferenceCluster
from trace_cases import SMALL_SLO, SMALL_TOPOLOGY, every_policy, random_trace

from learn import simulation
from learn.core import NONE
from learn.decision_arrays import table_arrays
from learn.events import drop_first_event, new_events, push_event
from learn.routing import decide
from learn.simulation import Topology, replay, simulate
from learn.trace import Trace
from serve_table import situation
from serve_table.decision import PRICE
from serve_table.harm import N_STALLS, Residents
from serve_table.policy import Policy
from serve_table.situation import WHOLE, Draws, Fleet, Request
from serve_table.step_time import Handoff, StepTime

TOPOLOGIES = [SMALL_TOPOLOGY, Topology(1, 1, replace(SMALL, kv_tokens=176), 0.00077), Topology(0, 2, SMALL, 0.0)]


# Binary fractions: steps, hand-offs, overheads and arrivals fall on the same times, exactly.
TIED = replace(SMALL, step=StepTime(0.25, 0.0, 0.0, 0.0, 0.0), handoff=Handoff(0.25, 0.0), kv_tokens=240)


@pytest.mark.parametrize("seed", range(4))
def test_equal_times_are_taken_in_the_documented_order(seed: int) -> None:
    trace = random_trace(seed, requests_per_s=4.0)
    trace = replace(trace, arrival_s=np.round(trace.arrival_s * 4.0) / 4.0)
    assert_replay_agrees(trace, Topology(2, 3, TIED, [0.0, 0.25][seed % 2]), seed)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_replays_agree_with_the_reference_cluster(seed: int, topology: Topology) -> None:
    assert_replay_agrees(random_trace(seed, requests_per_s=[8.0, 60.0][seed % 2]), topology, seed)


def assert_replay_agrees(trace: Trace, topology: Topology, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = len(trace)
    decode = rng.integers(0, topology.decode_engines, n)
    action = rng.integers(0, 2, n) if topology.prefill_engines else np.zeros(n, np.int64)
    prefill = np.where(action == situation.REMOTE, rng.integers(0, max(topology.prefill_engines, 1), n), -1)
    simulated = replay(trace, topology, SMALL_SLO, 10.0, action, prefill, decode)
    cluster = ReferenceCluster(trace, topology, action, prefill, decode)
    cluster.run()
    legs = [cluster.last_legs[i] for i in range(n)]
    ttft_s = [leg.first_token_s - arrival_s for leg, arrival_s in zip(legs, trace.arrival_s, strict=True)]
    assert simulated.ttft_s == pytest.approx(ttft_s, abs=1e-9)
    span_s = np.array([leg.finish_s - leg.first_token_s for leg in legs])
    expected = np.divide(span_s, trace.output_tokens - 1, out=np.full(n, np.nan), where=trace.output_tokens > 1)
    assert simulated.tpot_s == pytest.approx(expected, abs=1e-9, nan_ok=True)
    hit_legs = [cluster.first_legs.get(i, cluster.last_legs[i]) for i in range(n)]
    assert list(simulated.cached_tokens) == [leg.cached_tokens for leg in hit_legs]
    assert simulated.preemptions == sum(engine.preemptions for engine in cluster.engines)
    assert all(len(e.pool.free) == topology.profile.kv_tokens // SMALL.block_tokens for e in cluster.engines)


def test_the_reference_traces_preempt_and_hit_the_prefix_cache() -> None:
    runs = [
        simulate(random_trace(seed, requests_per_s=60.0), TOPOLOGIES[1], every_policy()[0], SMALL_SLO, 10.0)
        for seed in (1, 3)
    ]
    assert sum(run.preemptions for run in runs) > 0
    assert sum(run.cached_tokens.sum() for run in runs) > 0


@pytest.mark.parametrize("chosen", every_policy(), ids=lambda chosen: chosen.name)
def test_the_routers_view_is_empty_again_and_nothing_holds_a_block(
    chosen: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, Any] = {}

    def keep(name: str) -> None:
        make = getattr(simulation, name)

        def kept_make(*args: Any, **kwargs: Any) -> Any:
            kept[name] = make(*args, **kwargs)
            return kept[name]

        monkeypatch.setattr(simulation, name, kept_make)

    keep("new_fleet")
    keep("new_core")
    keep("new_bound")
    simulate(random_trace(7), SMALL_TOPOLOGY, chosen, SMALL_SLO, 10.0, explore=0.2)
    fleet = kept["new_fleet"]
    for name in ("prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens", "decode_prefill_tokens"):
        assert np.abs(getattr(fleet, name)).max() < 1e-9, name
    bound = kept["new_bound"]
    assert not bound.sums.any() and not bound.own.any()
    assert set(bound.first) == {NONE}
    engines = kept["new_core"].engines
    assert list(engines.free_blocks) == list(engines.kv_blocks)
    assert engines.busy.sum() == engines.decoding.sum() == engines.waiting.sum() == 0
    assert kept["new_core"].entry_references.max() == 0


def test_events_come_by_time_and_of_equal_times_in_the_order_they_were_made() -> None:
    rng = np.random.default_rng(3)
    events = new_events(200)
    pending: list[tuple[float, int]] = []
    for made in range(400):
        if len(pending) < 100 and rng.random() < 0.6:
            time_s = float(rng.integers(0, 12))
            push_event(events, time_s, made % 2, made)
            pending.append((time_s, made))
        elif pending:
            first = min(pending)
            assert (events.time_s[0], events.sequence[0], events.kind[0]) == (first[0], first[1], first[1] % 2)
            pending.remove(first)
            drop_first_event(events)
    assert events.size[0] == len(pending)


def test_requests_that_arrive_at_the_same_time_are_served_in_their_order() -> None:
    n = 40
    trace = replace(random_trace(0, n), arrival_s=np.zeros(n), chain_length=np.zeros(n, np.int64))
    zeros = np.zeros(n, np.int64)
    simulated = replay(trace, Topology(0, 1, SMALL, 0.001), SMALL_SLO, 10.0, zeros, zeros - 1, zeros)
    assert np.all(np.diff(simulated.ttft_s) >= 0.0)


def random_request(rng: np.random.Generator, n_prefill: int, n_decode: int) -> Request:
    prompt = float(rng.integers(1, 9000))
    return Request(
        prompt,
        float(rng.choice([rng.integers(1, 2000), rng.random() * 500])),
        int(rng.integers(0, 2)),
        (rng.random(n_prefill) < 0.5) * rng.integers(0, 9) / 8.0 * prompt,
        (rng.random(n_decode) < 0.5) * rng.integers(0, 9) / 8.0 * prompt,
        bool(rng.random() < 0.9),
    )


def random_fleet(rng: np.random.Generator, n_prefill: int, n_decode: int, whole_engines: int = 0) -> Fleet:
    """Small whole numbers, so that ties happen; some engines down, one decode engine up.

    n_decode: with the whole engines.
    """
    prefill_up = (rng.random(n_prefill) < 0.8).astype(np.float64)
    decode_up = (rng.random(n_decode) < 0.8).astype(np.float64)
    decode_up[rng.integers(n_decode - whole_engines)] = 1.0
    whole = [rng.integers(0, 4, n).astype(np.float64) for n in (n_prefill, n_prefill, n_decode, n_decode, n_decode)]
    decode = (whole[2], 2000.0 * whole[3], 700.0 * whole[4], decode_up)
    return Fleet(whole[0], 3000.0 * whole[1], prefill_up, *decode, whole_engines)


def random_residents(rng: np.random.Generator, n_prefill: int, n_decode: int, whole_engines: int) -> Any:
    """Sums of shares that grow with the stall, for as many residents as not; nothing known of them now and then."""
    if rng.random() < 0.1:
        return Residents(1.0, np.zeros(0), np.zeros(0), (), np.zeros(0))
    missing = np.cumsum(rng.random((n_decode, N_STALLS)), axis=1)
    rises = 100.0 * rng.random((n_decode, N_STALLS))
    counts = np.floor(rng.random((n_decode, 2)) * 50_000.0)
    since_s, prefilled = 1.0 - 0.2 * rng.random(n_prefill), 100_000.0 * rng.random(whole_engines)
    return Residents(1.0, since_s, np.hstack([missing, rises, counts]).ravel(), (), prefilled)


@pytest.mark.parametrize("chosen", every_policy(), ids=lambda chosen: chosen.name)
def test_compiled_and_plain_decisions_agree(chosen: Policy) -> None:
    rng = np.random.default_rng(chosen.number)
    arrays = table_arrays(chosen.table)
    params = np.asarray(chosen.params or [0.0])
    seen = set()
    for i in range(600):
        n_prefill, n_decode = int(rng.integers(0, 4)), int(rng.integers(1, 6))
        whole_engines = n_prefill if chosen.number == PRICE and i % 2 else 0
        n_decode += whole_engines
        request = random_request(rng, n_prefill, n_decode)
        fleet = random_fleet(rng, n_prefill, n_decode, whole_engines)
        draws = Draws(*(float(draw) for draw in rng.random(4)))
        explore = float(rng.choice([0.0, 0.3, 1.0]))
        residents = random_residents(rng, n_prefill, n_decode, whole_engines)
        compiled = decide(chosen.number, params, arrays, request, fleet, i, explore, draws, residents)
        listed_request = request._replace(
            prefill_cached_tokens=request.prefill_cached_tokens.tolist(),
            decode_cached_tokens=request.decode_cached_tokens.tolist(),
        )
        listed_fleet = Fleet(*(column.tolist() for column in fleet[:-1]), whole_engines=fleet.whole_engines)  # type: ignore[misc]
        columns = (residents.prefill_since_s, residents.shares, residents.prefilled_tokens)
        since_s, shares, prefilled = (column.tolist() for column in columns)
        listed = Residents(residents.now_s, since_s, shares, (), prefilled)
        plain = chosen.decide(listed_request, listed_fleet, i, explore, draws, listed)
        assert tuple(compiled) == tuple(plain)
        seen.add((plain.action, plain.reason))
    assert (WHOLE in {action for action, _ in seen}) == (chosen.number == PRICE)
    assert {reason for _, reason in seen} >= {situation.REASON_POLICY, situation.REASON_EXPLORED}
