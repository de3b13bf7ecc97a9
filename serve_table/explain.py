"""`rutter explain`: how an artifact decides for given features, or for a row of a journal."""

import argparse
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from serve_table.artifact import Artifact, load
from serve_table.artifact_metadata import FEATURE_NAMES
from serve_table.calibration import age_text
from serve_table.decision import PRICE
from serve_table.errors import ConfigError, JournalError
from serve_table.guard import TIER_NAMES, held_tier, must_hold
from serve_table.harm import NO_RESIDENTS, Residents
from serve_table.journal import JournalReader, Row
from serve_table.lookup import action_of, cluster_of, regime_of
from serve_table.placement import decode_load, prefill_load
from serve_table.policy import LEARNED_POLICIES, Policy, policy
from serve_table.price import best_prefill, decode_values, leg_harm, prefill_backlog_s, whole_value
from serve_table.price_params import HARM_WEIGHT, HOLD_S, TABLE_WEIGHT, with_constants
from serve_table.replay import request_and_fleet, residents_of
from serve_table.situation import (
    ACTION_NAMES,
    LOCAL,
    NO_ENGINE,
    REASON_NAMES,
    TABLE_ACTION_NAMES,
    Decision,
    Draws,
    Features,
    Fleet,
    Request,
    features_of,
)
from serve_table.slo import CLASS_NAMES, SloTargets

