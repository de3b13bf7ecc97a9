"""Live confirmation before an export: the candidate, other points of its front, the best baseline and the artifact that
is there already, interleaved on the cluster that the run collected on.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from learn.table import with_price
from pipelines.collect import CollectConfig
from pipelines.compared_runs import ComparedRun, CompareSettings, compared_run, make_run, policy_run
from pipelines.confirm_verdict import Runs, Verdict, run_lines, verdict_lines, verdict_of
from pipelines.live_run import ClusterConfig, Say, engines_of
from pipelines.live_start import LiveStart
from pipelines.policy_run import Measured, pass_gates
from pipelines.stages import Run
from pipelines.train_config import Baselines, TrainConfig
from pipelines.train_search import front_from
from pipelines.workload_spec import HELD_OUT_SEED, WorkloadSpec, requests_of
from serve_table.artifact import Artifact, load, save
from serve_table.errors import ArtifactError, ConfigError

LIVE = "live"
RUTTER = "rutter"
CANDIDATE = "the candidate"
CURRENT = "the current artifact"
MIN_REQUESTS = 100


class ConfirmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much is run. others: points of the front beside the candidate; seeds, requests: of every policy's runs."""

    others: int
    seeds: int
    requests: int


def add_confirm_arguments(parser: argparse.ArgumentParser, nothing_confirmed: int) -> None:
    """nothing_confirmed: the exit status of 'keep what you have'."""
    add = parser.add_argument
    confirm = (
        "run the candidate, other points of its front, the best baseline and the artifact in --to on the cluster that "
        "the run collected on, for minutes; export what is better than the best of the latter two beyond the 95 %% "
        f"interval, else keep what is there and end with status {nothing_confirmed}. Default: off"
    )
    add("--confirm", choices=[LIVE], help=confirm)
    add("--confirm-others", type=int, default=1, metavar="N", help="points of the front (%(default)s)")
    add("--confirm-seeds", type=int, default=4, metavar="N", help="runs of each policy (%(default)s)")
    add("--confirm-requests", type=int, default=400, metavar="N", help="of each run (%(default)s)")


def confirm_config(args: argparse.Namespace) -> ConfirmConfig | None:
    """None where no confirmation is asked for; ConfigError for a flag out of range."""
    if args.confirm is None:
        return None
    if args.confirm_others < 0 or args.confirm_seeds < 2:
        raise ConfigError("--confirm-others must be at least 0; --confirm-seeds at least 2, for an interval")
    if args.confirm_requests < MIN_REQUESTS:
        raise ConfigError(f"--confirm-requests {args.confirm_requests}: at least {MIN_REQUESTS}, for a 99th percentile")
    return ConfirmConfig(args.confirm_others, args.confirm_seeds, args.confirm_requests)


@dataclass(frozen=True)
class Entrant:
    """A policy of the confirmation. policy: what the router calls it."""

    name: str
    policy: str
    settings: CompareSettings

    def run(self, spec: WorkloadSpec, run_: Run) -> ComparedRun:
        return compared_run(spec, self.policy, self.settings, run_)

    def measured(self, spec: WorkloadSpec, run_: Run) -> Measured | None:
        """None where the run does not count."""
        made = self.run(spec, run_).made
        found = None if made is None else policy_run(made, self.settings, run_).measured()
        return found if found is not None and found.conditions.kept else None


@dataclass(frozen=True)
class Confirmation:
    """What a confirmation runs. learned: new artifacts by name; folder: where they are put for the router.

    current: the artifact that is there already, as it would be judged; None where there is none.
    """

    trained: TrainConfig
    config: ConfirmConfig
    cluster: ClusterConfig
    candidate: Artifact
    learned: dict[str, Artifact]
    current: Artifact | None
    baseline: str
    baselines: Baselines
    folder: Path

    def entrants(self) -> list[Entrant]:
        """All policies; each router gets its own artifact, a baseline the candidate's targets and lengths."""
        artifacts = self.learned | ({CURRENT: self.current} if self.current is not None else {})
        paths = {name: self.folder / f"{name.replace(' ', '-')}.safetensors" for name in [*artifacts, CANDIDATE]}
        for name, artifact in {**artifacts, CANDIDATE: self.candidate}.items():
            save(artifact, paths[name])
        return [
            *(Entrant(name, RUTTER, self._settings(paths[name])) for name in artifacts),
            Entrant(self.baseline, self.baseline, self._settings(paths[CANDIDATE])),
        ]

    def _settings(self, artifact: Path) -> CompareSettings:
        workload = self.trained.workload
        tuned = {} if workload is None else {workload.name: self.baselines.params}
        return CompareSettings(self.cluster, LiveStart(self.cluster.hardware, artifact, None), tuned)

    @property
    def opponents(self) -> list[str]:
        return [*([CURRENT] if self.current is not None else []), self.baseline]


