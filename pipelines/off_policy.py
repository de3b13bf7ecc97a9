"""`rutter off-policy`: what a journal of explored requests tells of other policies, beside the simulator's figure."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from learn.costs import fitted_topology
from learn.frame import journal_digests
from learn.journal_trace import JournalTrace, journal_trace, left_out_reason, runs
from learn.logged_choices import (
    OBJECTIVES,
    Choices,
    LoggedChoices,
    action_features,
    candidate_choices,
    choice_features,
    logged_choices,
)
from learn.off_policy import OffPolicy, off_policy, on_policy
from learn.simulation import Topology, replay, simulate
from learn.table import costs_of_artifact
from pipelines.collect import CollectConfig
from pipelines.off_policy_report import CandidateReport, Report, report_lines
from pipelines.stages import Run, add_run_arguments, run_from
from pipelines.tuned_baselines import Params, live_params
from serve_table.artifact import Artifact, load, write_atomically
from serve_table.errors import ConfigError
from serve_table.journal import JournalReader, Row
from serve_table.policy import LEARNED_POLICIES, OF_AN_ARTIFACT, POLICIES, Policy, policies_of, policy
from serve_table.server import parse_params
from serve_table.step_time import HardwareProfile, hardware_profile

REPORT_NAME = "off-policy.json"
TARGET_TOLERANCE = 0.01


@dataclass(frozen=True)
class Simulator:
    """A cluster with an artifact's fitted constants, and the journal's router runs to put through it."""

    artifact: Artifact
    profile: HardwareProfile
    journals: tuple[JournalTrace, ...]
    counted: frozenset[str]
    """Ids of the requests that the estimators use: the simulator's figures are of the same."""

    def topology(self, journal: JournalTrace) -> Topology:
        costs = costs_of_artifact(self.artifact)
        n_prefill, n_decode = len(journal.prefill_engines), len(journal.decode_engines)
        return fitted_topology(n_prefill, n_decode, self.profile, costs, journal.elastic)

    def goodput(self, candidate: Policy | None, seed: int) -> float | None:
        """Of every request under the candidate, or under the journaled choices for None; None without requests."""
        met: list[bool] = []
        slo = self.artifact.slo_targets()
        for journal in self.journals:
            given = (journal.trace, self.topology(journal))
            if candidate is None:
                choices = (journal.action, journal.prefill, journal.decode)
                found = replay(*given, slo, journal.predicted_tokens, *choices, held_s=journal.held_s)
            else:
                found = simulate(*given, candidate, slo, journal.predicted_tokens, seed)
            met += found.slo_met[[name in self.counted for name in journal.request_ids]].tolist()
        return float(np.mean(met)) if met else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    add = parser.add_argument
    journals = "journals of explored requests; default: those that the run collected"
    add("--journal", action="extend", nargs="+", default=[], type=Path, metavar="PATH", help=journals)
    add("--artifact", type=Path, metavar="FILE", help="its table is a candidate, its fitted costs make the simulator")
    add(
        "--policies",
        nargs="+",
        metavar="NAME",
        help=f"candidates, of {', '.join(POLICIES)}; default: all, the table where --artifact is given",
    )
    params = "parameters of a candidate, or of the journal's policy, over its defaults; may be repeated"
    add("--policy-params", action="append", default=[], metavar="NAME=JSON", help=params)
    add("--clip", type=float, metavar="W", help="largest weight of a row; default: not clipped")
    add("--hardware", help="profile whose limits the simulator has; default: the collection's, else a40-3b")
    add("--cluster-kind", help="use rows of this kind of cluster only")
    add("--seed", type=int, default=0, help="seed of the candidates' draws (%(default)s)")
    add("--json", action="store_true", help=f"print the report as JSON; the run's {REPORT_NAME} has it in any case")


