"""The compiled table: clusters and regimes as arrays that the router looks up, and the artifact around them."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, replace
from importlib.metadata import version
from platform import python_version

import msgspec
import numpy as np
import numpy.typing as npt

from learn.clusters import Clusters
from learn.frame import CleanFrame
from learn.grid import MAX_CELLS, Grid, choose_grid, fill_cells
from learn.lengths import LengthQuantiles
from learn.regimes import DEFAULT_SHAPE, MIN_ROWS, Regimes, cell_counts, fit_regimes
from serve_table.artifact import ENGINE_LIMITS, MAX_BYTES, Artifact, validated
from serve_table.artifact_metadata import FEATURE_NAMES, FORMAT_VERSION, LearnedForm, Metadata, Score, SloMetadata
from serve_table.errors import ArtifactError
from serve_table.lookup import Table
from serve_table.policy import PlacementParams
from serve_table.price_params import LEARNED_FIELDS, PriceParams
from serve_table.slo import SloTargets
from serve_table.step_time import Handoff, HardwareProfile, StepTime

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

HELD_OUT_SHARE = 0.2
MAX_DIGESTS = 64
"""Segments beyond this number are named by one digest of all their digests, to keep the artifact small."""

LIBRARIES = ("numpy", "pandas", "scikit-learn", "scipy", "numba", "optuna", "safetensors")


@dataclass(frozen=True)
class CompiledTable:
    """Everything of the table but its actions, which the search finds.

    cell_clusters (grid.n_cells,): cluster of every grid cell. counts, inherited (n_clusters * n_regimes,), flat,
    regimes minor: rows of each cell, and 1 where they are too few. agreement: share of the journal's rows that the
    table puts in their exact k-means cluster; held_out_agreement: the same, of rows that had no part in choosing
    or filling the grid, None where there were too few.
    """

    clusters: Clusters
    regimes: Regimes
    grid: Grid
    cell_clusters: Bytes
    counts: Ints
    inherited: Bytes
    agreement: float
    held_out_agreement: float | None

    @property
    def n_actions(self) -> int:
        """Number of (cluster, regime) cells."""
        return len(self.inherited)

    def decision_table(self, actions: npt.ArrayLike) -> Table:
        """The router's table with these actions (n_actions,)."""
        return Table(
            grid_scale=list(self.grid.scale),
            grid_bins=list(self.grid.bins),
            clusters=self.cell_clusters.tobytes(),
            actions=np.asarray(actions, dtype=np.uint8).tobytes(),
            prefill_edges_tokens=self.regimes.prefill_edges_tokens,
            decode_edges_requests=self.regimes.decode_edges_requests,
        )


def compile_table(
    features: Floats,
    pressures: Floats,
    clusters: Clusters,
    *,
    seed: int,
    regime_shape: tuple[int, int] = DEFAULT_SHAPE,
    min_rows: int = MIN_ROWS,
    max_cells: int = MAX_CELLS,
) -> CompiledTable:
    """Compile clusters into a table from a journal's features (n_rows, 5) and pressures (n_rows, 2).

    A share of the rows is set aside to measure the agreement of a table made from the others; the table returned
    has the grid of the latter and is filled from all rows.
    """
    usable = np.isfinite(features).all(axis=1)
    features, pressures = features[usable], pressures[usable]
    labels = clusters.assign(features)
    order = np.random.default_rng(seed).permutation(len(features))
    n_held_out = int(len(features) * HELD_OUT_SHARE)
    held_out, made_from = order[:n_held_out], order[n_held_out:]
    grid = choose_grid(features[made_from], clusters, seed=seed, max_cells=max_cells)
    cells = grid.cells(features)
    partial = fill_cells(grid, clusters, cells[made_from], labels[made_from])
    cell_clusters = fill_cells(grid, clusters, cells, labels)
    regimes = fit_regimes(pressures, regime_shape)
    counts = cell_counts(labels, regimes.of(pressures), len(clusters), len(regimes))
    return CompiledTable(
        clusters=clusters,
        regimes=regimes,
        grid=grid,
        cell_clusters=cell_clusters,
        counts=counts,
        inherited=(counts < min_rows).astype(np.uint8),
        agreement=float(np.mean(cell_clusters[cells] == labels)) if len(labels) else 1.0,
        held_out_agreement=float(np.mean(partial[cells[held_out]] == labels[held_out])) if n_held_out else None,
    )


