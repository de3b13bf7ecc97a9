"""Policies by name; a mistyped parameter is an error at the start (F29)."""

from dataclasses import astuple, replace

import pytest
from sample_artifact import sample_artifact

from serve_table.artifact_metadata import LearnedForm
from serve_table.errors import ConfigError
from serve_table.policy import POLICIES, policies_of, policy


def test_every_policy_is_made_from_its_name() -> None:
    made = [policy(name, artifact=sample_artifact()) for name in POLICIES]
    assert [p.name for p in made] == list(POLICIES)
    assert len({p.digest for p in made}) == len(made)


def test_params_replace_defaults_in_their_order() -> None:
    made = policy("dynamo_style", {"mode": "prefill_load", "prefill_busy_tokens": 7})
    assert made.params == [1.0, 2048.0, 0.7, 7.0, 1e9]
    assert made.digest != policy("dynamo_style").digest
    assert policy("length_threshold", {"threshold_tokens": 256}).digest == policy("length_threshold").digest
    assert policy("class_aware", {"mode": "isl_or_load", "tight_share": 0.5}).params[:6] == [
        *(2.0, 2048.0, 0.7, 4096.0, 1e9),
        0.5,
    ]


def test_the_uncalibrated_marginal_cost_router_differs_in_its_decode_time_alone() -> None:
    calibrated, assumed = policy("marginal_cost").params, policy("marginal_cost_uncalibrated").params
    assert assumed[1] == pytest.approx(calibrated[1] / 7.4)
    assert [assumed[0], *assumed[2:]] == [calibrated[0], *calibrated[2:]]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("round_robbin", {}, "unknown policy 'round_robbin'; known: round_robin"),
        ("dynamo_style", {"eff_isl_treshold_tokens": 1}, "no parameter 'eff_isl_treshold_tokens'; known: mode"),
        ("round_robin", {"x": 1}, "no parameter 'x'; known: none"),
        ("length_threshold", {"threshold_tokens": -1}, "must be a finite number"),
        ("length_threshold", {"threshold_tokens": float("nan")}, "must be a finite number"),
        ("length_threshold", {"threshold_tokens": True}, "must be a finite number"),
        ("dynamo_style", {"mode": "sometimes"}, "must be a finite number"),
        ("table", {}, "needs --artifact"),
        ("price", {"tpot_width": 0}, "'tpot_width' of policy 'price' must be greater than 0"),
        ("price", {"kv_tokens": 0}, "'kv_tokens' of policy 'price' must be greater than 0"),
    ],
)
def test_f29_wrong_policies_and_parameters_are_refused(name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(name, params)
    assert message in str(caught.value)


def test_table_takes_its_parameters_from_the_artifact_alone() -> None:
    artifact = sample_artifact()
    made = policy("table", artifact=artifact)
    assert (made.params, made.digest) == (artifact.params(), artifact.digest())
    with pytest.raises(ConfigError, match="from the artifact"):
        policy("table", {"decode_token": 1}, artifact)


def test_the_price_has_an_artifact_s_parameters_under_those_given() -> None:
    artifact = sample_artifact()
    assert policy("price", artifact=artifact).params == list(astuple(artifact.price()))
    assert policy("price", artifact=artifact).digest != policy("price").digest
    given = policy("price", {"harm_weight": 0.25}, artifact).params
    assert given == list(astuple(replace(artifact.price(), harm_weight=0.25)))


@pytest.mark.parametrize("form", ["table", "price"])
def test_rutter_is_what_its_artifact_says(form: LearnedForm) -> None:
    artifact = sample_artifact(form)
    made = policy("rutter", artifact=artifact)
    same = policy(form, artifact=artifact)
    assert (made.number, made.params) == (same.number, same.params)
    assert [found.digest for found in policies_of(artifact)].count(made.digest) == 1
    with pytest.raises(ConfigError, match="'rutter' needs --artifact"):
        policy("rutter")
