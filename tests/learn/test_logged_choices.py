"""Logged choices: which rows tell of another policy, their propensities and rewards, and the whole way to estimates."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from explored_rows import explored_rows, true_goodput
from synthetic_rows import DECODE_ENGINES, journal_row

from learn.logged_choices import (
    LoggedChoices,
    action_features,
    candidate_choices,
    choice_features,
    logged_choices,
)
from learn.off_policy import off_policy
from serve_table.errors import JournalError
from serve_table.journal import Row
from serve_table.policy import Policy, policy
from serve_table.replay import request_and_fleet
from serve_table.situation import LOCAL, Draws

LEAST_LOADED = policy("least_loaded")
DYNAMO = policy("dynamo_style", {"eff_isl_threshold_tokens": 2000, "eff_isl_ratio_threshold": 1.05})


def changed(row: Row, **fields: Any) -> Row:
    return msgspec.structs.replace(row, **fields)


def full_choice_estimates(logged: LoggedChoices, candidate: Policy) -> Any:
    assert logged.propensity is not None
    chosen = candidate_choices(logged, candidate)
    matched = np.all([a == b for a, b in zip(logged.choices, chosen, strict=True)], axis=0)
    features = choice_features(logged, logged.choices), choice_features(logged, chosen)
    return off_policy(logged.rewards["goodput"], matched, logged.propensity, *features)


@pytest.mark.parametrize("candidate", [policy("always_local"), DYNAMO], ids=lambda one: one.name)
def test_from_rows_to_estimates_that_hold_the_truth(candidate: Policy) -> None:
    rows = explored_rows(1500, 3, LEAST_LOADED, explore=0.5)
    truth = true_goodput(rows, candidate)
    logged = logged_choices(rows, [LEAST_LOADED])
    found = full_choice_estimates(logged, candidate)
    assert abs(truth - logged.rewards["goodput"].mean()) > 0.05
    for estimate in (found.ips, found.snips, found.dr):
        assert estimate.low <= truth <= estimate.high
        assert estimate.high - estimate.low < 0.6


def test_propensities_of_the_action_are_the_frequencies_of_deciding_again() -> None:
    rows = explored_rows(6, 0, DYNAMO, explore=0.4)
    logged = logged_choices(rows, [DYNAMO])
    assert logged.action_propensity is not None
    rng = np.random.default_rng(1)
    for row, action, propensity in zip(logged.rows, logged.choices.action, logged.action_propensity, strict=True):
        request, fleet = request_and_fleet(row)
        n = 2000
        same = sum(
            DYNAMO.decide(request, fleet, row.rotation, row.explore, Draws(*rng.random(4))).action == action
            for _ in range(n)
        )
        assert same / n == pytest.approx(propensity, abs=0.05)


def test_where_remote_is_not_allowed_the_action_is_certain() -> None:
    row = explored_rows(1, 0, LEAST_LOADED)[0]
    request, fleet = request_and_fleet(changed(row, remote_allowed=False))
    found = LEAST_LOADED.decide(request, fleet, row.rotation, row.explore, Draws(*row.draws))
    refused = changed(
        row,
        remote_allowed=False,
        action="local",
        prefill_engine=None,
        decode_engine=DECODE_ENGINES[found.decode],
        propensity=found.propensity,
    )
    logged = logged_choices([refused], [LEAST_LOADED])
    assert logged.action_propensity is not None
    assert list(logged.action_propensity) == [1.0]


def test_failed_requests_kept_no_target_and_a_fallback_counts_for_what_was_decided() -> None:
    rows = [
        journal_row(0, slo_met=True),
        journal_row(1, slo_met=False, status="timeout", ttft_s=0.1, tpot_s=0.01),
        journal_row(2, slo_met=False, ttft_s=0.1, tpot_s=0.5),
        journal_row(3, slo_met=True, executed="local", executed_prefill_engine=None, fallback_reason="prefill_failed"),
    ]
    logged = logged_choices(rows)
    assert {name: list(reward) for name, reward in logged.rewards.items()} == {
        "goodput": [1.0, 0.0, 0.0, 1.0],
        "ttft": [1.0, 0.0, 1.0, 1.0],
        "tpot": [1.0, 0.0, 0.0, 1.0],
    }
    assert LOCAL not in logged.choices.action


def test_rows_that_tell_nothing_are_counted_by_their_reason() -> None:
    good = explored_rows(8, 0, LEAST_LOADED)
    fleet = good[3].fleet
    assert fleet is not None
    spoilt = [
        good[0],
        good[0],
        changed(good[1], fleet=None),
        changed(good[2], propensity=None),
        changed(good[3], fleet=msgspec.structs.replace(fleet, decode_up=[1.0])),
        changed(good[4], status="aborted", slo_met=None),
        changed(good[5], explore=0.0),
        changed(good[6], propensity=0.123),
        good[7],
    ]
    logged = logged_choices(spoilt, [LEAST_LOADED])
    assert [row.request_id for row in logged.rows] == [good[0].request_id, good[7].request_id]
    assert logged.left_out == dict.fromkeys(
        (
            "duplicate_request_id",
            "no_decision",
            "no_propensity",
            "invalid_row",
            "no_slo_outcome",
            "not_explored",
            "redecided_otherwise",
        ),
        1,
    )
    assert logged.supported_share == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("fields", "reason"), [({"explore": 0.0}, "not_explored"), ({"propensity": None}, "no_propensity")]
)
def test_a_journal_with_nothing_to_evaluate_is_one_line(fields: dict[str, Any], reason: str) -> None:
    rows = [journal_row(number, **fields) for number in range(3)]
    with pytest.raises(JournalError) as caught:
        logged_choices(rows)
    assert str(caught.value) == (
        f"none of 3 journal rows can be evaluated off-policy: 3 {reason}; journal with --explore above 0, "
        "as `rutter collect` does"
    )


def test_without_the_journals_own_policy_only_the_full_choice_has_a_propensity() -> None:
    rows = explored_rows(30, 0, DYNAMO)
    logged = logged_choices(rows, [LEAST_LOADED])
    assert logged.action_propensity is None
    assert DYNAMO.digest in logged.refusals["action"]
    assert logged.propensity is not None
    assert list(logged.propensity) == [row.propensity for row in rows]


def test_a_journal_of_power_of_two_has_a_propensity_of_the_action_only() -> None:
    chosen = policy("power_of_two")
    logged = logged_choices(explored_rows(30, 0, chosen), [chosen])
    assert logged.propensity is None
    assert "power_of_two" in logged.refusals["full"]
    assert logged.action_propensity is not None


def test_a_candidate_that_draws_does_not_use_the_draws_that_made_the_journal() -> None:
    rows = [
        changed(row, draws=[0.0, 0.0, 0.0, 0.0])
        for row in (journal_row(number, draws=[0.5] * 4) for number in range(300))
    ]
    decode = candidate_choices(logged_choices(rows), policy("power_of_two"), seed=1).decode
    assert set(Counter(decode.tolist())) == set(range(len(DECODE_ENGINES)))


def test_features_tell_a_row_with_its_own_choice_from_the_same_with_another() -> None:
    rows = explored_rows(40, 0, LEAST_LOADED)
    logged = logged_choices(rows, [LEAST_LOADED])
    other = candidate_choices(logged, policy("always_local"))
    same_action = logged.choices.action == other.action
    by_action = action_features(logged, logged.choices) == action_features(logged, other)
    assert list(by_action.all(axis=1)) == list(same_action)
    by_choice = choice_features(logged, logged.choices) == choice_features(logged, other)
    same_engines = same_action & (logged.choices.decode == other.decode)
    assert list(by_choice.all(axis=1)) == list(same_engines)