def with_regimes(
    compiled: CompiledTable, regimes: Regimes, pressures: Floats, min_rows: int = MIN_ROWS
) -> CompiledTable:
    """The same table under other regimes, its cells counted anew from the rows' pressures (n_rows, 2)."""
    counts = cell_counts(compiled.clusters.labels, regimes.of(pressures), len(compiled.clusters), len(regimes))
    return replace(compiled, regimes=regimes, counts=counts, inherited=(counts < min_rows).astype(np.uint8))


@dataclass(frozen=True)
class Costs:
    """Fitted constants of the engines. overhead_s: router and HTTP time of a leg."""

    step_time: StepTime
    handoff: Handoff
    overhead_s: float


def costs_of_artifact(artifact: Artifact) -> Costs:
    """The fitted constants that an artifact carries."""
    return Costs(artifact.step_time(), artifact.handoff(), float(artifact.arrays["overhead_s"].astype(float)[0]))


@dataclass(frozen=True)
class SearchRecord:
    """How the actions and the placement were found, and the held-out score of them and of every baseline."""

    seed: int
    sampler: str
    search_jobs: int
    trials: int
    study: str
    held_out: tuple[Score, ...]


@dataclass(frozen=True)
class Source:
    """What an artifact is learned from: rows of a journal, or of simulated runs that stand in for one.

    last_time: Unix time of the last row, None where it has none.
    """

    cluster_kind: str
    dilation: float
    rows: int
    dropped: dict[str, int]
    digests: tuple[str, ...]
    last_time: float | None


def source_of(frame: CleanFrame) -> Source:
    """A journal."""
    last_time = float(frame.rows["time"].max())
    return Source(
        cluster_kind=frame.cluster_kind,
        dilation=frame.dilation,
        rows=len(frame),
        dropped=frame.report.counts(),
        digests=frame.digests,
        last_time=last_time if math.isfinite(last_time) else None,
    )


def build_artifact(
    frame: CleanFrame | Source,
    compiled: CompiledTable,
    actions: npt.ArrayLike,
    placement: PlacementParams,
    lengths: LengthQuantiles,
    costs: Costs,
    targets: SloTargets,
    search: SearchRecord,
    *,
    form: LearnedForm,
    price: Mapping[str, float],
    profile: HardwareProfile,
    workload: str,
    prefill_engines: int,
    decode_engines: int,
    calibrated_time: float | None = None,
) -> Artifact:
    """The validated artifact of a training run; equal parts give equal bytes.

    actions (compiled.n_actions,): of every cell, inherited ones too. form: the better one of the two learned policies.
    price: its learned parameters by name, the defaults where one is missing. profile: for the engines' limits. A
    percentile of a score that is not finite becomes null. Raises ArtifactError where a part is not finite or does not
    fit, and where the file would be too large.
    """
    given = np.asarray(actions)
    if given.shape != (compiled.n_actions,):
        raise ArtifactError(f"actions of shape {given.shape}: the table has {compiled.n_actions} cells")
    if not np.isin(given, (0, 1)).all():
        raise ArtifactError("actions must be 0 (local) or 1 (remote)")
    source = source_of(frame) if isinstance(frame, CleanFrame) else frame
    metadata = Metadata(
        format_version=FORMAT_VERSION,
        feature_names=list(FEATURE_NAMES),
        slo=[SloMetadata(*astuple(slo)) for slo in (targets.loose, targets.tight)],
        cluster_kind=source.cluster_kind,
        dilation=_finite("the dilation", source.dilation),
        prefill_engines=prefill_engines,
        decode_engines=decode_engines,
        workload=workload,
        journal_rows=source.rows,
        journal_dropped=source.dropped,
        journal_digests=short_digests(source.digests),
        journal_last_time=source.last_time,
        seed=search.seed,
        sampler=search.sampler,
        search_jobs=search.search_jobs,
        trials=search.trials,
        study=search.study,
        table_agreement=_finite("the table's agreement", compiled.agreement),
        held_out=[strict_score(score) for score in search.held_out],
        policy=form,
        library_versions={"python": python_version()} | {name: version(name) for name in LIBRARIES},
        calibrated_time=calibrated_time,
    )
    learned_price = asdict(PriceParams()) | dict(price)
    limits = {
        "engine_limits": np.array([getattr(profile, name) for name in ENGINE_LIMITS], np.int64),
        "price": np.array([learned_price[name] for name in LEARNED_FIELDS], np.float64),
    }
    artifact = validated(Artifact(_arrays(compiled, given, placement, lengths, costs) | limits, metadata))
    size_bytes = len(artifact.to_bytes())
    if size_bytes > MAX_BYTES:
        raise ArtifactError(
            f"the artifact would have {size_bytes} bytes, at most {MAX_BYTES} are allowed: compile with fewer cells"
        )
    return artifact


