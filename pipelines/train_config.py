"""What decides what `rutter train` learns, and the baselines that it leaves."""

import msgspec

from pipelines.stages import canonical, digest_of_config
from pipelines.workload_spec import WorkloadSpec


class TrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides what is learned. journals: path to digest of its content. workload: what was
    sent, where the run collected it itself. calibration: the file's digest. objective: of the learned policies.
    minutes: of all searches together. start: digest of the artifact whose parameters are tried first."""

    journals: dict[str, str]
    hardware: str
    cluster_kind: str | None
    trials: int
    jobs: int
    seed: int
    storage: str | None
    workload: WorkloadSpec | None
    calibration: str | None = None
    objective: str = "goodput"
    minutes: float | None = None
    start: str | None = None


class Baselines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tuned parameters of every baseline, for the evaluation that export makes."""

    params: dict[str, dict[str, float | str]]
    training_goodput: dict[str, float]


def study_digest(config: TrainConfig) -> str:
    """Equal on all machines that share a search, whatever their cores, paths and budgets are.

    Equal for every objective too: the baselines' tuning is the same, the others' studies are named after it.
    """
    shared = msgspec.structs.replace(
        config, trials=0, jobs=0, storage=None, journals={}, objective="", minutes=None, start=None
    )
    return digest_of_config(canonical({"config": shared, "journals": sorted(config.journals.values())}))
