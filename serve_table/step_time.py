"""How long an engine step and a KV hand-off take: one definition for every user.

The simulator, the emulated engines, the paced vLLM worker and the price all call `step_time_s` and
`handoff_time_s`. Both are in the numpy subset that numba compiles, and take their constants as a flat
sequence so that a list (online) and an array (compiled) serve alike.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from serve_table.errors import ConfigError


def step_time_s(constants: Sequence[float], step_tokens: float, context_tokens: float) -> float:
    """Time of one engine step, in seconds.

    constants: (5,) as `StepTime.as_list` orders them. step_tokens: tokens scheduled in the step, prefill
    and decode. context_tokens: KV tokens read, summed over the sequences in the step.
    """
    beyond = step_tokens - constants[2]
    if beyond > 0.0:
        tokens_s = constants[1] * constants[2] + constants[3] * beyond
    else:
        tokens_s = constants[1] * step_tokens
    return constants[0] + tokens_s + constants[4] * context_tokens


def handoff_time_s(constants: Sequence[float], tokens: float) -> float:
    """Time to pull the KV blocks of `tokens` from a prefill engine, in seconds; constants: (2,)."""
    return constants[0] + constants[1] * tokens


@dataclass(frozen=True)
class StepTime:
    """Constants of `step_time_s`: a floor, a slope up to a knee, a steeper slope beyond, a context slope."""

    floor_s: float
    per_token_s: float
    knee_tokens: float
    per_token_beyond_s: float
    per_context_token_s: float

    def __post_init__(self) -> None:
        require_finite_and_not_negative(self)

    def as_list(self) -> list[float]:
        return list(astuple(self))


@dataclass(frozen=True)
class Handoff:
    """Constants of `handoff_time_s`."""

    latency_s: float
    per_token_s: float

    def __post_init__(self) -> None:
        require_finite_and_not_negative(self)

    def as_list(self) -> list[float]:
        return list(astuple(self))


@dataclass(frozen=True)
class HardwareProfile:
    """Starting constants of one kind of engine and its limits; calibration replaces the times."""

    name: str
    step: StepTime
    handoff: Handoff
    kv_tokens: int
    block_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len_tokens: int

    def __post_init__(self) -> None:
        for field in ("kv_tokens", "block_tokens", "max_num_seqs", "max_num_batched_tokens", "max_model_len_tokens"):
            if getattr(self, field) < 1:
                raise ConfigError(f"profile {self.name!r}: {field} is {getattr(self, field)}: must be at least 1")


def require_finite_and_not_negative(constants: object) -> None:
    """Raise ConfigError naming the first field of a constants record that is negative or not finite."""
    for field in fields(constants):  # type: ignore[arg-type]
        value = getattr(constants, field.name)
        if not 0.0 <= value < float("inf"):
            raise ConfigError(f"{type(constants).__name__}.{field.name} is {value}: must be finite and at least 0")


# Medians of public profiling of a 2.7B model on an NVIDIA A40 (Vidur's data): about 10 ms of floor, 0.025 ms
# a token up to 150 tokens, 0.050 ms beyond; 0.00019 ms a context token with grouped-query attention;
# hand-off over one node's PCIe. 60k tokens of KV an instance as on the testbed of arXiv 2609.16206.
A40_3B = HardwareProfile(
    name="a40-3b",
    step=StepTime(
        floor_s=0.0099,
        per_token_s=0.000025,
        knee_tokens=150.0,
        per_token_beyond_s=0.00005,
        per_context_token_s=0.00000019,
    ),
    handoff=Handoff(latency_s=0.005, per_token_s=0.000008),
    kv_tokens=60_000,
    block_tokens=16,
    max_num_seqs=128,
    max_num_batched_tokens=2048,
    max_model_len_tokens=16_384,
)


def hardware_profile(name: str) -> HardwareProfile:
    """The profile of that name; ConfigError lists the known ones."""
    profiles = {A40_3B.name: A40_3B}
    if name not in profiles:
        raise ConfigError(f"unknown hardware profile {name!r}; known: {', '.join(sorted(profiles))}")
    return profiles[name]
