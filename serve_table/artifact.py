"""The artifact: one safetensors file of arrays and strict-JSON metadata. No pickle, at most 64 KiB."""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from serve_table.artifact_metadata import FEATURE_NAMES, FORMAT_VERSION, Metadata
from serve_table.errors import ArtifactError, ConfigError
from serve_table.lookup import Table
from serve_table.predictor import LengthPredictor
from serve_table.price_params import LEARNED_FIELDS, PriceParams, price_constants
from serve_table.situation import LOCAL, REMOTE
from serve_table.slo import SloClass, SloTargets
from serve_table.step_time import A40_3B, Handoff, HardwareProfile, StepTime

MAX_BYTES = 64 * 1024
MAX_CLUSTERS = 64

# name -> (dtype, number of dimensions)
ARRAYS = {
    "grid_scale": ("float64", 1),
    "grid_bins": ("int64", 1),
    "clusters": ("uint8", 1),
    "actions": ("uint8", 1),
    "inherited": ("uint8", 1),
    "prefill_edges_tokens": ("float64", 1),
    "decode_edges_requests": ("float64", 1),
    "placement": ("float64", 1),
    "length_scale": ("float64", 1),
    "length_levels": ("float64", 1),
    "length_quantiles_tokens": ("float64", 2),
    "step_time": ("float64", 1),
    "handoff": ("float64", 1),
    "overhead_s": ("float64", 1),
    "engine_limits": ("int64", 1),
    "price": ("float64", 1),
    "centres_tokens": ("float64", 2),
    "counts": ("int64", 1),
}
N_PLACEMENT = 7
ENGINE_LIMITS = ("kv_tokens", "max_num_seqs", "max_num_batched_tokens")
"""Fields of `HardwareProfile` that the price knows of the engines."""


@dataclass(frozen=True)
class Artifact:
    """Arrays as `ARRAYS` lists them, and their metadata. Build through `validated`, which raises ArtifactError.

    clusters and actions as in `lookup.Table`; inherited (n_clusters * n_regimes,): 1 where a cell had too few
    journal rows, so that its action follows from its cluster's rule alone. placement (7,): params of the table policy.
    length_quantiles_tokens (n_bins, n_levels). overhead_s (1,): router and HTTP time of a leg. engine_limits (3,) in
    the order of ENGINE_LIMITS. price (19,): what was learned of the price, in the order of LEARNED_FIELDS.
    centres_tokens (n_clusters, 5) in the order of FEATURE_NAMES. counts (n_clusters,).
    """

    arrays: dict[str, npt.NDArray[np.generic]]
    metadata: Metadata

    @property
    def n_clusters(self) -> int:
        return len(self.arrays["counts"])

    @property
    def n_regimes(self) -> int:
        return (len(self.arrays["prefill_edges_tokens"]) + 1) * (len(self.arrays["decode_edges_requests"]) + 1)

    def table(self) -> Table:
        """The table with plain Python sequences, which are fastest to index one at a time."""
        return Table(
            grid_scale=self.arrays["grid_scale"].tolist(),
            grid_bins=self.arrays["grid_bins"].tolist(),
            clusters=self.arrays["clusters"].tobytes(),
            actions=self.arrays["actions"].tobytes(),
            prefill_edges_tokens=tuple(self.arrays["prefill_edges_tokens"].tolist()),
            decode_edges_requests=tuple(self.arrays["decode_edges_requests"].tolist()),
        )

    def params(self) -> list[float]:
        return list(self.arrays["placement"].tolist())

    def predictor(self, level: float = 0.5) -> LengthPredictor:
        """The predictor at the stored quantile level nearest to `level`."""
        column = int(np.argmin(np.abs(self.arrays["length_levels"].astype(float) - level)))
        lengths = self.arrays["length_quantiles_tokens"][:, column].tolist()
        return LengthPredictor(float(self.arrays["length_scale"][0]), lengths)

    def step_time(self) -> StepTime:
        return StepTime(*self.arrays["step_time"].tolist())

    def handoff(self) -> Handoff:
        return Handoff(*self.arrays["handoff"].tolist())

    @property
    def overhead_s(self) -> float:
        return float(self.arrays["overhead_s"].astype(float)[0])

    def price(self) -> PriceParams:
        """The price's parameters: the fitted constants, the targets, and what was learned."""
        limits = dict(zip(ENGINE_LIMITS, self.arrays["engine_limits"].tolist(), strict=True))
        # Of a profile the price reads the constants and these limits alone.
        fitted: HardwareProfile = replace(A40_3B, step=self.step_time(), handoff=self.handoff(), **limits)
        learned = dict(zip(LEARNED_FIELDS, self.arrays["price"].tolist(), strict=True))
        return PriceParams(**price_constants(fitted, self.slo_targets(), self.overhead_s), **learned)

    def slo_targets(self) -> SloTargets:
        loose, tight = (SloClass(*msgspec.structs.astuple(entry)) for entry in self.metadata.slo)
        return SloTargets(loose=loose, tight=tight)

    def to_bytes(self) -> bytes:
        """The file's bytes; the same artifact always gives the same bytes."""
        document = json.dumps(msgspec.to_builtins(self.metadata), allow_nan=False, sort_keys=True)
        return save_tensors(dict(sorted(self.arrays.items())), metadata={"rutter": document})

    def digest(self) -> str:
        return digest_of(self.to_bytes())


