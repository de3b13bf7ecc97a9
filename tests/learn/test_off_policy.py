"""Off-policy estimators on logging sets of known truth, and in a simulated cluster, where requests interfere."""

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from simulated_journals import profile_times

from learn.off_policy import Estimate, OffPolicy, effective_rows, off_policy, on_policy
from learn.simulation import Simulated, Topology, replay, simulate
from learn.trace import Trace
from serve_table.policy import policy
from serve_table.situation import LOCAL, REMOTE
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

Floats = npt.NDArray[np.float64]

N_ROWS = 800
N_SEEDS = 200
N_CHOICES = 4
EXPLORE = 0.3
ESTIMATORS = ("ips", "snips", "dr")


def met_probability(x: Floats, choice: npt.NDArray[np.int64]) -> Floats:
    """Choice 0 fades with x, 1 gains, the others are middling."""
    logit = np.select([choice == 0, choice == 1], [2.0 - 4.0 * x, -2.0 + 4.0 * x], 0.3 * choice - x)
    return np.asarray(1.0 / (1.0 + np.exp(-logit)))


def candidate_choice(x: Floats) -> npt.NDArray[np.int64]:
    return np.where(x > 0.5, 1, 2)


GRID = (np.arange(100_000) + 0.5) / 100_000
TRUTH = float(met_probability(GRID, candidate_choice(GRID)).mean())


def evaluated(seed: int, propensity_error: float = 1.0, clip: float | None = None, model: bool = True) -> OffPolicy:
    """A logging set without interference: choice 0, or with probability EXPLORE any.

    propensity_error: factor on the explored choices' journaled propensities. model: whether the outcome model sees x.
    """
    rng = np.random.default_rng(seed)
    x = rng.random(N_ROWS)
    choice = np.where(rng.random(N_ROWS) < EXPLORE, rng.integers(0, N_CHOICES, N_ROWS), 0)
    reward = (rng.random(N_ROWS) < met_probability(x, choice)).astype(np.float64)
    probability = np.where(choice == 0, 1.0 - EXPLORE, 0.0) + EXPLORE / N_CHOICES
    probability = np.where(choice == 0, probability, probability * propensity_error)
    target = candidate_choice(x)

    def features(chosen: npt.NDArray[np.int64]) -> Floats:
        one_hot = np.eye(N_CHOICES)[chosen]
        return np.hstack([one_hot, one_hot * x[:, None]]) if model else np.zeros((N_ROWS, 1))

    return off_policy(reward, choice == target, probability, features(choice), features(target), clip)


@cache
def coverage(propensity_error: float = 1.0) -> dict[str, float]:
    """Share of N_SEEDS logging sets whose interval holds the truth, by estimator."""
    found = [evaluated(seed, propensity_error) for seed in range(N_SEEDS)]
    covered = {}
    for name in ESTIMATORS:
        estimates = [getattr(one, name) for one in found]
        covered[name] = float(np.mean([one.low <= TRUTH <= one.high for one in estimates]))
    return covered


@pytest.mark.parametrize("name", ESTIMATORS)
def test_without_interference_intervals_hold_the_truth_as_often_as_they_say(name: str) -> None:
    # Of 200 sets 95 % are 190, with a standard deviation of 3.
    assert 0.905 <= coverage()[name] <= 0.99


@pytest.mark.parametrize("name", ESTIMATORS)
def test_without_interference_the_mean_over_many_sets_is_the_truth(name: str) -> None:
    values = np.array([getattr(evaluated(seed), name).value for seed in range(N_SEEDS)])
    assert abs(values.mean() - TRUTH) < 3.0 * values.std() / np.sqrt(N_SEEDS)


def test_wrong_propensities_are_found_out_by_the_coverage() -> None:
    assert coverage(1.3)["ips"] < 0.8


def test_the_self_normalised_and_the_doubly_robust_vary_less() -> None:
    found = [evaluated(seed) for seed in range(N_SEEDS)]
    spread = {name: np.std([getattr(one, name).value for one in found]) for name in ESTIMATORS}
    assert spread["snips"] < 0.7 * spread["ips"]
    assert spread["dr"] < 0.7 * spread["ips"]


def test_doubly_robust_stands_on_the_propensities_where_the_model_knows_nothing() -> None:
    estimates = [evaluated(seed, model=False).dr for seed in range(N_SEEDS)]
    assert np.mean([one is not None and one.low <= TRUTH <= one.high for one in estimates]) >= 0.905


def test_doubly_robust_stands_on_the_model_where_the_propensities_are_wrong() -> None:
    ips_errors, dr_errors = [], []
    for seed in range(50):
        found = evaluated(seed, propensity_error=1.5)
        assert found.ips is not None and found.dr is not None
        ips_errors.append(found.ips.value - TRUTH)
        dr_errors.append(found.dr.value - TRUTH)
    assert abs(np.mean(ips_errors)) > 0.15
    assert abs(np.mean(dr_errors)) < 0.02