def with_price(artifact: Artifact, price: Mapping[str, float]) -> Artifact:
    """The same artifact with these learned parameters of the price, which policy 'rutter' is then; the others stay."""
    learned = asdict(artifact.price()) | dict(price)
    arrays = artifact.arrays | {"price": np.array([learned[name] for name in LEARNED_FIELDS], np.float64)}
    return validated(Artifact(arrays, msgspec.structs.replace(artifact.metadata, policy="price", study="price")))


def _arrays(
    compiled: CompiledTable,
    actions: npt.NDArray[np.generic],
    placement: PlacementParams,
    lengths: LengthQuantiles,
    costs: Costs,
) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays as `serve_table.artifact.ARRAYS` lists them."""
    doubles = {
        "grid_scale": compiled.grid.scale,
        "prefill_edges_tokens": compiled.regimes.prefill_edges_tokens,
        "decode_edges_requests": compiled.regimes.decode_edges_requests,
        "placement": astuple(placement),
        "length_scale": [lengths.scale],
        "length_levels": lengths.levels,
        "length_quantiles_tokens": lengths.quantiles_tokens,
        "step_time": costs.step_time.as_list(),
        "handoff": costs.handoff.as_list(),
        "overhead_s": [costs.overhead_s],
        "centres_tokens": compiled.clusters.centres_tokens,
    }
    return {
        **{name: np.array(values, dtype=np.float64) for name, values in doubles.items()},
        "grid_bins": np.array(compiled.grid.bins, dtype=np.int64),
        "clusters": compiled.cell_clusters,
        "actions": actions.astype(np.uint8),
        "inherited": compiled.inherited,
        "counts": compiled.clusters.counts,
    }


def strict_score(score: Score) -> Score:
    """The score as strict JSON can hold it: a missing percentile is null; goodput must be known."""
    for name in ("goodput", "goodput_low", "goodput_high"):
        _finite(f"{name} of {score.policy!r}", getattr(score, name))
    percentiles = {name: getattr(score, name) for name in ("ttft_p90_s", "ttft_p99_s", "tpot_p90_s")}
    known = {name: value if value is not None and math.isfinite(value) else None for name, value in percentiles.items()}
    return msgspec.structs.replace(score, **known)


def _finite(what: str, value: float) -> float:
    if not math.isfinite(value):
        raise ArtifactError(f"{what} is {value}: an artifact holds finite numbers only")
    return float(value)


def short_digests(digests: tuple[str, ...]) -> list[str]:
    """The digests themselves, or one of them all where they are more than MAX_DIGESTS."""
    if len(digests) <= MAX_DIGESTS:
        return list(digests)
    return [hashlib.sha256("".join(digests).encode()).hexdigest()]
