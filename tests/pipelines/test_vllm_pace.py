"""The tempo of paced vLLM engines, by a clock that only the test moves."""

import pytest

from pipelines.pacing import BEHIND_LIMIT_S, Pacing
from pipelines.vllm_cpu.pace import HandoffPace, PaceConfig, StepPace, VllmPacingReport, pace_report
from serve_table.step_time import A40_3B, handoff_time_s, step_time_s


class Clock:
    """Time that passes by computing and by sleeping."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pacing() -> Pacing:
    return Pacing(8.0)


@pytest.fixture
def steps(clock: Clock, pacing: Pacing) -> StepPace:
    return StepPace(pacing, clock, clock.pass_s)


def test_times_are_those_of_the_profile_stretched() -> None:
    config = PaceConfig(step_time=A40_3B.step.as_list(), handoff=A40_3B.handoff.as_list(), dilation=8.0)
    assert config.step_s(2048, 700) == pytest.approx(8.0 * step_time_s(A40_3B.step.as_list(), 2048.0, 700.0))
    assert config.handoff_s(2000) == pytest.approx(8.0 * handoff_time_s(A40_3B.handoff.as_list(), 2000.0))


def test_what_happens_between_steps_does_not_lengthen_them(clock: Clock, steps: StepPace) -> None:
    ends = []
    for _ in range(5):
        steps.begin(1.0)
        clock.pass_s(0.2)  # computing
        steps.end()
        ends.append(clock.now_s)
        clock.pass_s(0.3)  # output processing and scheduling
    assert ends == pytest.approx([101.0, 102.0, 103.0, 104.0, 105.0])


def test_a_step_after_an_idle_time_begins_when_it_begins(clock: Clock, steps: StepPace) -> None:
    steps.begin(1.0)
    steps.end()
    steps.idle()
    clock.pass_s(7.0)
    assert steps.begin(1.0) == pytest.approx(108.0)
    steps.end()
    assert clock.now_s == pytest.approx(109.0)


def test_a_late_step_is_counted_and_caught_up(clock: Clock, steps: StepPace, pacing: Pacing) -> None:
    steps.begin(1.0)
    clock.pass_s(1.6)
    steps.end()
    assert clock.now_s == pytest.approx(101.6)
    steps.begin(1.0)
    clock.pass_s(0.2)
    steps.end()
    assert clock.now_s == pytest.approx(102.0)
    report = pacing.report()
    assert (report.steps, report.steps_late, report.steps_very_late, report.re_anchored) == (2, 1, 1, 0)


def test_a_plan_far_behind_begins_anew_and_is_not_kept(clock: Clock, steps: StepPace, pacing: Pacing) -> None:
    steps.begin(1.0)
    clock.pass_s(1.0 + BEHIND_LIMIT_S + 0.5)
    steps.end()
    steps.begin(1.0)
    steps.end()
    assert clock.now_s == pytest.approx(103.5)
    assert pacing.report().re_anchored == 1
    assert not pacing.report().kept


def test_a_fast_transfer_is_told_when_the_hardware_would_have_finished(clock: Clock) -> None:
    handoffs = HandoffPace(clock)
    handoffs.begin("a", clock.now_s, 2.0)
    handoffs.begin("b", clock.now_s, 1.0)
    assert handoffs.release({"a"}) == set()
    clock.pass_s(1.0)
    assert handoffs.release({"b"}) == {"b"}
    clock.pass_s(1.0)
    assert handoffs.release(set()) == {"a"}
    assert not handoffs.under_way
    assert (handoffs.handoffs, handoffs.handoffs_late) == (2, 0)


def test_a_transfer_much_slower_than_the_hardware_is_late(clock: Clock) -> None:
    handoffs = HandoffPace(clock)
    handoffs.begin("a", clock.now_s, 1.0)
    clock.pass_s(1.4)
    assert handoffs.release(set()) == set()
    clock.pass_s(0.2)
    assert handoffs.release(set()) == set()
    assert handoffs.release({"a"}) == {"a"}
    assert (handoffs.handoffs, handoffs.handoffs_late) == (1, 1)


def test_a_transfer_seen_only_after_a_long_step_is_not_late(clock: Clock) -> None:
    handoffs = HandoffPace(clock)
    handoffs.begin("a", clock.now_s, 1.0)
    clock.pass_s(5.0)
    assert handoffs.release({"a"}) == {"a"}
    assert handoffs.handoffs_late == 0


def test_failed_and_unknown_transfers_are_not_held_back(clock: Clock) -> None:
    handoffs = HandoffPace(clock)
    handoffs.begin("a", clock.now_s, 9.0)
    assert handoffs.release({"a", "unknown"}, failed={"a"}) == {"a", "unknown"}
    assert not handoffs.under_way


def test_late_handoffs_mean_that_the_pace_was_not_kept(clock: Clock, pacing: Pacing) -> None:
    handoffs = HandoffPace(clock)
    for i in range(100):
        handoffs.begin(str(i), clock.now_s, 1.0)
        clock.pass_s(2.0)
        handoffs.release(set())
        handoffs.release({str(i)})
    fields = pace_report(pacing, handoffs)
    report = VllmPacingReport(**fields)  # type: ignore[arg-type]
    assert report.lateness == "0 of 0 steps very late, plan given up 0 times, 100 of 100 hand-offs slower than asked"
    assert fields["kept"] is False
    handoffs.reset()
    assert pace_report(pacing, handoffs)["kept"] is True
