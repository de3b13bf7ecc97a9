"""What a live comparison starts from: its SLO targets and its simulated rates, from an artifact, a calibration or the
hardware's profile.
"""

import argparse
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from learn.costs import fitted_topology
from learn.saturation import round_robin_goodput
from learn.simulation import Topology
from learn.table import Costs, costs_of_artifact
from pipelines.calibration_start import start_from
from pipelines.collect import PROFILE_OVERHEAD_S, mid_collapse_rate
from pipelines.live_run import EXISTING, ClusterConfig, Say
from pipelines.stages import Run
from pipelines.workload_spec import WorkloadSpec, requests_of
from serve_table.artifact import Artifact, load, write_atomically
from serve_table.calibration import load as load_calibration
from serve_table.errors import ConfigError
from serve_table.slo import SloTargets
from serve_table.step_time import HardwareProfile, hardware_profile

TRIED_RATES = (0.85, 1.0, 1.15)
TRIED_SEEDS = 20


class RateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a simulated rate was found for."""

    workload: WorkloadSpec
    topology: str
    slo: SloTargets
    profile: HardwareProfile
    overhead_s: float


def add_start_arguments(parser: argparse.ArgumentParser) -> None:
    """`--artifact` and `--calibration`, of which a run has one or none."""
    add = parser.add_argument
    add("--artifact", type=Path, metavar="FILE", help="table, lengths, SLO targets and fitted costs of `rutter export`")
    add("--calibration", type=Path, metavar="FILE", help="SLO targets and costs of `rutter calibrate`")


@dataclass(frozen=True)
class LiveStart:
    """Where SLO targets and costs come from. artifact, calibration: paths, at most one of them is not None."""

    hardware: str
    artifact: Path | None
    calibration: Path | None

    @cached_property
    def loaded(self) -> Artifact | None:
        return None if self.artifact is None else load(self.artifact)

    @cached_property
    def slo(self) -> SloTargets:
        """The targets that the router of every run has."""
        if self.loaded is not None:
            return self.loaded.slo_targets()
        calibration = None if self.calibration is None else load_calibration(self.calibration)
        return start_from(self.hardware, calibration).slo

    @cached_property
    def costs(self) -> Costs:
        """The fitted constants, or the profile's."""
        if self.loaded is not None:
            artifact = self.loaded
            return costs_of_artifact(artifact)
        if self.calibration is not None:
            start = start_from(self.hardware, load_calibration(self.calibration))
            return Costs(start.profile.step, start.profile.handoff, start.overhead_s)
        profile = hardware_profile(self.hardware)
        return Costs(profile.step, profile.handoff, PROFILE_OVERHEAD_S)

    @property
    def source(self) -> str:
        """Where the SLO targets are from, for people."""
        if self.loaded is not None:
            return f"artifact {self.loaded.digest()}"
        return f"the {self.hardware} profile" if self.calibration is None else f"calibration {self.calibration.name}"

    def lengths_digest(self) -> str | None:
        """Of the artifact's length predictor; None for the constant one."""
        return None if self.loaded is None else lengths_digest(self.loaded)

    def topology(self, cluster: ClusterConfig) -> Topology:
        """The cluster as the simulator has it, which needs a prefill engine."""
        return self.topology_of(max(cluster.prefill_engines, 1), cluster.decode_engines)

    def topology_of(self, prefill_engines: int, decode_engines: int) -> Topology:
        """So many engines with these costs."""
        return fitted_topology(prefill_engines, decode_engines, hardware_profile(self.hardware), self.costs)


def lengths_digest(artifact: Artifact) -> str:
    """Of an artifact's length predictor."""
    names = ("length_scale", "length_levels", "length_quantiles_tokens")
    content = b"".join(artifact.arrays[name].tobytes() for name in names)
    return hashlib.sha256(content).hexdigest()[:16]


def start_of(args: argparse.Namespace, cluster: ClusterConfig) -> LiveStart:
    """The start of the flags; ConfigError where they contradict each other, ArtifactError where a file is none."""
    if args.artifact is not None and args.calibration is not None:
        raise ConfigError("--artifact has SLO targets and costs of its own: leave out --calibration")
    start = LiveStart(cluster.hardware, args.artifact, args.calibration)
    start.topology(cluster)
    return start


def lasting(cluster: ClusterConfig) -> ClusterConfig:
    """The cluster without the URLs and the served name of engines that can be started again and are the same then."""
    if cluster.kind == EXISTING:
        return cluster
    return msgspec.structs.replace(cluster, prefill_urls=(), decode_urls=(), model=cluster.kind)


def simulated_rate(run_: Run, spec: WorkloadSpec, cluster: ClusterConfig, start: LiveStart, say: Say) -> float:
    """Where the simulator has round robin in mid-collapse; found once in a run folder and kept."""
    topology = start.topology(cluster)
    config = RateConfig(spec, str(topology), start.slo, topology.profile, topology.overhead_s)
    name = f"rate-{stage_word(spec.name)}"
    stage = run_.begin(name, msgspec.to_builtins(config))
    path = stage.folder / "rate.json"
    if stage.record is None:
        rate = mid_collapse_rate(spec, topology, say, start.slo)
        write_atomically(path, msgspec.json.encode(rate))
        run_.finish(name, msgspec.to_builtins(config), {"rate": path})
    return msgspec.json.decode(path.read_bytes(), type=float)


def typical(spec: WorkloadSpec, cluster: ClusterConfig, start: LiveStart) -> WorkloadSpec:
    """Of the specification's next seeds the one on which simulated round robin is nearest its mean over them.

    One short trace's goodput is some 0.06 off the mean of its kind, by its bursts alone; probes on a typical one are
    not. Compared at a few rates about the specification's. An imported trace stays as it is: it has one sequence.
    """
    if not spec.is_synthetic:
        return spec
    topology = start.topology(cluster)
    specs = [msgspec.structs.replace(spec, seed=spec.seed + k) for k in range(TRIED_SEEDS)]
    rates = [factor * spec.requests_per_s for factor in TRIED_RATES]
    goodput = np.array([[_goodput(one, topology, start.slo, rate) for rate in rates] for one in specs])
    distance = np.sum((goodput - goodput.mean(axis=0)) ** 2, axis=1)
    return specs[int(np.argmin(distance))]


def _goodput(spec: WorkloadSpec, topology: Topology, slo: SloTargets, rate: float) -> float:
    trace = requests_of(msgspec.structs.replace(spec, requests_per_s=rate))
    return round_robin_goodput([trace], topology, slo, rate)


def stage_word(workload: str) -> str:
    """A workload's name as part of a folder's name, which a file's path could not be."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in workload)
