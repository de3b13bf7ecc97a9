"""SLO classes: targets, what counts as kept, targets from a profile."""

import pytest

from serve_table.errors import ConfigError
from serve_table.slo import LOOSE, TIGHT, SloClass, SloTargets, targets_from_profile
from serve_table.step_time import A40_3B, handoff_time_s, step_time_s

CLASS = SloClass("tight", ttft_base_s=0.1, ttft_per_prompt_token_s=0.001, tpot_s=0.02)


def test_the_ttft_target_grows_with_the_prompt() -> None:
    assert CLASS.ttft_target_s(0) == 0.1
    assert CLASS.ttft_target_s(400) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "met"),
    [
        (CLASS.ttft_target_s(400), 0.02, True),
        (0.501, 0.01, False),
        (0.2, 0.0201, False),
        (0.501, 0.0201, False),
        (None, 0.01, None),
        (None, None, None),
    ],
)
def test_both_targets_must_be_kept_at_the_border_too(
    ttft_s: float | None, tpot_s: float | None, met: bool | None
) -> None:
    assert CLASS.met(400, ttft_s, tpot_s) is met


def test_f15_an_answer_of_one_token_is_judged_by_its_ttft_alone() -> None:
    assert CLASS.met(400, 0.4, None) is True
    assert CLASS.met(400, 0.6, None) is False


def test_targets_are_indexed_by_class() -> None:
    loose = SloClass("loose", 1.0, 0.0, 1.0)
    targets = SloTargets(loose, CLASS)
    assert targets[LOOSE] is loose
    assert targets[TIGHT] is CLASS
    assert (SloTargets.index("loose"), SloTargets.index("tight")) == (LOOSE, TIGHT)
    with pytest.raises(ConfigError, match="unknown SLO class 'gold'; known: loose, tight"):
        SloTargets.index("gold")


def test_targets_from_a_profile_are_multiples_of_its_unloaded_times() -> None:
    targets = targets_from_profile(A40_3B, tight=(3.0, 1.5), loose=(6.0, 2.0))
    step, handoff = A40_3B.step.as_list(), A40_3B.handoff.as_list()
    for prompt in (0, 2000):
        unloaded_s = step_time_s(step, prompt, 0.0) + handoff_time_s(handoff, prompt) + step_time_s(step, 1.0, prompt)
        assert targets.tight.ttft_target_s(prompt) == pytest.approx(3.0 * unloaded_s)
        assert targets.loose.ttft_target_s(prompt) == pytest.approx(6.0 * unloaded_s)
    assert targets.tight.tpot_s == pytest.approx(1.5 * step_time_s(step, 1.0, 1000.0))
    assert targets.loose.tpot_s == pytest.approx(2.0 * step_time_s(step, 1.0, 1000.0))
    assert (targets.loose.name, targets.tight.name) == ("loose", "tight")
