"""The search of `rutter train`: stored, with progress, and in a few lines what it found."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from learn.evaluate import Bench
from learn.pareto import FrontPoint
from learn.policy_search import LATENCY_REFERENCE, Searched, SearchPlan, Step, search_policies
from learn.study import StoredStudy
from learn.training import Learned
from pipelines.progress import Progress
from pipelines.train_config import TrainConfig, study_digest
from serve_table.artifact import Artifact

SECONDS_A_MINUTE = 60.0


def searched_policies(
    folder: Path, config: TrainConfig, bench: Bench, learned: Learned, start: Artifact | None
) -> Searched:
    """Search and tune, with progress; studies are stored, so a killed search continues."""
    place = config.storage if config.storage is not None else folder / "study.log"
    prefix = f"train-{study_digest(config)} "
    plan = SearchPlan(
        trials=config.trials,
        seed=config.seed,
        jobs=config.jobs,
        objective=config.objective,
        limit_s=math.inf if config.minutes is None else config.minutes * SECONDS_A_MINUTE,
        start=start,
    )
    with bars() as step:
        return search_policies(bench, learned, lambda name: StoredStudy(place, f"{prefix}{name}"), plan, step)


@contextmanager
def bars() -> Iterator[Step]:
    """A progress bar for each step, which ends the one before it."""
    shown: list[Progress] = []

    def end() -> None:
        for bar in shown:
            bar.__exit__(None, None, None)

    def step(what: str, trials: int) -> Callable[[int, float], None]:
        end()
        shown[:] = [Progress(what, total=trials, unit="trials").__enter__()]

        def tell(tried: int, best: float) -> None:
            shown[0].advance(tried - shown[0].done, best=best)

        return tell

    try:
        yield step
    finally:
        end()


def searched_lines(searched: Searched, objective: str) -> list[str]:
    """What the search found, for people."""
    by_goodput = sorted(searched.training_goodput.items(), key=lambda entry: -entry[1])
    found = ((name, getattr(searched, f"{name}_best")) for name in ("table", "price"))
    return [
        *(f"training goodput {goodput:.3f} {name}" for name, goodput in by_goodput),
        *(
            f"{name}: {objective} objective {best.value:+.4f}, {best.tried} points tried, {best.pruned} of them stopped"
            " after a few traces"
            for name, best in found
        ),
        *front_lines(searched.front),
    ]


def front_lines(front: Sequence[FrontPoint]) -> list[str]:
    """The ends of a front: what each costs in the other respects."""
    if not front:
        return []
    ends = {
        "highest goodput": front[0],
        "lowest latency": max(front, key=lambda point: point.latency_gain),
        "shortest tail": min(front, key=lambda point: point.ttft_p99_ratio),
    }
    return [
        f"{len(front)} points of the price that no other one beats in goodput, latency and tail; times against tuned "
        f"{LATENCY_REFERENCE}:",
        *(
            f"  {what}: goodput {point.goodput:.3f}, P90 TTFT {point.ttft_p90_ratio - 1.0:+.0%}, P99 TTFT "
            f"{point.ttft_p99_ratio - 1.0:+.0%}, P90 TPOT {point.tpot_p90_ratio - 1.0:+.0%}"
            for what, point in ends.items()
        ),
    ]


def front_json(front: Sequence[FrontPoint]) -> bytes:
    """The front as an indented JSON file, which `front_from` reads back."""
    return msgspec.json.format(msgspec.json.encode(list(front)), indent=2) + b"\n"


def front_from(path: Path) -> list[FrontPoint]:
    return msgspec.json.decode(path.read_bytes(), type=list[FrontPoint])
