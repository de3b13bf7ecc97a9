"""Policies by name: their constants for `serve_table.decision`, and their parameters.

A policy is a number, a list of parameters and a table; `serve_table.decision.decide` does the rest. Parameters
are frozen records whose fields, in order, are the `params` that the decision function documents.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

from serve_table import decision
from serve_table.artifact import Artifact, digest_of, empty_table
from serve_table.errors import ConfigError
from serve_table.harm import NO_RESIDENTS, Residents
from serve_table.lookup import Table
from serve_table.price_params import PriceParams, with_constants
from serve_table.situation import Decision, Draws, Fleet, Request

DYNAMO_POLICIES = ("isl_bounding", "prefill_load", "isl_or_load")


@dataclass(frozen=True)
class NoParams:
    """Policies that have nothing to set."""


@dataclass(frozen=True)
class LengthThresholdParams:
    """Answers predicted at or above the threshold go to their own share of the decode engines."""

    threshold_tokens: float = 256.0
    long_share: float = 0.5


@dataclass(frozen=True)
class DynamoParams:
    """Conditional disaggregation as NVIDIA Dynamo 1.6.1 has it; mode indexes DYNAMO_POLICIES."""

    mode: float = 0.0
    eff_isl_threshold_tokens: float = 2048.0
    eff_isl_ratio_threshold: float = 0.7
    prefill_busy_tokens: float = 4096.0
    decode_busy_requests: float = 1e9


@dataclass(frozen=True)
class ClassAwareParams(DynamoParams):
    """Dynamo's rule with a share of the decode engines preferring tight requests; the other side counts so many
    requests busier for a request of the class.
    """

    tight_share: float = 0.3
    tight_added_requests: float = 8.0
    loose_added_requests: float = 8.0


@dataclass(frozen=True)
class MarginalCostParams:
    """Cost constants of the marginal-cost router; defaults from the a40-3b profile."""

    prefill_token_s: float = 0.00005
    decode_token_s: float = 0.000025
    kv_tokens: float = 60_000.0
    kv_pressure_s: float = 0.5
    tight_multiplier: float = 2.0


@dataclass(frozen=True)
class UncalibratedMarginalCostParams(MarginalCostParams):
    """The same before calibration: arXiv 2609.16206 reports an assumed decode time 7.4 times too small."""

    decode_token_s: float = 0.000025 / 7.4


@dataclass(frozen=True)
class PlacementParams:
    """The table's placement weights; token weights are per 1,000 tokens."""

    prefill_request: float = 0.0
    prefill_token: float = 1.0
    prefill_uncached: float = 1.0
    decode_request: float = 1.0
    decode_token: float = 0.0
    decode_local_prefill: float = 2.0
    decode_uncached: float = 1.0


Params = NoParams | LengthThresholdParams | DynamoParams | MarginalCostParams | PlacementParams | PriceParams

POLICIES: Mapping[str, tuple[int, type[Params]]] = {
    "round_robin": (decision.ROUND_ROBIN, NoParams),
    "least_loaded": (decision.LEAST_LOADED, NoParams),
    "length_threshold": (decision.LENGTH_THRESHOLD, LengthThresholdParams),
    "power_of_two": (decision.POWER_OF_TWO, NoParams),
    "always_local": (decision.ALWAYS_LOCAL, NoParams),
    "dynamo_style": (decision.DYNAMO_STYLE, DynamoParams),
    "class_aware": (decision.CLASS_AWARE, ClassAwareParams),
    "marginal_cost": (decision.MARGINAL_COST, MarginalCostParams),
    "marginal_cost_uncalibrated": (decision.MARGINAL_COST, UncalibratedMarginalCostParams),
    "table": (decision.TABLE, PlacementParams),
    "price": (decision.PRICE, PriceParams),
    "rutter": (decision.PRICE, PriceParams),
}
LEARNED_POLICIES = ("rutter", "price", "table")
"""Those of an artifact: the one of the other two that training found the better, and both."""
OF_AN_ARTIFACT = ("rutter", "table")
"""Those that have no parameters but an artifact's."""


@dataclass(frozen=True)
class Policy:
    """A named policy ready to decide; digest names its exact parameters and table."""

    name: str
    number: int
    params: list[float]
    table: Table
    digest: str

    def decide(
        self,
        request: Request,
        fleet: Fleet,
        rotation: int,
        explore: float,
        draws: Draws,
        residents: Residents = NO_RESIDENTS,
    ) -> Decision:
        """The decision; residents: only the price reads them."""
        params: Sequence[float] = self.params
        if self.number == decision.PRICE:
            params = with_constants(params, residents.constants)
        return decision.decide(self.number, params, self.table, request, fleet, rotation, explore, draws, residents)


def policy(name: str, given: Mapping[str, Any] | None = None, artifact: Artifact | None = None) -> Policy:
    """The policy of that name with the given parameters over its defaults.

    The price has an artifact's parameters under those given. Raises ConfigError for an unknown name, an unknown or
    non-numeric parameter, and for `table` and `rutter` where parameters are given (their artifact has them) or there is
    no artifact.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    number, params_type = POLICIES[name]
    if name in OF_AN_ARTIFACT:
        if artifact is None:
            raise ConfigError(f"policy {name!r} needs --artifact FILE; make one with `rutter export`")
        if given:
            raise ConfigError(f"policy {name!r} takes its parameters from the artifact; leave out --policy-params")
        digest = artifact.digest()
        if name == "rutter":
            digest = digest_of(f"{name} {digest}".encode())
            if artifact.metadata.policy == "price":
                return Policy(name, decision.PRICE, _as_list(artifact.price()), artifact.table(), digest)
        return Policy(name, decision.TABLE, artifact.params(), artifact.table(), digest)
    given = dict(given or {})
    table = empty_table()
    named = [name]
    if name == "price" and artifact is not None:
        given = {**asdict(artifact.price()), **given}
        table = artifact.table()
        named.append(artifact.digest())
    params = checked_params(name, params_type, given)
    digest = hashlib.sha256(json.dumps([*named, asdict(params)], sort_keys=True).encode()).hexdigest()[:16]
    return Policy(name, number, _as_list(params), table, digest)


def _as_list(params: Params) -> list[float]:
    return [float(value) for value in astuple(params)]


def policies_of(artifact: Artifact) -> list[Policy]:
    """Every policy of an artifact, as journal rows name them."""
    return [policy(name, artifact=artifact) for name in LEARNED_POLICIES]


def checked_params(name: str, params_type: type[Params], given: Mapping[str, Any]) -> Params:
    """A record of that type from the given values; ConfigError names what does not fit."""
    known = [field.name for field in fields(params_type)]
    values: dict[str, float] = {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"policy {name!r} has no parameter {key!r}; known: {', '.join(known) or 'none'}")
        if issubclass(params_type, DynamoParams) and key == "mode" and value in DYNAMO_POLICIES:
            value = DYNAMO_POLICIES.index(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ConfigError(f"parameter {key!r} of policy {name!r} is {value!r}: must be a finite number, at least 0")
        values[key] = float(value)
    return params_type(**values)
