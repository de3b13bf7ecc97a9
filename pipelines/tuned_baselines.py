"""The baselines' parameters in a live comparison: a training run's tuned ones, or the published defaults."""

from pathlib import Path

import msgspec

from learn.policy_space import baseline_params
from learn.table import Costs
from pipelines.stages import RUNS_FOLDER, Run
from pipelines.train_config import Baselines
from serve_table.errors import ConfigError
from serve_table.step_time import hardware_profile

Params = dict[str, float | str]


def tuned_params(source: str | None) -> dict[str, Params]:
    """By policy, from a run's name, its folder or its baselines.json; empty for None.

    Raises ConfigError where there is no such file, RunError where the run has no training.
    """
    if source is None:
        return {}
    path = Path(source)
    if not path.is_file():
        run_ = Run(path if path.is_dir() else RUNS_FOLDER / source)
        if not run_.folder.is_dir():
            raise ConfigError(
                f"--tuned {source!r}: neither a run under {RUNS_FOLDER}, a run folder nor a baselines.json"
            )
        path = run_.output_path(run_.latest("train"), "baselines")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Baselines).params
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--tuned {source!r}: {path} is no baselines.json of a training run ({error})") from error


def live_params(name: str, tuned: dict[str, Params], costs: Costs, hardware: str) -> Params:
    """What the router is given for a policy; the marginal-cost router gets the fitted constants as in training."""
    return baseline_params(name, tuned.get(name, {}), costs, hardware_profile(hardware).kv_tokens)
