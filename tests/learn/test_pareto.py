"""The front: what no other point beats in every respect."""

from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from learn.pareto import front_of

SPACE = {"harm_weight": FloatDistribution(0.0, 99.0)}


def trial(
    number: float, goodput: float, latency_gain: float, tail: float, state: TrialState = TrialState.COMPLETE
) -> FrozenTrial:
    figures = {"goodput": goodput, "latency_gain": latency_gain, "ttft_p99_ratio": tail}
    return create_trial(
        state=state,
        value=goodput,
        params={"harm_weight": number},
        distributions=SPACE,
        user_attrs=figures | {"ttft_p90_ratio": 0.9, "tpot_p90_ratio": 1.1},
    )


def test_the_front_holds_each_end_and_drops_what_is_beaten_equal_or_pruned() -> None:
    trials = [
        trial(0, 0.90, 0.0, 1.0),
        trial(1, 0.95, -0.1, 1.2),
        trial(2, 0.90, 0.0, 1.0),  # equal to the first
        trial(3, 0.90, -0.1, 1.0),  # beaten by the first
        trial(4, 0.85, 0.2, 1.1),
        trial(5, 0.80, -0.5, 0.7),
        trial(6, 0.99, 0.9, 0.5, TrialState.PRUNED),
    ]
    front = front_of(trials)
    assert [point.params["harm_weight"] for point in front] == [1, 0, 4, 5]
    assert (front[0].goodput, front[0].value, front[0].ttft_p90_ratio, front[0].tpot_p90_ratio) == (
        0.95,
        0.95,
        0.9,
        1.1,
    )
    # A point that beats all leaves nothing else, wherever it comes.
    better = trial(7, 0.96, 0.3, 0.6)
    assert [point.params["harm_weight"] for point in front_of([better, *trials])] == [7]
    assert [point.params["harm_weight"] for point in front_of([*trials, better])] == [7]
    assert front_of([]) == []
