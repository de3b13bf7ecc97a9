"""The baselines' parameters in a live comparison: as training or a simulated comparison tuned them, or as published."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from learn.policy_space import baseline_params
from learn.table import Costs
from learn.training import BASELINES
from pipelines.grid_rivals import ComparedCell
from pipelines.stages import RUNS_FOLDER, Run
from pipelines.train_config import Baselines
from serve_table.errors import ConfigError
from serve_table.step_time import hardware_profile

Params = dict[str, float | str]


def tuned_params(source: str | None, workloads: Sequence[str], topology: str) -> dict[str, dict[str, Params]]:
    """By workload and policy, from a run's name, its folder or its baselines.json; none for None.

    A training run tuned them for all workloads alike, a simulated comparison for each on its topology, e.g. 2P+4D.
    Raises ConfigError where there is no such file, RunError where the run has neither.
    """
    if source is None:
        return {name: {} for name in workloads}
    path = Path(source)
    if not path.is_file():
        run_ = Run(path if path.is_dir() else RUNS_FOLDER / source)
        if not run_.folder.is_dir():
            raise ConfigError(
                f"--tuned {source!r}: neither a run under {RUNS_FOLDER}, a run folder nor a baselines.json"
            )
        if run_.finished("cell-"):
            cells = {name: ComparedCell(run_, name, topology) for name in workloads}
            return {name: {one: cell.judged(one)[1].params for one in BASELINES} for name, cell in cells.items()}
        path = run_.output_path(run_.latest("train"), "baselines")
    try:
        params = msgspec.json.decode(path.read_bytes(), type=Baselines).params
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--tuned {source!r}: {path} is no baselines.json of a training run ({error})") from error
    return dict.fromkeys(workloads, params)


def live_params(name: str, tuned: dict[str, Params], costs: Costs, hardware: str) -> Params:
    """What the router is given for a policy; the marginal-cost router gets the fitted constants as in training."""
    return baseline_params(name, tuned.get(name, {}), costs, hardware_profile(hardware).kv_tokens)
