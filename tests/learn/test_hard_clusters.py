"""DolphinRouting's clusters: one action a cluster in every load, on the least loaded engines."""

import numpy as np
import pytest
from small_training import small_training

from learn.hard_clusters import clusters_policy, clusters_space, clusters_start
from learn.lengths import predict_lengths
from serve_table.situation import LOCAL, REMOTE, Draws, Fleet, Request

GREEDY = Draws(1.0, 0.5, 0.5, 0.5)


def fleet(prefill: list[float], decode: list[float]) -> Fleet:
    p, d = len(prefill), len(decode)
    tokens = [1000.0 * value for value in prefill]
    return Fleet(prefill, tokens, [1.0] * p, decode, [0.0] * d, [0.0] * d, [1.0] * d)


def request(tokens: float) -> Request:
    predicted = float(predict_lengths(small_training().lengths, np.array([tokens]))[0])
    return Request(tokens, predicted, 0, [0.0] * 2, [0.0] * 4, True)


def test_the_space_is_one_action_a_cluster_and_starts_with_every_threshold() -> None:
    compiled = small_training().compiled
    space, start = clusters_space(compiled), clusters_start(compiled)
    assert len(space) == len(compiled.clusters)
    assert all(point.keys() == space.keys() for point in start)
    assert set(start[0].values()) == {"remote"}
    assert set(start[-1].values()) == {"local"}
    n_local = [list(point.values()).count("local") for point in start]
    assert n_local == sorted(set(n_local))


@pytest.mark.parametrize("busy", [0.0, 40.0])
def test_the_action_follows_from_the_cluster_whatever_the_load(busy: float) -> None:
    compiled = small_training().compiled
    short, long = request(100.0), request(6000.0)
    point = clusters_start(compiled)[1]
    chosen = clusters_policy(compiled, point)
    assert chosen.name == "clusters"
    for wanted, action in ((short, LOCAL), (long, REMOTE)):
        made = chosen.decide(wanted, fleet([busy] * 2, [busy] * 4), 0, 0.0, GREEDY)
        assert (made.action, made.regime) == (action, 0)
        assert point[f"action_{made.cluster}"] == ("local", "remote")[action]


def test_engines_of_fewest_requests_are_taken() -> None:
    compiled = small_training().compiled
    chosen = clusters_policy(compiled, clusters_start(compiled)[0])
    made = chosen.decide(request(1000.0), fleet([3.0, 2.0], [5.0, 4.0, 1.0, 2.0]), 0, 0.0, GREEDY)
    assert (made.prefill, made.decode) == (1, 2)
