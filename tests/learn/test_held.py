"""Held requests in the simulator: who goes before whom, and that nobody is forgotten."""

from dataclasses import replace

import numpy as np
import pytest
from trace_cases import SMALL_SLO, SMALL_TOPOLOGY, random_trace, some_table

from learn.price_space import price_policy
from learn.simulation import Simulated, Topology, replay, simulate
from learn.trace import Trace
from serve_table.policy import Policy
from serve_table.situation import REMOTE
from serve_table.slo import LOOSE, TIGHT, targets_from_profile
from serve_table.step_time import A40_3B

ONE_PREFILL = Topology(1, 2, A40_3B)
SLO = targets_from_profile(A40_3B)


def burst(classes: list[int], prompts: list[int], apart_s: float = 0.001) -> Trace:
    """Requests that come one shortly after the other."""
    n = len(prompts)
    none = np.zeros(n, np.int64)
    return Trace(
        name="burst",
        arrival_s=np.arange(n) * apart_s,
        prompt_tokens=np.array(prompts),
        output_tokens=np.full(n, 20),
        slo_class=np.array(classes),
        chain_start=none,
        chain_length=none,
        block_ids=none[:0],
    )


def remote_only(**params: float) -> Policy:
    """The price, for which computing on a decode engine is never worth it."""
    return price_policy({"local_weight": 1000.0, "deadline_share": 1.0, **params}, ONE_PREFILL, SLO)


def run(trace: Trace, **params: float) -> Simulated:
    found = simulate(trace, ONE_PREFILL, remote_only(**params), SLO, 20.0)
    assert set(found.action) == {REMOTE}
    return found


def test_a_held_request_is_overtaken_by_one_of_an_earlier_deadline() -> None:
    trace = burst([LOOSE] * 5, [3000, 3000, 3000, 3000, 1000])
    at_once, held = run(trace), run(trace, hold_s=0.01)
    assert at_once.ttft_s[4] > max(at_once.ttft_s[:4]) - 0.1
    # The one that is under way is not broken off.
    assert held.ttft_s[0] <= at_once.ttft_s[0]
    assert held.ttft_s[4] < min(held.ttft_s[1:4])
    assert held.ttft_s[4] < 0.6 * at_once.ttft_s[4]


def test_only_whom_the_order_of_arrival_would_make_late_goes_before_others() -> None:
    # The tight one cannot wait for two documents; the short loose one can, and came after them.
    trace = burst([LOOSE, LOOSE, LOOSE, TIGHT, LOOSE], [3000, 3000, 3000, 2000, 2500])
    ttft_s = run(trace, hold_s=0.01, deadline_share=0.0, rush=1.0, late_hold=20.0).ttft_s
    assert ttft_s[3] < ttft_s[1] < ttft_s[2]
    unhurried = run(trace, hold_s=0.01, deadline_share=0.0, rush=0.0, late_hold=20.0).ttft_s
    assert unhurried[3] > max(unhurried[:3])


def test_what_is_late_anyway_goes_last_until_it_has_waited_too_long() -> None:
    # More work than the targets allow: some of the first to come are late in any order.
    prompts = [6000] * 12
    trace = burst([LOOSE] * 12, prompts, apart_s=0.02)
    patient, impatient = run(trace, hold_s=0.01, late_hold=50.0), run(trace, hold_s=0.01, late_hold=1.01)
    assert patient.goodput >= impatient.goodput
    assert max(patient.ttft_s) > 0.0 and np.all(np.isfinite(patient.ttft_s))
    first_late = int(np.argmin(patient.slo_met))
    assert impatient.ttft_s[first_late] <= patient.ttft_s[first_late]


def test_requests_of_one_deadline_go_in_the_order_they_came() -> None:
    trace = burst([LOOSE] * 6, [3000] * 6)
    assert np.all(np.diff(run(trace, hold_s=0.01, late_hold=20.0).ttft_s) > 0.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("requests_per_s", [40.0, 400.0])
def test_every_held_request_is_answered_alike_with_single_steps(seed: int, requests_per_s: float) -> None:
    trace = random_trace(seed, 150, requests_per_s)
    chosen = replace(
        price_policy({"hold_s": 0.003, "table_weight": 0.1}, SMALL_TOPOLOGY, SMALL_SLO), table=some_table()
    )
    fast, slow = (
        simulate(trace, SMALL_TOPOLOGY, chosen, SMALL_SLO, 12.0, macro_steps=macro_steps)
        for macro_steps in (True, False)
    )
    assert np.all(np.isfinite(fast.ttft_s))
    assert fast.ttft_s == pytest.approx(slow.ttft_s)
    assert np.array_equal(fast.decode, slow.decode)


def test_nothing_is_held_where_the_price_says_so() -> None:
    trace = random_trace(3, 150, 200.0)
    runs = [
        simulate(trace, SMALL_TOPOLOGY, price_policy({"hold_s": hold_s}, SMALL_TOPOLOGY, SMALL_SLO), SMALL_SLO, 12.0)
        for hold_s in (0.0, 1e6)
    ]
    assert np.array_equal(runs[0].ttft_s, runs[1].ttft_s)


def test_a_replay_of_choices_and_holds_gives_the_same_times() -> None:
    trace = burst([LOOSE] * 4 + [TIGHT] * 2, [4000, 3000, 2000, 3500, 200, 300])
    held = run(trace, hold_s=0.01)
    assert np.count_nonzero(held.held_s) >= 4
    choices = (held.action, held.prefill, held.decode)
    again = replay(trace, ONE_PREFILL, SLO, 20.0, *choices, held_s=held.held_s)
    assert again.ttft_s == pytest.approx(held.ttft_s)
    assert replay(trace, ONE_PREFILL, SLO, 20.0, *choices).ttft_s != pytest.approx(held.ttft_s)