def run(args: argparse.Namespace) -> int:
    """Evaluate every candidate on the journal and write the report into the run folder."""
    if args.clip is not None and not 1.0 <= args.clip < float("inf"):
        raise ConfigError(f"--clip {args.clip:g}: a weight limit is at least 1")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} must be at least 0")
    run_ = run_from(args)
    artifact = None if args.artifact is None else load(args.artifact)
    paths, hardware = journals_of(args, run_)
    candidates = candidates_from(args, artifact, hardware)
    reader = JournalReader(paths)
    rows = [row for row in reader if args.cluster_kind is None or row.cluster_kind == args.cluster_kind]
    logged = logged_choices(rows, known_policies(rows, given_params(args.policy_params), artifact))
    simulator = None if artifact is None else simulator_of(rows, logged, artifact, hardware_profile(hardware))
    report = Report(
        journals=[str(path) for path in paths],
        journal_digests=list(journal_digests(reader.segments())),
        broken_lines=len(reader.broken),
        rows=len(logged),
        left_out=logged.left_out,
        logged_by=sorted({row.policy for row in logged.rows}),
        supported_share=logged.supported_share,
        on_policy={name: on_policy(reward) for name, reward in logged.rewards.items()},
        replayed_goodput=None if simulator is None else simulator.goodput(None, args.seed),
        artifact=None if artifact is None else artifact.digest(),
        notes=[] if artifact is None else target_notes(logged, artifact),
        clip=args.clip,
        seed=args.seed,
        candidates=[
            candidate_report(logged, candidate, params, simulator, args.clip, args.seed)
            for candidate, params in candidates
        ],
    )
    place = run_.folder / REPORT_NAME
    write_atomically(place, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    print(msgspec.json.encode(report).decode() if args.json else "\n".join([*report_lines(report), "", f"{place}"]))
    return 0


def journals_of(args: argparse.Namespace, run_: Run) -> tuple[list[Path], str]:
    """The journals to read and the hardware they ran on; those that the run collected where none are given."""
    if args.journal:
        return args.journal, args.hardware or "a40-3b"
    record = run_.latest("collect")
    hardware = msgspec.json.decode(record.config, type=CollectConfig).cluster.hardware
    return [run_.output_path(record, "journal")], args.hardware or hardware


def candidates_from(args: argparse.Namespace, artifact: Artifact | None, hardware: str) -> list[tuple[Policy, Params]]:
    """The candidates with their parameters; the marginal-cost router gets an artifact's fitted constants."""
    params = given_params(args.policy_params)
    names = args.policies or [name for name in POLICIES if name not in OF_AN_ARTIFACT or artifact is not None]
    found = []
    for name in dict.fromkeys(names):
        given = params.get(name, {})
        if artifact is not None and name not in LEARNED_POLICIES:
            given = {**live_params(name, {}, costs_of_artifact(artifact), hardware), **given}
        found.append((policy(name, given, artifact), given))
    return found


def given_params(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """NAME=JSON by name; ConfigError for another form or a name that is no policy."""
    params = {}
    for text in texts:
        name, is_given, value = text.partition("=")
        if not is_given or name not in POLICIES:
            raise ConfigError(f"--policy-params {text!r}: give it as NAME=JSON with a name of {', '.join(POLICIES)}")
        params[name] = parse_params(value)
    return params


def known_policies(
    rows: Sequence[Row], params: Mapping[str, Mapping[str, Any]], artifact: Artifact | None
) -> list[Policy]:
    """Policies that may have made the journal: those it names by default and with given parameters, the artifact's."""
    names = {row.policy for row in rows} & (POLICIES.keys() - set(OF_AN_ARTIFACT))
    known = [policy(name) for name in sorted(names)]
    known += [policy(name, params[name]) for name in sorted(names & params.keys())]
    return known + ([] if artifact is None else policies_of(artifact))


def simulator_of(rows: Sequence[Row], logged: LoggedChoices, artifact: Artifact, profile: HardwareProfile) -> Simulator:
    """A simulator of the router runs that any used row is of, with all that these runs executed."""
    counted = frozenset(row.request_id for row in logged.rows)
    journals = tuple(
        journal_trace(found, f"run {k + 1}")
        for k, found in enumerate(runs(rows))
        if any(row.request_id in counted and left_out_reason(row) is None for row in found)
    )
    return Simulator(artifact, profile, journals, counted)


def candidate_report(
    logged: LoggedChoices,
    candidate: Policy,
    params: Params,
    simulator: Simulator | None,
    clip: float | None,
    seed: int,
) -> CandidateReport:
    chosen = candidate_choices(logged, candidate, seed)
    return CandidateReport(
        policy=candidate.name,
        digest=candidate.digest,
        params=params,
        estimates={"action": by_action(logged, chosen, clip), "full": by_full_choice(logged, chosen, clip)},
        simulated_goodput=None if simulator is None else simulator.goodput(candidate, seed),
    )


def by_action(logged: LoggedChoices, chosen: Choices, clip: float | None) -> dict[str, OffPolicy]:
    """Objective to estimates on the action alone."""
    matched = logged.choices.action == chosen.action
    if logged.action_propensity is None:
        return dict.fromkeys(OBJECTIVES, refused(logged, int(matched.sum()), logged.refusals["action"]))
    features = action_features(logged, logged.choices), action_features(logged, chosen)
    return {
        name: off_policy(reward, matched, logged.action_propensity, *features, clip)
        for name, reward in logged.rewards.items()
    }


def by_full_choice(logged: LoggedChoices, chosen: Choices, clip: float | None) -> dict[str, OffPolicy]:
    """Objective to estimates on action and engines."""
    matched = np.all([mine == own for mine, own in zip(logged.choices, chosen, strict=True)], axis=0)
    if logged.propensity is None:
        return dict.fromkeys(OBJECTIVES, refused(logged, int(matched.sum()), logged.refusals["full"]))
    features = choice_features(logged, logged.choices), choice_features(logged, chosen)
    return {
        name: off_policy(reward, matched, logged.propensity, *features, clip) for name, reward in logged.rewards.items()
    }


def refused(logged: LoggedChoices, n_matched: int, why: str) -> OffPolicy:
    return OffPolicy(len(logged), n_matched, 0.0, 0.0, 0, refusal=why)


def target_notes(logged: LoggedChoices, artifact: Artifact) -> list[str]:
    """A line where the journal judged requests by other targets than the simulator does."""
    slo = artifact.slo_targets()
    apart = 0
    for row in logged.rows:
        prompt = row.usage_prompt_tokens if row.usage_prompt_tokens is not None else round(row.prompt_tokens)
        target = slo[row.slo_class]
        pairs = ((row.ttft_target_s, target.ttft_target_s(prompt)), (row.tpot_target_s, target.tpot_s))
        apart += any(seen is not None and abs(seen - own) > TARGET_TOLERANCE * own for seen, own in pairs)
    if not apart:
        return []
    return [f"beware: {apart} rows were judged by other SLO targets than the artifact's, which the simulator has"]
