"""Logged choices: journal rows as off-policy evaluation needs them, and what a candidate would have chosen on each.

A row's choice is what was decided, whatever became of it: a hand-off that fell back to local is an outcome of choosing
remote. Rows whose SLO outcome is not known, as where the client left, and rows that could not have gone another way
than they did are left out and counted.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from learn.frame import fleet_fits, require_one_kind
from serve_table.decision import propensity_of
from serve_table.errors import JournalError
from serve_table.journal import Row
from serve_table.placement import count_up
from serve_table.policy import Policy
from serve_table.replay import is_elastic, redecide, request_and_fleet, residents_of
from serve_table.situation import ACTION_NAMES, LOCAL, NO_ENGINE, Draws, features_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DRAWN_TWICE = "power_of_two"
"""Its journaled propensity is given the draws that also place its explored requests, so it is none of the engines."""

REASONS = {
    "duplicate_request_id": "a row of that request id was read before; the first one counts",
    "no_decision": "no decision was journaled",
    "elastic": "its prefill engines serve whole requests, which exploration never draws",
    "no_propensity": "no propensity was journaled",
    "invalid_row": "the fleet, the draws or the propensity do not fit a decision",
    "no_slo_outcome": "no SLO outcome: not streamed, refused as wrong, or the client left",
    "not_explored": "from a router that explored nothing",
    "redecided_otherwise": "its own policy decides otherwise from what the row says",
}
"""Every reason a row is left out for, in the order of the checks, and what it means."""

OBJECTIVES = ("goodput", "ttft", "tpot")
"""Rewards of 0 or 1: both targets kept, the TTFT target, the TPOT target; a failed request kept none."""


class Choices(NamedTuple):
    """Columns (n_rows,). prefill and decode: engine by its place in the row's lists; prefill is -1 where local."""

    action: Ints
    prefill: Ints
    decode: Ints


@dataclass(frozen=True)
class LoggedChoices:
    """Explored rows in order of arrival, with their decided choices.

    rewards: objective to (n_rows,). propensity: (n_rows,) of the full choice, None where it is not known.
    action_propensity: (n_rows,) of the action alone, None where the journal's policy is not known here. refusals: why
    one is None, by `action` or `full`. left_out: reason in `REASONS` to number of rows.
    """

    rows: tuple[Row, ...]
    choices: Choices
    rewards: Mapping[str, Floats]
    propensity: Floats | None
    action_propensity: Floats | None
    refusals: Mapping[str, str]
    left_out: dict[str, int]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def supported_share(self) -> float:
        """Share of the usable rows that were explored: in these every choice that was possible had its chance."""
        return len(self) / (len(self) + self.left_out.get("not_explored", 0))


def logged_choices(rows: Iterable[Row], known: Sequence[Policy] = ()) -> LoggedChoices:
    """The explored rows of one kind of cluster. known: policies that may have made the journal, found by their digest.

    Raises JournalError where kinds or dilations are mixed, and where no row is left.
    """
    policies = {policy.digest: policy for policy in known}
    left_out: Counter[str] = Counter()
    kinds: Counter[tuple[str, float]] = Counter()
    kept: dict[str, Row] = {}
    n_read = 0
    for row in rows:
        n_read += 1
        kinds[row.cluster_kind, row.dilation] += 1
        reason = "duplicate_request_id" if row.request_id in kept else left_out_reason(row)
        if reason is None and not _decided_alike(row, policies.get(row.policy_digest)):
            reason = "redecided_otherwise"
        if reason is None:
            kept[row.request_id] = row
        else:
            left_out[reason] += 1
    require_one_kind(kinds)
    counted = {reason: left_out[reason] for reason in REASONS if left_out[reason]}
    if not kept:
        raise JournalError(_nothing_left(n_read, counted))
    used = sorted(kept.values(), key=lambda row: (row.time, row.request_id))
    refusals = _refusals(used, policies)
    return LoggedChoices(
        rows=tuple(used),
        choices=_choices([_decided(row) for row in used]),
        rewards={name: np.array([_reward(row, name) for row in used]) for name in OBJECTIVES},
        propensity=None if "full" in refusals else np.array([row.propensity for row in used], dtype=np.float64),
        action_propensity=None
        if "action" in refusals
        else np.array([_action_propensity(row, policies[row.policy_digest]) for row in used]),
        refusals=refusals,
        left_out=counted,
    )


def left_out_reason(row: Row) -> str | None:
    """Why a row tells nothing of another policy, the first that applies in the order of `REASONS`; None if it does."""
    if row.fleet is None or row.action is None or row.decode_engine is None:
        return "no_decision"
    if is_elastic(row):
        return "elastic"
    if row.propensity is None:
        return "no_propensity"
    if not _fits(row):
        return "invalid_row"
    if row.slo_met is None:
        return "no_slo_outcome"
    return None if row.explore > 0.0 else "not_explored"


def candidate_choices(logged: LoggedChoices, candidate: Policy, seed: int = 0) -> Choices:
    """What the candidate chooses from each row's own state.

    With draws of its own, seeded: the row's have made the journaled choice, and must not be in both. Of residents the
    price knows what the row has, which is nothing where another policy decided.
    """
    draws = np.random.default_rng(seed).random((len(logged), len(Draws._fields))).tolist()
    decided = []
    for row, own in zip(logged.rows, draws, strict=True):
        request, fleet = request_and_fleet(row)
        found = candidate.decide(request, fleet, row.rotation, 0.0, Draws(*own), residents_of(row))
        decided.append((found.action, found.prefill, found.decode))
    return _choices(decided)