def confirmation_of(
    run_: Run,
    folder: Path,
    trained: TrainConfig,
    config: ConfirmConfig,
    candidate: Artifact,
    exported: Path,
    baseline: str,
    baselines: Baselines,
    say: Say,
) -> Confirmation:
    """Everything that is to be run; ConfigError where the run has no cluster of its own."""
    if trained.workload is None:
        raise ConfigError(
            "--confirm live runs on the cluster that the run collected on, and this one learned from other journals: "
            "export without it, and compare with `rutter compare`"
        )
    cluster = msgspec.json.decode(run_.latest("collect").config, type=CollectConfig).cluster
    current = current_artifact(exported, candidate, say)
    front = front_from(run_.output_path(run_.latest("train"), "pareto"))
    own = candidate.digest()
    learned = {CANDIDATE: candidate}
    for point in sorted(front, key=lambda point: -point.value):
        other = with_price(candidate, point.params)
        if len(learned) <= config.others and other.digest() != own:
            learned[f"point {len(learned)} of the front"] = other
    known = None if current is None else current.digest()
    new = {name: artifact for name, artifact in learned.items() if artifact.digest() != known}
    return Confirmation(trained, config, cluster, candidate, new, current, baseline, baselines, folder)


def current_artifact(path: Path, candidate: Artifact, say: Say) -> Artifact | None:
    """What is exported already, under the candidate's SLO targets and without its held-out scores."""
    if not path.exists():
        return None
    try:
        current = load(path)
    except ArtifactError as error:
        say(f"{error}; nothing to hold the candidate against but the best baseline")
        return None
    if current.metadata.slo != candidate.metadata.slo:
        say(f"{path} has other SLO targets: it is run under the candidate's")
    metadata = msgspec.structs.replace(current.metadata, held_out=[], slo=candidate.metadata.slo)
    return Artifact(current.arrays, metadata)


def live_specs(spec: WorkloadSpec, config: ConfirmConfig) -> list[WorkloadSpec]:
    """A specification a seed, of requests that training did not see."""
    after = spec.start + spec.n_requests
    n = config.requests
    specs = [
        msgspec.structs.replace(
            spec,
            n_requests=n,
            seed=HELD_OUT_SEED + k if spec.is_synthetic else spec.seed,
            start=0 if spec.is_synthetic else after + k * n,
        )
        for k in range(config.seeds)
    ]
    n_last = len(requests_of(specs[-1]))
    if n_last < n:
        raise ConfigError(f"trace {spec.name}: too few requests are left for {config.seeds} runs of {n} each")
    return specs


def confirmed(confirmation: Confirmation, run_: Run, say: Say) -> Verdict:
    """Make the runs that are missing, interleaved, and judge; a killed confirmation continues run by run."""
    config, workload = confirmation.config, confirmation.trained.workload
    if workload is None:
        raise ValueError("a confirmation needs the workload that was collected")
    entrants, specs = confirmation.entrants(), live_specs(workload, config)
    make_missing(entrants, specs, confirmation.cluster, run_, say)
    runs: dict[str, Runs] = {one.name: [one.measured(spec, run_) for spec in specs] for one in entrants}
    verdict = verdict_of(
        runs, list(confirmation.learned), confirmation.opponents, confirmation.trained.objective, config.requests
    )
    say(f"live, {config.seeds} seeds of {config.requests} requests of {workload.name}:")
    for line in [*run_lines(runs), *verdict_lines(verdict)]:
        say(line)
    return verdict


def make_missing(
    entrants: Sequence[Entrant], specs: Sequence[WorkloadSpec], cluster: ClusterConfig, run_: Run, say: Say
) -> None:
    """Seed by seed, each beginning with another policy; runs whose times were not kept are made once more."""

    def pending() -> list[tuple[Entrant, ComparedRun]]:
        turned = [
            (spec, [*entrants[k % len(entrants) :], *entrants[: k % len(entrants)]]) for k, spec in enumerate(specs)
        ]
        runs = [(one, one.run(spec, run_)) for spec, ones in turned for one in ones]
        return [(one, found) for one, found in runs if found.pending]

    left = pending()
    if not left:
        return
    with engines_of(cluster, run_.folder, say) as engines:
        report = pass_gates(engines, cluster, say)
        while left:
            for i, (one, found) in enumerate(left):
                left_s = sum(later.duration_s for _, later in left[i:])
                say(f"run {i + 1} of {len(left)}: {one.name}, {found.what}; {left_s / 60.0:.0f} min or more to go")
                make_run(found, one.settings, run_, engines, report, say)
            left = pending()