NO_EXPLORATION = Draws(1.0, 0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Situation:
    """What is to be explained; the engines are named in the order of the fleet's arrays."""

    request: Request
    fleet: Fleet
    rotation: int
    prefill_engines: list[str]
    decode_engines: list[str]
    row: Row | None
    residents: Residents = NO_RESIDENTS

    @property
    def policy_name(self) -> str:
        """Of the artifact's policies the one that decided, else the one that it serves."""
        return self.row.policy if self.row is not None and self.row.policy in LEARNED_POLICIES else "rutter"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `rutter explain`."""
    add = parser.add_argument
    add("--artifact", type=Path, required=True, metavar="FILE", help="whose decision to explain")
    add("--journal", type=Path, metavar="FILE", help="journal segment or folder to take the request from")
    add("--request-id", help="the router's id of the request in the journal")
    add("--prompt-tokens", type=float, help="length of the prompt")
    add("--cached-prefill-tokens", type=float, default=0.0, help="of the prompt, held by the prefill engines")
    add("--cached-decode-tokens", type=float, default=0.0, help="of the prompt, held by the decode engines")
    add("--predicted-output-tokens", type=float, help="default: what the artifact predicts")
    add("--slo-class", default="loose", help=" or ".join(CLASS_NAMES))
    add("--prefill-pressure-tokens", type=float, default=0.0, help="pending tokens of each prefill engine")
    add("--decode-pressure-requests", type=float, default=0.0, help="requests on each decode engine")


def run(args: argparse.Namespace) -> int:
    """Print the explanation. Raises ConfigError, ArtifactError and JournalError."""
    artifact = load(args.artifact)
    if (args.journal is None) != (args.request_id is None):
        raise ConfigError("--journal and --request-id go together")
    if (args.journal is None) == (args.prompt_tokens is None):
        raise ConfigError("give either --prompt-tokens, or --journal with --request-id")
    situation = given(args, artifact) if args.journal is None else journaled(args.journal, args.request_id)
    sys.stdout.write("\n".join(explanation(artifact, situation)) + "\n")
    return 0


def given(args: argparse.Namespace, artifact: Artifact) -> Situation:
    """A fleet as large as the one the artifact was learned on, all its engines alike."""
    lengths = ("prompt_tokens", "cached_prefill_tokens", "cached_decode_tokens")
    for name in (*lengths, "predicted_output_tokens", "prefill_pressure_tokens", "decode_pressure_requests"):
        value = getattr(args, name)
        if value is not None and not 0.0 <= value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be finite and at least 0")
    predicted = args.predicted_output_tokens
    if predicted is None:
        predicted = artifact.predictor().predict(args.prompt_tokens, None)
    n_prefill, n_decode = artifact.metadata.prefill_engines, artifact.metadata.decode_engines
    request = Request(
        args.prompt_tokens,
        predicted,
        SloTargets.index(args.slo_class),
        [min(args.cached_prefill_tokens, args.prompt_tokens)] * n_prefill,
        [min(args.cached_decode_tokens, args.prompt_tokens)] * n_decode,
        remote_allowed=True,
    )
    fleet = Fleet(
        prefill_requests=[0.0] * n_prefill,
        prefill_tokens=[args.prefill_pressure_tokens] * n_prefill,
        prefill_up=[1.0] * n_prefill,
        decode_requests=[args.decode_pressure_requests] * n_decode,
        decode_tokens=[0.0] * n_decode,
        decode_prefill_tokens=[0.0] * n_decode,
        decode_up=[1.0] * n_decode,
    )
    names = [f"prefill {i}" for i in range(n_prefill)], [f"decode {i}" for i in range(n_decode)]
    return Situation(request, fleet, 0, *names, row=None)


def journaled(path: Path, request_id: str) -> Situation:
    """The situation that a journal row describes. Raises JournalError where there is none."""
    for row in JournalReader([path]):
        if row.request_id == request_id:
            request, fleet = request_and_fleet(row)
            engines = row.prefill_engines, row.decode_engines
            return Situation(request, fleet, row.rotation, *engines, row, residents_of(row))
    raise JournalError(f"no request {request_id!r} in {path}; `request_id` is the router's own id, not the client's")


def explanation(artifact: Artifact, situation: Situation) -> list[str]:
    """Lines for a person."""
    request, fleet = situation.request, situation.fleet
    table = artifact.table()
    features = features_of(request, fleet)
    cluster, regime = cluster_of(table, features), regime_of(table, features)
    action = action_of(table, cluster, regime)
    inherited = artifact.arrays["inherited"][cluster * artifact.n_regimes + regime]
    note = " (inherited: too few rows of its own)" if inherited else ""
    lines = [f"artifact   {artifact.digest()}", f"age        {age_of(artifact, time.time())}"]
    lines += [f"policy     rutter is the {artifact.metadata.policy} of this artifact"]
    lines += [f"features   {text}" for text in _feature_texts(features)]
    lines += [
        f"cluster    {cluster} of {artifact.n_clusters}, {artifact.arrays['counts'][cluster]} rows, centre "
        + _centre_text(artifact, cluster),
        f"regime     {regime} of {artifact.n_regimes}",
        f"action     {ACTION_NAMES[action]}{note}",
    ]
    lines += _candidate_lines(artifact, situation, action)
    lines += _price_lines(artifact, situation, action)
    chosen = policy(situation.policy_name, artifact=artifact)
    decision = chosen.decide(request, fleet, situation.rotation, 0.0, NO_EXPLORATION, situation.residents)
    lines += _guard_lines(chosen, decision.prefill, situation)
    return lines + _choice_lines(chosen, decision, situation)


def age_of(artifact: Artifact, now: float) -> str:
    """How old the constants and targets are at a Unix time."""
    calibrated, journaled = artifact.metadata.calibrated_time, artifact.metadata.journal_last_time
    begin = "not calibrated" if calibrated is None else f"calibrated {age_text(calibrated, now)}"
    return begin + ("" if journaled is None else f", last journal row {age_text(journaled, now)}")


def _feature_texts(features: Features) -> list[str]:
    values = features._asdict()
    values["slo_class"] = CLASS_NAMES[features.slo_class]
    return [f"{name} = {value if isinstance(value, str) else format(value, 'g')}" for name, value in values.items()]


def _centre_text(artifact: Artifact, cluster: int) -> str:
    centre = artifact.arrays["centres_tokens"][cluster].tolist()
    return ", ".join(f"{name} {value:.0f}" for name, value in zip(FEATURE_NAMES[:4], centre, strict=False))


def _candidate_lines(artifact: Artifact, situation: Situation, action: int) -> list[str]:
    """The placement load of every engine that may get the request; the least one is chosen."""
    params = artifact.params()
    request, fleet = situation.request, situation.fleet
    lines = []
    if action != LOCAL:
        for i, name in enumerate(situation.prefill_engines):
            load_text = f"load {prefill_load(fleet, params, request, i):.4f}" if fleet.prefill_up[i] > 0.0 else "down"
            lines.append(f"prefill    {name}: {load_text}")
    for i, name in enumerate(situation.decode_engines):
        load_text = f"load {decode_load(fleet, params, request, action, i):.4f}" if fleet.decode_up[i] > 0.0 else "down"
        lines.append(f"decode     {name}: {load_text}")
    return lines


def _price_lines(artifact: Artifact, situation: Situation, favoured: int) -> list[str]:
    """What the request is worth on every decode engine that may get it; the highest value is chosen.

    favoured: the table's action, for or against which the local value counts.
    """
    params = with_constants(astuple(artifact.price()), situation.residents.constants)
    local_worth = params[TABLE_WEIGHT] if favoured == LOCAL else -params[TABLE_WEIGHT]
    heedless = [*params[:HARM_WEIGHT], 0.0, *params[HARM_WEIGHT + 1 :]]
    request, fleet, residents = situation.request, situation.fleet, situation.residents
    prefill, prefilled_s, prefill_tokens = NO_ENGINE, 0.0, 0.0
    if request.remote_allowed:
        prefill, prefilled_s = best_prefill(params, request, fleet, residents, situation.rotation)
    lines = []
    stalled = 0.0
    if prefill != NO_ENGINE:
        stalled = leg_harm(params, request, fleet, residents, prefill)
        prefill_tokens = request.prompt_tokens - request.prefill_cached_tokens[prefill]
        lines.append(f"price      prefilled on {situation.prefill_engines[prefill]} in {prefilled_s * 1e3:.1f} ms")
        if stalled:
            lines.append(f"price      whole requests there: remote {-stalled:+.4f} for their harm")
    for i, name in enumerate(situation.decode_engines):
        if fleet.decode_up[i] <= 0.0:
            lines.append(f"price      {name}: down")
            continue
        seen = (request, fleet, residents, prefilled_s, prefill_tokens, i)
        values = zip(
            TABLE_ACTION_NAMES,
            decode_values(params, *seen),
            decode_values(heedless, *seen),
            (local_worth, 0.0),
            strict=True,
        )
        texts = [
            f"{action} {value + worth:.4f}"
            + (f" with harm {unharmed - value:.4f}" if unharmed != value else "")
            + (f" with table {worth:+.4f}" if worth else "")
            for action, value, unharmed, worth in values
            if action == ACTION_NAMES[LOCAL] or prefill != NO_ENGINE
        ]
        lines.append(f"price      {name}: {', '.join(texts)}")
    for p in range(fleet.whole_engines):
        is_up = fleet.decode_up[len(situation.decode_engines) + p] > 0.0
        text = f"whole {whole_value(params, request, fleet, residents, p):.4f}" if is_up else "down"
        lines.append(f"price      {situation.prefill_engines[p]}: {text}")
    return lines


def _guard_lines(chosen: Policy, prefill: int, situation: Situation) -> list[str]:
    """Whether the request would be held for the prefill engine of its choice, and for a row whether it was."""
    row, request, params = situation.row, situation.request, chosen.params
    if chosen.number != PRICE or params[HOLD_S] <= 0.0:
        lines = ["guard      off: this policy holds nothing"]
    elif prefill == NO_ENGINE:
        lines = ["guard      would not be held: it prefills locally"]
    else:
        held = must_hold(params, situation.fleet, situation.residents, prefill)
        tier = TIER_NAMES[held_tier(params, request, request.held_ahead_tokens)]
        backlog_s = prefill_backlog_s(params, situation.fleet, situation.residents, prefill)
        lines = [
            f"guard      would {'' if held else 'not '}be held: backlog of {situation.prefill_engines[prefill]} "
            f"{backlog_s * 1e3:.1f} ms, allowed {params[HOLD_S] * 1e3:.1f} ms; {tier}"
        ]
    if row is not None and row.waited_s is not None:
        lines.append(f"guard      was held for {row.waited_s * 1e3:.1f} ms until this decision")
    if request.held_ahead_tokens > 0.0:
        lines.append(f"guard      {request.held_ahead_tokens:g} tokens held before it")
    return lines


def _choice_lines(chosen: Policy, decision: Decision, situation: Situation) -> list[str]:
    """What this artifact chooses, and for a row what was chosen and done."""
    row = situation.row
    prefill = "" if decision.prefill == NO_ENGINE else f" prefill {situation.prefill_engines[decision.prefill]},"
    decode = [*situation.decode_engines, *situation.prefill_engines][decision.decode]
    reason = REASON_NAMES[decision.reason]
    lines = [f"choice     {ACTION_NAMES[decision.action]},{prefill} decode {decode} ({reason})"]
    if row is not None:
        by = f"{row.policy} {row.policy_digest}" + ("" if row.policy_digest == chosen.digest else ", another policy")
        lines.append(
            f"journaled  {row.action}, prefill {row.prefill_engine}, decode {row.decode_engine} ({row.reason}; {by})"
        )
        lines.append(
            f"executed   {row.executed}, prefill {row.executed_prefill_engine}, decode {row.executed_decode_engine}, "
            f"status {row.status}"
        )
    return lines