def digest_of(content: bytes) -> str:
    """Short name of an artifact's exact content."""
    return hashlib.sha256(content).hexdigest()[:16]


def validated(artifact: Artifact) -> Artifact:
    """The artifact itself if every rule holds; ArtifactError names the first that does not."""
    arrays = artifact.arrays
    for name, (dtype, n_dimensions) in ARRAYS.items():
        if name not in arrays:
            raise ArtifactError(f"array {name!r} is missing")
        array = arrays[name]
        if array.dtype != np.dtype(dtype) or array.ndim != n_dimensions:
            raise ArtifactError(
                f"array {name!r} is {array.dtype} of {array.ndim} dimensions, expected {dtype} of {n_dimensions}"
            )
        if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
            raise ArtifactError(f"array {name!r} holds NaN or infinity")
    unknown = sorted(set(arrays) - set(ARRAYS))
    if unknown:
        raise ArtifactError(f"unknown array {unknown[0]!r}")
    _check_shapes(artifact)
    _check_values(artifact)
    _check_metadata(artifact.metadata)
    try:
        artifact.price()
    except ConfigError as error:
        raise ArtifactError(str(error)) from error
    return artifact


def _check_shapes(artifact: Artifact) -> None:
    arrays = artifact.arrays
    n_clusters, n_regimes = artifact.n_clusters, artifact.n_regimes
    if not 1 <= n_clusters <= MAX_CLUSTERS:
        raise ArtifactError(f"{n_clusters} clusters: must be 1 to {MAX_CLUSTERS}")
    if arrays["grid_bins"].shape != (4,) or arrays["grid_bins"].min() < 1 or arrays["grid_bins"].max() > 256:
        raise ArtifactError("array 'grid_bins' must hold four numbers from 1 to 256")
    expected = {
        "grid_scale": (4,),
        "clusters": (2 * math.prod(arrays["grid_bins"].tolist()),),
        "actions": (n_clusters * n_regimes,),
        "inherited": (n_clusters * n_regimes,),
        "placement": (N_PLACEMENT,),
        "length_scale": (1,),
        "step_time": (5,),
        "handoff": (2,),
        "overhead_s": (1,),
        "engine_limits": (len(ENGINE_LIMITS),),
        "price": (len(LEARNED_FIELDS),),
        "centres_tokens": (n_clusters, len(FEATURE_NAMES)),
    }
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise ArtifactError(f"array {name!r} has shape {arrays[name].shape}, expected {shape}")
    n_bins, n_levels = arrays["length_quantiles_tokens"].shape
    if n_bins < 1 or n_levels < 1 or arrays["length_levels"].shape != (n_levels,):
        raise ArtifactError("arrays 'length_quantiles_tokens' and 'length_levels' do not fit each other")


