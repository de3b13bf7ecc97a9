"""Cost constants: known ones are recovered from journals that the simulator made with them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from simulated_journals import journal_of, profile_times

from learn.costs import CostFit, fit_costs, fitted_topology
from learn.journal_trace import JournalTrace
from learn.simulation import Topology, simulate
from pipelines.workloads import make_workload
from serve_table.policy import policy
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B, HardwareProfile

SLO = targets_from_profile(A40_3B)


@dataclass(frozen=True)
class Factors:
    """Of a cluster's times over the profile's; overhead_s: of a leg."""

    decode: float
    prefill: float
    handoff: float = 2.0
    overhead_s: float = 0.002

    def profile(self) -> HardwareProfile:
        return profile_times(self.decode, self.prefill, self.handoff)

    def journal(self, n_requests: int = 400, seed: int = 0, **engines: int) -> JournalTrace:
        """A run of the mixed workload on such a cluster, near its saturation."""
        topology = Topology(engines.get("prefill", 2), engines.get("decode", 4), self.profile(), self.overhead_s)
        rate = 2.0 * topology.decode_engines / max(self.decode, self.prefill, 1.0)
        return journal_of(make_workload("mixed", n_requests, seed, rate), topology, seed=seed)


def found_factors(fit: CostFit) -> Mapping[str, float]:
    step, handoff = fit.costs.step_time, fit.costs.handoff
    return {
        "decode": step.floor_s / A40_3B.step.floor_s,
        "prefill": step.per_token_beyond_s / A40_3B.step.per_token_beyond_s,
        "handoff": handoff.latency_s / A40_3B.handoff.latency_s,
    }


def spoilt(journal: JournalTrace, outliers: float, sigma: float) -> JournalTrace:
    """The same with log-normal noise on every time, and a share of rows ten times off in either direction."""
    rng = np.random.default_rng(1)
    n = len(journal.trace)
    wrong = np.where(rng.random((2, n)) < outliers, rng.choice([0.1, 10.0], (2, n)), 1.0)
    noise = rng.lognormal(0.0, sigma, (2, n)) * wrong
    return replace(journal, ttft_s=journal.ttft_s * noise[0], tpot_s=journal.tpot_s * noise[1])


@pytest.mark.parametrize(("decode", "prefill"), [(0.7, 1.3), (1.3, 0.7), (0.7, 7.4), (7.4, 7.4)])
def test_constants_that_differ_from_the_profile_are_recovered(decode: float, prefill: float) -> None:
    fit = fit_costs([Factors(decode, prefill).journal()], A40_3B, SLO)
    found = found_factors(fit)
    assert found["decode"] == pytest.approx(decode, rel=0.02)
    assert found["prefill"] == pytest.approx(prefill, rel=0.05)
    assert fit.ttft_error < 0.1
    assert fit.tpot_error < 0.01
    assert fit.ttft_error <= fit.ttft_error_before
    if decode < 1.0:
        # Where steps are long, a hand-off and the overhead of a leg vanish in the wait for the next step.
        assert found["handoff"] == pytest.approx(2.0, rel=0.1)
        assert fit.costs.overhead_s == pytest.approx(0.002, abs=0.001)


@pytest.mark.parametrize(("outliers", "sigma"), [(0.1, 0.0), (0.1, 0.2)])
def test_outliers_and_noise_do_not_move_the_constants_far(outliers: float, sigma: float) -> None:
    journal = spoilt(Factors(0.7, 1.3).journal(), outliers, sigma)
    found = found_factors(fit_costs([journal], A40_3B, SLO))
    assert found["decode"] == pytest.approx(0.7, rel=0.03)
    assert found["prefill"] == pytest.approx(1.3, rel=0.05)


def test_several_runs_are_fitted_together_and_equal_rows_give_equal_constants() -> None:
    journals = [Factors(1.3, 0.7).journal(100, seed) for seed in (0, 1)]
    fit = fit_costs(journals, A40_3B, SLO)
    assert fit.rows == 200
    assert found_factors(fit)["decode"] == pytest.approx(1.3, rel=0.02)
    assert fit_costs(journals, A40_3B, SLO) == fit


def test_fitted_costs_predict_another_policy_s_goodput() -> None:
    truth = Factors(1.3, 1.3)
    fit = fit_costs([truth.journal()], A40_3B, SLO)
    trace = make_workload("mixed", 800, 9, 7.0)
    fitted = fitted_topology(2, 4, A40_3B, fit.costs)
    chosen = policy("round_robin")
    real = simulate(trace, Topology(2, 4, truth.profile(), truth.overhead_s), chosen, SLO, 200.0).goodput
    assert abs(simulate(trace, fitted, chosen, SLO, 200.0).goodput - real) < 0.03
    assert abs(simulate(trace, Topology(2, 4, A40_3B, 0.003), chosen, SLO, 200.0).goodput - real) > 0.05


def test_a_journal_of_local_requests_only_says_all_but_the_handoff() -> None:
    trace = make_workload("mixed", 200, 0, 4.0)
    topology = Topology(0, 4, profile_times(1.3, 0.7, 2.0), 0.002)
    journal = journal_of(trace, topology, "always_local", explore=0.0)
    assert journal.prefill_engines == ()
    fit = fit_costs([journal], A40_3B, SLO)
    found = found_factors(fit)
    assert found["decode"] == pytest.approx(1.3, rel=0.02)
    assert found["prefill"] == pytest.approx(0.7, rel=0.05)
    # Nothing was handed off, so the profile's constant stands.
    assert found["handoff"] == pytest.approx(1.0, rel=0.1)


def test_one_engine_of_each_kind_and_sixty_rows_are_enough_for_the_decode_step() -> None:
    fit = fit_costs([Factors(1.3, 1.3).journal(60, prefill=1, decode=1)], A40_3B, SLO)
    assert found_factors(fit)["decode"] == pytest.approx(1.3, rel=0.05)
    assert fit.rows == 60


def test_missing_times_are_ignored_and_said_to_be_unknown() -> None:
    journal = Factors(1.3, 1.3).journal(120)
    without_tpot = replace(journal, tpot_s=np.full(len(journal.trace), np.nan))
    fit = fit_costs([without_tpot], A40_3B, SLO)
    assert np.isfinite(fit.costs.step_time.as_list()).all()
    assert "TPOT unknown -> unknown" in fit.lines()[0]
    assert fit.ttft_error < 0.15
    nothing = replace(without_tpot, ttft_s=np.full(len(journal.trace), np.nan))
    kept = fit_costs([nothing], A40_3B, SLO)
    assert kept.costs.step_time.floor_s == pytest.approx(A40_3B.step.floor_s, rel=0.02)
    assert not any("nan" in line for line in kept.lines())