def test_intervals_allow_for_requests_that_share_their_luck() -> None:
    def covered(n_together: int, shuffled: bool) -> float:
        hits = []
        for seed in range(N_SEEDS):
            rng = np.random.default_rng(seed)
            reward = (np.repeat(rng.random(1500 // n_together), n_together) < 0.7).astype(np.float64)
            found = on_policy(rng.permutation(reward) if shuffled else reward)
            hits.append(found.low <= 0.7 <= found.high)
        return float(np.mean(hits))

    assert covered(15, shuffled=False) >= 0.905
    # Taken for independent, as they look when their order is lost, the same rows promise too much.
    assert covered(15, shuffled=True) < 0.6


def test_clipping_is_counted_and_biases_downwards() -> None:
    whole, clipped = evaluated(0), evaluated(0, clip=5.0)
    assert (whole.clipped, whole.largest_weight) == (0, pytest.approx(N_CHOICES / EXPLORE))
    assert (clipped.clipped, clipped.largest_weight) == (clipped.matched, 5.0)
    assert whole.ips is not None and clipped.ips is not None
    assert clipped.ips.value == pytest.approx(whole.ips.value * 5.0 * EXPLORE / N_CHOICES)


def test_effective_rows_are_the_rows_where_weights_are_equal_and_fewer_where_not() -> None:
    assert effective_rows(np.array([4.0, 0.0, 4.0, 4.0])) == pytest.approx(3.0)
    assert effective_rows(np.array([10.0, 0.1, 0.1])) == pytest.approx(1.0, abs=0.05)
    assert effective_rows(np.zeros(3)) == 0.0


@pytest.mark.parametrize("n_matched", [0, 1, 19])
def test_too_few_rows_of_the_candidates_choice_are_refused(n_matched: int) -> None:
    n = 300
    matched = np.arange(n) < n_matched
    features = np.zeros((n, 1))
    found = off_policy(np.ones(n), matched, np.full(n, 0.1), features, features)
    assert (found.ips, found.snips, found.dr) == (None, None, None)
    assert found.refusal == f"{n_matched} rows chose so, {n_matched} effective: at least 20 are needed"


def test_equal_outcomes_do_not_give_certainty() -> None:
    n = 300
    features = np.zeros((n, 1))
    found = off_policy(np.ones(n), np.arange(n) % 10 == 0, np.full(n, 0.1), features, features)
    assert found.snips is not None and found.dr is not None
    # Wilson's interval of 30 of 30.
    assert (found.snips.value, found.snips.low, found.snips.high) == (1.0, pytest.approx(0.886, abs=0.001), 1.0)
    assert found.dr.low < 0.9


# A cluster in which requests interfere.

TOPOLOGY = Topology(2, 2, profile_times(1.0, 1.0, 1.0), 0.002)
SLO = targets_from_profile(A40_3B)
N_REQUESTS = 600
RATE = 12.0


def loaded_trace(seed: int) -> Trace:
    """Long prompts at a rate that two decode engines bear only where prefill is done elsewhere."""
    rng = np.random.default_rng(seed)
    zeros = np.zeros(N_REQUESTS, np.int64)
    return Trace(
        name="loaded",
        arrival_s=np.cumsum(rng.exponential(1.0 / RATE, N_REQUESTS)),
        prompt_tokens=rng.integers(500, 3500, N_REQUESTS),
        output_tokens=rng.integers(50, 250, N_REQUESTS),
        slo_class=zeros,
        chain_start=zeros,
        chain_length=zeros,
        block_ids=zeros[:0],
    )


def local_estimates(run: Simulated) -> OffPolicy:
    """Of always prefilling locally, from a run of the exploring least-loaded policy, whose own choice is remote."""
    probability = np.where(run.action == REMOTE, 1.0 - EXPLORE / 2.0, EXPLORE / 2.0)
    local = (run.action == LOCAL).astype(np.float64)[:, None]
    return off_policy(run.slo_met.astype(np.float64), run.action == LOCAL, probability, local, np.ones_like(local))


def alone_goodput(trace: Trace, run: Simulated, seed: int) -> float:
    """Known truth of one request that goes local alone: each in turn, all others as they were executed."""
    rng = np.random.default_rng(seed)
    met = []
    for i in range(0, N_REQUESTS, 4):
        action, prefill, decode = run.action.copy(), run.prefill.copy(), run.decode.copy()
        action[i], prefill[i], decode[i] = LOCAL, -1, rng.integers(TOPOLOGY.decode_engines)
        met.append(replay(trace, TOPOLOGY, SLO, 150.0, action, prefill, decode).slo_met[i])
    return float(np.mean(met))


@pytest.mark.parametrize("seed", [0, 1])
def test_under_interference_the_estimates_are_of_a_request_that_deviates_alone(seed: int) -> None:
    trace = loaded_trace(seed)
    run = simulate(trace, TOPOLOGY, policy("least_loaded"), SLO, 150.0, seed, EXPLORE)
    everybody = simulate(trace, TOPOLOGY, policy("always_local"), SLO, 150.0, seed).goodput
    alone = alone_goodput(trace, run, seed)
    found = local_estimates(run)
    assert everybody < 0.05
    for name in ESTIMATORS:
        estimate: Estimate = getattr(found, name)
        assert estimate.low <= alone <= estimate.high
        # The narrow interval is far from what the cluster would do.
        assert estimate.low > everybody + 0.3
