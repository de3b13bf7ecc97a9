"""SLO classes: what a request is promised, and whether it was kept."""

from dataclasses import dataclass

from serve_table.errors import ConfigError
from serve_table.step_time import HardwareProfile, handoff_time_s, step_time_s

LOOSE = 0
TIGHT = 1
CLASS_NAMES = ("loose", "tight")


@dataclass(frozen=True)
class SloClass:
    """Targets of one class. The TTFT target grows with the prompt; a slope of 0 makes it absolute."""

    name: str
    ttft_base_s: float
    ttft_per_prompt_token_s: float
    tpot_s: float

    def ttft_target_s(self, prompt_tokens: int) -> float:
        return self.ttft_base_s + self.ttft_per_prompt_token_s * prompt_tokens

    def met(self, prompt_tokens: int, ttft_s: float | None, tpot_s: float | None) -> bool | None:
        """Whether both targets were kept; None where TTFT was not measured (not streamed).

        An answer of one token has no TPOT, so only its TTFT counts.
        """
        if ttft_s is None:
            return None
        return ttft_s <= self.ttft_target_s(prompt_tokens) and (tpot_s is None or tpot_s <= self.tpot_s)


@dataclass(frozen=True)
class SloTargets:
    """The two classes, indexed by LOOSE and TIGHT."""

    loose: SloClass
    tight: SloClass

    def __getitem__(self, slo_class: int) -> SloClass:
        return self.tight if slo_class == TIGHT else self.loose

    @staticmethod
    def index(name: str) -> int:
        if name not in CLASS_NAMES:
            raise ConfigError(f"unknown SLO class {name!r}; known: {', '.join(CLASS_NAMES)}")
        return CLASS_NAMES.index(name)


def targets_from_profile(
    profile: HardwareProfile,
    tight: tuple[float, float] = (2.5, 1.5),
    loose: tuple[float, float] = (5.0, 2.0),
    overhead_s: float = 0.0,
) -> SloTargets:
    """Targets as multiples (TTFT, TPOT) of the unloaded times of a profile. overhead_s: of each of the two legs.

    Unloaded TTFT: one remote prefill, hand-off and decode step, as a line in prompt tokens through 0 and
    2,000. Unloaded TPOT: a step of one sequence with 1,000 tokens of context.
    """
    step = profile.step.as_list()
    handoff = profile.handoff.as_list()

    def unloaded_ttft_s(prompt_tokens: float) -> float:
        decode_s = step_time_s(step, 1.0, prompt_tokens)
        prefill_s = step_time_s(step, prompt_tokens, 0.0)
        return prefill_s + handoff_time_s(handoff, prompt_tokens) + decode_s + 2.0 * overhead_s

    base_s = unloaded_ttft_s(0.0)
    slope_s = (unloaded_ttft_s(2000.0) - base_s) / 2000.0
    tpot_s = step_time_s(step, 1.0, 1000.0)

    def target(name: str, multiples: tuple[float, float]) -> SloClass:
        return SloClass(name, multiples[0] * base_s, multiples[0] * slope_s, multiples[1] * tpot_s)

    return SloTargets(loose=target("loose", loose), tight=target("tight", tight))
