"""Elastic roles in simulated runs, and what readers of journals make of whole requests."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from simulated_journals import journal_of
from synthetic_rows import FleetState, journal_row
from test_simulation import equal_runs
from trace_cases import SMALL_SLO, SMALL_TOPOLOGY, random_trace

from learn.frame import drop_reason
from learn.journal_trace import journal_trace
from learn.logged_choices import left_out_reason
from learn.price_space import price_policy
from learn.simulation import Topology, replay, simulate
from learn.trace import Trace
from serve_table.errors import TraceError
from serve_table.journal import Row
from serve_table.policy import policy
from serve_table.situation import LOCAL, REMOTE, WHOLE
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B, step_time_s

ELASTIC = replace(SMALL_TOPOLOGY, elastic=True)
SLO = targets_from_profile(A40_3B)


def whole_row(number: int, engine: str = "http://p1") -> Row:
    fleet = FleetState().row()
    names = ("decode_requests", "decode_tokens", "decode_prefill_tokens", "decode_up", "decode_cached_tokens")
    longer = msgspec.structs.replace(fleet, **{name: [*getattr(fleet, name), 0.0, 0.0] for name in names})
    return journal_row(number, action="whole", prefill_engine=None, decode_engine=engine, fleet=longer)


def test_an_unloaded_whole_request_takes_its_prefill_and_decode_steps() -> None:
    n = np.zeros(1, np.int64)
    trace = Trace("one", n * 1.0, n + 100, n + 3, n, n, n, n[:0])
    run = replay(trace, Topology(1, 1, A40_3B, 0.004, elastic=True), SLO, 100.0, n + WHOLE, n - 1, n + 1)
    step = A40_3B.step.as_list()
    assert run.ttft_s == pytest.approx([0.004 + step_time_s(step, 100.0, 0.0)])
    assert run.tpot_s == pytest.approx([(step_time_s(step, 1.0, 100.0) + step_time_s(step, 1.0, 101.0)) / 2])


def test_what_was_chosen_is_what_is_replayed() -> None:
    trace = random_trace(1, 200, 60.0)
    run = simulate(trace, ELASTIC, price_policy({}, SMALL_TOPOLOGY, SMALL_SLO), SMALL_SLO, 12.0)
    assert set(run.action) == {LOCAL, REMOTE, WHOLE}
    whole = run.action == WHOLE
    assert np.all(run.prefill[whole] == -1)
    assert set(run.decode[whole]) == {3, 4}
    assert np.all(run.decode[~whole] < 3)
    choices = (run.action, run.prefill, run.decode)
    again = replay(trace, ELASTIC, SMALL_SLO, 12.0, *choices, held_s=run.held_s)
    equal_runs(replace(run, propensity=again.propensity), again)
    with pytest.raises(TraceError, match="which 2P\\+3D lacks"):
        replay(trace, SMALL_TOPOLOGY, SMALL_SLO, 12.0, *choices)


@pytest.mark.parametrize("name", ["round_robin", "marginal_cost", "power_of_two"])
def test_other_policies_do_as_without(name: str) -> None:
    trace = random_trace(0)
    usual, elastic = (simulate(trace, t, policy(name), SMALL_SLO, 12.0, 3, 0.4) for t in (SMALL_TOPOLOGY, ELASTIC))
    equal_runs(usual, elastic)


def test_whole_requests_pay_where_answers_are_long() -> None:
    rng = np.random.default_rng(5)
    n = 300
    none = np.zeros(n, np.int64)
    trace = Trace(
        name="reasoning",
        arrival_s=np.cumsum(rng.exponential(0.15, n)),
        prompt_tokens=rng.integers(50, 800, n),
        output_tokens=rng.integers(300, 1500, n),
        slo_class=(rng.random(n) < 0.3).astype(np.int64),
        chain_start=none,
        chain_length=none,
        block_ids=none[:0],
    )
    usual, elastic = (Topology(2, 2, A40_3B, elastic=elastic) for elastic in (False, True))
    price = price_policy({}, usual, SLO)
    before = simulate(trace, usual, price, SLO, 900.0).goodput
    assert simulate(trace, elastic, price, SLO, 900.0).goodput > before + 0.1


def test_a_journal_with_whole_requests_is_replayed_on_an_elastic_cluster() -> None:
    run = journal_trace([journal_row(0), whole_row(1), whole_row(2, "http://p0")])
    assert run.elastic
    assert run.action.tolist() == [REMOTE, WHOLE, WHOLE]
    assert run.decode.tolist()[1:] == [5, 4]
    assert len(run.decode_engines) == 4
    topology = Topology(2, 4, A40_3B, elastic=run.elastic)
    again = replay(run.trace, topology, SLO, run.predicted_tokens, run.action, run.prefill, run.decode)
    assert np.all(np.isfinite(again.ttft_s))
    assert not journal_of(random_trace(0), SMALL_TOPOLOGY).elastic


def test_training_leaves_whole_rows_out_and_off_policy_all_of_an_elastic_fleet() -> None:
    whole = whole_row(0)
    assert (drop_reason(whole), left_out_reason(whole)) == ("whole", "elastic")
    local = msgspec.structs.replace(
        whole, action="local", executed="local", decode_engine="http://d0", executed_decode_engine="http://d0"
    )
    assert (drop_reason(local), left_out_reason(local)) == (None, "elastic")
    assert (drop_reason(journal_row(1)), left_out_reason(journal_row(1))) == (None, None)
