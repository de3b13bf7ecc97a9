"""Where a run starts from: a calibration of its cluster, or the hardware's profile."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from learn.costs import OVERHEAD_UNIT_S
from learn.frame import CleanFrame
from pipelines.path_digest import digest_of_path
from serve_table.calibration import Calibration, age_text
from serve_table.calibration import load as load_calibration
from serve_table.slo import SloTargets, targets_from_profile
from serve_table.step_time import HardwareProfile, hardware_profile


def digest_of_calibration(path: Path) -> str:
    """ConfigError where it is none."""
    load_calibration(path)
    return digest_of_path(path)


@dataclass(frozen=True)
class Start:
    """Where the fit of costs begins, the SLO targets, and when both were calibrated; None where they were not."""

    profile: HardwareProfile
    overhead_s: float
    slo: SloTargets
    calibrated_time: float | None


def start_from(hardware: str, calibration: Calibration | None) -> Start:
    """From the calibration where there is one, else from the hardware's profile."""
    profile = hardware_profile(hardware)
    if calibration is None:
        return Start(profile, OVERHEAD_UNIT_S, targets_from_profile(profile), None)
    fitted = replace(profile, step=calibration.step_time(), handoff=calibration.handoff())
    return Start(fitted, calibration.overhead_s, calibration.slo_targets(), calibration.time)


def calibration_line(calibration: Calibration, frame: CleanFrame) -> str:
    """What the fit starts from, and whether it is of the journal's cluster."""
    line = f"costs start from a calibration made {age_text(calibration.time, time.time())}, its SLO targets hold"
    measured = (calibration.cluster_kind, calibration.dilation)
    if measured != (frame.cluster_kind, frame.dilation):
        line += (
            f"; beware: it is of a cluster {measured[0]!r} at dilation {measured[1]:g}, "
            f"the journal of {frame.cluster_kind!r} at {frame.dilation:g}"
        )
    return line