def action_features(logged: LoggedChoices, choices: Choices) -> Floats:
    """(n_rows, n_features) of the request, the pools' load and the action, for a model that knows no engine."""
    base = np.array([_request_features(row) for row in logged.rows])
    return _by_action(base, choices.action)


def choice_features(logged: LoggedChoices, choices: Choices) -> Floats:
    """(n_rows, n_features): `action_features` and the load and cache of the chosen engines."""
    engines = [
        _engine_features(row, int(action), int(prefill), int(decode))
        for row, action, prefill, decode in zip(logged.rows, *choices, strict=True)
    ]
    base = np.array([_request_features(row) for row in logged.rows])
    return _by_action(np.hstack([base, np.array(engines)]), choices.action)


def _by_action(base: Floats, action: Ints) -> Floats:
    """A line of its own for each action."""
    local = (action == LOCAL).astype(np.float64)[:, None]
    return np.hstack([local, base, base * local])


def _request_features(row: Row) -> list[float]:
    found = features_of(*request_and_fleet(row))
    tokens = (
        found.prompt_tokens,
        found.uncached_prefill_tokens,
        found.uncached_decode_tokens,
        found.predicted_output_tokens,
        found.prefill_pressure_tokens,
    )
    return [*(math.log1p(max(value, 0.0)) for value in tokens), float(found.slo_class), found.decode_pressure_requests]


def _engine_features(row: Row, action: int, prefill: int, decode: int) -> list[float]:
    request, fleet = request_and_fleet(row)
    cached = request.decode_cached_tokens[decode] if action == LOCAL else request.prefill_cached_tokens[prefill]
    tokens = (
        request.prompt_tokens - cached,
        fleet.decode_tokens[decode],
        fleet.decode_prefill_tokens[decode],
        0.0 if action == LOCAL else fleet.prefill_tokens[prefill],
    )
    requests = (fleet.decode_requests[decode], 0.0 if action == LOCAL else fleet.prefill_requests[prefill])
    return [*(math.log1p(max(value, 0.0)) for value in tokens), *requests]


def _fits(row: Row) -> bool:
    if not fleet_fits(row) or len(row.draws) != len(Draws._fields) or row.decode_engine not in row.decode_engines:
        return False
    if row.action != ACTION_NAMES[LOCAL] and row.prefill_engine not in row.prefill_engines:
        return False
    if row.propensity is None or not 0.0 < row.propensity <= 1.0:
        return False
    return all(math.isfinite(value) for value in (*features_of(*request_and_fleet(row)), row.time))


def _decided(row: Row) -> tuple[int, int, int]:
    action = ACTION_NAMES.index(str(row.action))
    prefill = NO_ENGINE if action == LOCAL else row.prefill_engines.index(str(row.prefill_engine))
    return action, prefill, row.decode_engines.index(str(row.decode_engine))


def _choices(decided: list[tuple[int, int, int]]) -> Choices:
    action, prefill, decode = np.array(decided, dtype=np.int64).T
    return Choices(action, prefill, decode)


def _reward(row: Row, objective: str) -> float:
    if row.status != "ok":
        return 0.0
    if objective == "goodput":
        return float(row.slo_met is True)
    if objective == "ttft":
        return float(row.ttft_s is not None and row.ttft_target_s is not None and row.ttft_s <= row.ttft_target_s)
    return float(row.tpot_s is None or (row.tpot_target_s is not None and row.tpot_s <= row.tpot_target_s))


def _decided_alike(row: Row, policy: Policy | None) -> bool:
    """Whether its own policy, where that is known, makes the row's choice with the row's propensity."""
    if policy is None:
        return True
    found = redecide(row, policy)
    return (found.action, found.prefill, found.decode) == _decided(row) and math.isclose(
        found.propensity, float(row.propensity or 0.0), rel_tol=1e-9
    )


def _action_propensity(row: Row, policy: Policy) -> float:
    """Probability of the journaled action, whatever the engines: as if each pool had one."""
    request, fleet = request_and_fleet(row)
    own = policy.decide(request, fleet, row.rotation, 0.0, Draws(*row.draws), residents_of(row)).action
    action = ACTION_NAMES.index(str(row.action))
    both_actions = request.remote_allowed and count_up(fleet.prefill_up) > 0
    return propensity_of(action, action == own, both_actions, 1, 1, row.explore)


def _refusals(rows: list[Row], policies: Mapping[str, Policy]) -> dict[str, str]:
    refusals = {}
    if any(row.policy == DRAWN_TWICE for row in rows):
        refusals["full"] = f"a journal of {DRAWN_TWICE} has no propensity of the engines"
    unknown = sorted({f"{row.policy} ({row.policy_digest})" for row in rows if row.policy_digest not in policies})
    if unknown:
        refusals["action"] = f"the journal's policy {', '.join(unknown)} is not known here with these parameters"
    return refusals


def _nothing_left(n_read: int, left_out: Mapping[str, int]) -> str:
    counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    return (
        f"none of {n_read} journal rows can be evaluated off-policy{f': {counts}' if counts else ''}; "
        "journal with --explore above 0, as `rutter collect` does"
    )
