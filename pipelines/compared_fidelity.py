"""`rutter compared-fidelity`: the runs of live comparisons again in the simulator, residuals and winners."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipelines.fidelity_report import markdown_lines, text_lines, verdict, workload_fidelity
from pipelines.fidelity_results import DEFAULT_PATH, fidelity_file
from pipelines.named_winner import by_workload
from pipelines.recorded_runs import RecordedRun, latest_of_each, recorded_runs, run_named
from pipelines.simulated_runs import SimulatedRun, calibration_of, simulated_run
from pipelines.stages import RUNS_FOLDER
from serve_table.artifact import Artifact, load
from serve_table.errors import RunError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help=f"run folders that `rutter compare` filled, or names in {RUNS_FOLDER}")
    add(
        "--artifact",
        nargs="+",
        action="extend",
        required=True,
        type=Path,
        metavar="FILE",
        help="what the runs were made with: table, lengths, and the fitted costs to simulate with",
    )
    add("--out", type=Path, default=DEFAULT_PATH, metavar="FILE", help="figures as CSV (%(default)s)")
    add("--markdown", action="store_true", help="print Markdown tables")


def run(args: argparse.Namespace) -> int:
    """Simulate every run that counts, write and show the figures; 1 where the simulator is out of its limits."""
    artifacts = [load(path) for path in args.artifact]
    file = fidelity_file(args.out)
    file.rows()
    recorded = [found for source in dict.fromkeys(args.runs) for found in recorded_runs(run_named(source))]
    chosen, left_out = chosen_runs(recorded, artifacts)
    for found, why in left_out:
        say(f"{found.what}, does not count: {why}")
    if not chosen:
        raise RunError(f"no compared run to simulate in {' '.join(args.runs)}: make some with `rutter compare`")
    simulated = [simulated_run(found, artifact) for found, artifact in chosen]
    for line in dilation_lines(simulated):
        say(line)
    workloads = [workload_fidelity(runs) for runs in by_workload(simulated)]
    file.put(row for workload in workloads for row in workload.rows)
    say(f"figures in {file.path}")
    found_verdict = verdict(workloads)
    lines = [line for one in workloads for line in (markdown_lines(one) if args.markdown else text_lines(one))]
    print("\n".join([*lines, "", *found_verdict.lines()]))
    return 0 if found_verdict.within_limits else 1


def say(line: str) -> None:
    print(f"compared-fidelity: {line}", flush=True)


def chosen_runs(
    recorded: Sequence[RecordedRun], artifacts: Sequence[Artifact]
) -> tuple[list[tuple[RecordedRun, Artifact]], list[tuple[RecordedRun, str]]]:
    """The runs that count with the artifact of each, by key; and those that do not with the reason."""
    fitting: list[tuple[RecordedRun, Artifact]] = []
    left_out: list[tuple[RecordedRun, str]] = []
    for found in recorded:
        artifact = found.why_not() or calibration_of(found, artifacts)
        if isinstance(artifact, str):
            left_out.append((found, artifact))
        else:
            fitting.append((found, artifact))
    latest, older = latest_of_each([found for found, _ in fitting])
    of_run = {id(found): artifact for found, artifact in fitting}
    left_out += [(found, "made anew since, under another configuration") for found in older]
    return [(found, of_run[id(found)]) for found in latest], left_out


def dilation_lines(runs: Sequence[SimulatedRun]) -> list[str]:
    """What the costs of another dilation mean: a router's own time is a smaller part of a longer engine time."""
    pairs = {(run.artifact.metadata.dilation, run.recorded.config.cluster.dilation) for run in runs}
    return [
        f"costs fitted at dilation {fitted:g} are used for runs at {live:g}: the router's overhead differs"
        for fitted, live in sorted(pairs)
        if fitted != live
    ]
