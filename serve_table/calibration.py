"""A calibration: what `rutter calibrate` measured on a cluster, as one strict JSON file."""

import json
import math
from pathlib import Path
from typing import Literal

import msgspec

from serve_table.artifact import write_atomically
from serve_table.artifact_metadata import SloMetadata
from serve_table.errors import ConfigError
from serve_table.slo import CLASS_NAMES, SloClass, SloTargets
from serve_table.step_time import Handoff, StepTime

VERSION = 1
MAX_BYTES = 4 * 2**20

Kind = Literal["prefill", "decode", "interference", "handoff"]
KINDS: tuple[Kind, ...] = ("prefill", "decode", "interference", "handoff")


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measurement. measured_s, fitted_s: of engine time, that is wall time divided by the dilation.

    kind: `prefill` is the time to the one token of a cold prompt on an idle engine; `decode` the gap between two
    tokens of `batch` running sequences; `interference` the gap that a local prefill of `prompt_tokens` makes among
    them; `handoff` the time from sending a decode leg to its first token. context_tokens: KV tokens of the running
    sequences, summed. engine: its place in the cluster, as `decode 0`.
    """

    kind: Kind
    engine: str
    prompt_tokens: int
    batch: int
    context_tokens: int
    measured_s: float
    fitted_s: float


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fitted constant and its 95 % interval, or the profile's where the points could not tell it."""

    value: float
    low: float
    high: float
    source: Literal["measured", "profile"]


class Constants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Those of `serve_table.step_time` and the time that a leg spends outside its engine's steps."""

    floor_s: Constant
    per_token_s: Constant
    knee_tokens: Constant
    per_token_beyond_s: Constant
    per_context_token_s: Constant
    handoff_latency_s: Constant
    handoff_per_token_s: Constant
    overhead_s: Constant


class Residual(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """|fitted / measured - 1| of one kind of point."""

    kind: Kind
    points: int
    median: float
    max: float


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """time: Unix, of the measurement's end. duration_s: wall. http_s: a round trip that does no work, wall.

    max_num_batched_tokens: what a step was taken to hold at most. notes: what a person must know of it.
    """

    version: int = VERSION
    time: float
    duration_s: float
    cluster_kind: str
    dilation: float
    prefill_engines: int
    decode_engines: int
    model: str
    hardware: str
    max_num_batched_tokens: int
    seed: int
    http_s: float
    constants: Constants
    slo: list[SloMetadata]
    residuals: list[Residual]
    notes: list[str]
    points: list[Point]

    def step_time(self) -> StepTime:
        fitted = self.constants
        return StepTime(
            fitted.floor_s.value,
            fitted.per_token_s.value,
            fitted.knee_tokens.value,
            fitted.per_token_beyond_s.value,
            fitted.per_context_token_s.value,
        )

    def handoff(self) -> Handoff:
        return Handoff(self.constants.handoff_latency_s.value, self.constants.handoff_per_token_s.value)

    @property
    def overhead_s(self) -> float:
        return self.constants.overhead_s.value

    def slo_targets(self) -> SloTargets:
        loose, tight = (SloClass(*msgspec.structs.astuple(entry)) for entry in self.slo)
        return SloTargets(loose=loose, tight=tight)


def load(path: Path) -> Calibration:
    """Read and check a calibration file; ConfigError names the file and what is wrong with it."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the calibration {path}: {error.strerror}") from error
    try:
        return parse(content)
    except ConfigError as error:
        raise ConfigError(f"calibration {path} is refused: {error}") from error


def parse(content: bytes) -> Calibration:
    """The checked calibration in these bytes; ConfigError says what is wrong."""
    if len(content) > MAX_BYTES:
        raise ConfigError(f"more than {MAX_BYTES} bytes")
    try:
        fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        # A newer version may have other fields: say so rather than complain of one of them.
        version = msgspec.json.decode(fields.get("version", b"null"), type=int)
        if version != VERSION:
            raise ConfigError(
                f"version {version}, this program reads version {VERSION}: use the matching version of rutter, "
                "or calibrate again"
            )
        return checked(msgspec.json.decode(content, type=Calibration))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"no calibration, or truncated ({error}); make one with `rutter calibrate`") from error


def save(calibration: Calibration, path: Path) -> None:
    """Write atomically. Raises ConfigError for what no calibration may hold, ArtifactError where it cannot write."""
    document = json.dumps(msgspec.to_builtins(checked(calibration)), allow_nan=False, indent=1)
    write_atomically(path, document.encode() + b"\n")


def checked(calibration: Calibration) -> Calibration:
    """The calibration itself if every rule holds; ConfigError names the first that does not."""
    for name in ("time", "duration_s", "http_s"):
        _require(name, getattr(calibration, name))
    if not 0.0 < calibration.dilation < math.inf:
        raise ConfigError(f"dilation is {calibration.dilation}: must be above 0 and finite")
    if calibration.decode_engines < 1 or calibration.prefill_engines < 0:
        raise ConfigError("it must have at least one decode engine")
    for name in calibration.constants.__struct_fields__:
        constant = getattr(calibration.constants, name)
        for part in ("value", "low", "high"):
            _require(f"constants.{name}.{part}", getattr(constant, part))
        if not constant.low <= constant.value <= constant.high:
            raise ConfigError(f"constants.{name}: {constant.value} is not within its interval")
    if [entry.name for entry in calibration.slo] != list(CLASS_NAMES):
        raise ConfigError(f"the SLO targets must be those of {' and '.join(CLASS_NAMES)}, in this order")
    for entry in calibration.slo:
        for name in ("ttft_base_s", "ttft_per_prompt_token_s", "tpot_s"):
            _require(f"slo.{entry.name}.{name}", getattr(entry, name))
        if entry.tpot_s == 0.0 or entry.ttft_base_s + entry.ttft_per_prompt_token_s == 0.0:
            raise ConfigError(f"slo.{entry.name}: a target of 0 s cannot be met")
    for point in calibration.points:
        _require("a point's measured_s", point.measured_s)
        _require("a point's fitted_s", point.fitted_s)
    for residual in calibration.residuals:
        _require(f"the median residual of {residual.kind}", residual.median)
        _require(f"the largest residual of {residual.kind}", residual.max)
    return calibration


def _require(what: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ConfigError(f"{what} is {value}: must be finite and at least 0")


def age_text(time: float, now: float) -> str:
    """How long ago a Unix time was, for people."""
    seconds = now - time
    if seconds < -60.0:
        return "in the future by this machine's clock"
    for unit, length_s in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 2.0 * length_s:
            return f"{seconds / length_s:.0f} {unit} ago"
    return "within the last two minutes"