def _check_values(artifact: Artifact) -> None:
    arrays = artifact.arrays
    if arrays["clusters"].max() >= artifact.n_clusters:
        raise ArtifactError(f"array 'clusters' names cluster {arrays['clusters'].max()} of {artifact.n_clusters}")
    if not np.isin(arrays["actions"], (LOCAL, REMOTE)).all():
        raise ArtifactError("array 'actions' holds something other than 0 (local) and 1 (remote)")
    if not np.isin(arrays["inherited"], (0, 1)).all():
        raise ArtifactError("array 'inherited' holds something other than 0 and 1")
    for name in ("grid_scale", "length_scale", "length_quantiles_tokens", "engine_limits"):
        if arrays[name].min() <= 0:
            raise ArtifactError(f"array {name!r} holds a number that is not positive")
    for name in (
        "placement",
        "price",
        "overhead_s",
        "counts",
        "centres_tokens",
        "prefill_edges_tokens",
        "decode_edges_requests",
    ):
        if arrays[name].size and arrays[name].min() < 0:
            raise ArtifactError(f"array {name!r} holds a negative number")
    for name in ("prefill_edges_tokens", "decode_edges_requests", "length_levels"):
        if np.any(np.diff(arrays[name]) <= 0):
            raise ArtifactError(f"array {name!r} does not ascend")
    try:
        artifact.step_time()
        artifact.handoff()
    except ConfigError as error:
        raise ArtifactError(str(error)) from error


def _check_metadata(metadata: Metadata) -> None:
    if metadata.format_version != FORMAT_VERSION:
        raise ArtifactError(other_format(metadata.format_version))
    if metadata.calibrated_time is not None and not 0.0 <= metadata.calibrated_time < math.inf:
        raise ArtifactError(f"calibrated_time is {metadata.calibrated_time}: must be finite and at least 0")
    if metadata.feature_names != list(FEATURE_NAMES):
        raise ArtifactError(f"features {metadata.feature_names} differ from this program's {list(FEATURE_NAMES)}")
    if [entry.name for entry in metadata.slo] != ["loose", "tight"]:
        raise ArtifactError("the SLO targets must be those of 'loose' and 'tight', in this order")
    for entry in metadata.slo:
        targets = (entry.ttft_base_s, entry.ttft_per_prompt_token_s, entry.tpot_s)
        if not all(math.isfinite(value) and value >= 0 for value in targets) or entry.tpot_s == 0:
            raise ArtifactError(f"the SLO targets of {entry.name!r} must be finite and positive")


def parse(content: bytes) -> Artifact:
    """The validated artifact in these bytes; ArtifactError says what is wrong."""
    if len(content) > MAX_BYTES:
        raise ArtifactError(f"{len(content)} bytes: an artifact has at most {MAX_BYTES}")
    try:
        arrays = load_tensors(content)
        document = _header_metadata(content)["rutter"]
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ArtifactError(f"not a Rutter artifact, or truncated ({error})") from error
    return validated(Artifact(arrays, _parse_metadata(document)))


def _header_metadata(content: bytes) -> dict[str, str]:
    """The string map of a safetensors header: 8 bytes of length, then JSON."""
    length = int.from_bytes(content[:8], "little")
    header: dict[str, dict[str, str]] = json.loads(content[8 : 8 + length])
    return header["__metadata__"]


def other_format(version: int) -> str:
    return f"format {version}, this program reads format {FORMAT_VERSION}: use the matching version of rutter"


def _parse_metadata(document: str) -> Metadata:
    try:
        fields = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
        # A newer format may have other fields: say so rather than complain of one of them.
        version = msgspec.json.decode(fields.get("format_version", b"null"), type=int)
        if version != FORMAT_VERSION:
            raise ArtifactError(other_format(version))
        return msgspec.json.decode(document, type=Metadata)
    except msgspec.DecodeError as error:
        raise ArtifactError(f"its metadata cannot be read: {error}") from error


def load(path: Path) -> Artifact:
    """Read and validate an artifact file; ArtifactError names the file and the reason."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"cannot read the artifact {path}: {error.strerror}") from error
    try:
        return parse(content)
    except ArtifactError as error:
        raise ArtifactError(f"artifact {path} is refused: {error}") from error


def save(artifact: Artifact, path: Path) -> None:
    """Write atomically: the previous file stays until the new one is whole on disk."""
    try:
        content = validated(artifact).to_bytes()
    except ValueError as error:
        raise ArtifactError(f"the artifact's metadata cannot be written: {error}") from error
    if len(content) > MAX_BYTES:
        raise ArtifactError(f"the artifact would have {len(content)} bytes, at most {MAX_BYTES} are allowed")
    write_atomically(path, content)


def write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ArtifactError(f"cannot write {path}: {error.strerror}") from error


def empty_table() -> Table:
    """A table that puts every request in one cluster and sends it remote, for policies that read none."""
    scale: Sequence[float] = [1.0] * 4
    return Table(scale, [1] * 4, bytes(2), bytes([REMOTE]), (), ())
