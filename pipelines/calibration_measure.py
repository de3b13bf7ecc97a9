"""Measuring on live engines, one task at a time: see `calibration_plan` for what, and `Point` for what each means."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pipelines.calibration_client import CalibratedEngine, Prompts, Stream
from pipelines.calibration_plan import (
    INTERFERENCE_CONTEXT,
    Limits,
    Plan,
    Task,
    decode_output_tokens,
    interference_output_tokens,
    plan_round,
    prefill_steps_s,
)
from pipelines.progress import Progress
from serve_table.calibration import Kind, Point
from serve_table.errors import ClusterError, EngineError
from serve_table.step_time import HardwareProfile

WARM_UPS = 3
WARM_UP_TOKENS = 512
HTTP_ROUND_TRIPS = 20
MIN_GAPS = 6
QUIET_TOKENS = 6
"""Tokens of every running sequence before a prefill disturbs them, and after."""

POLL_S = 0.001
FAILURES_ALLOWED = 0.05
ROUND_SHARE = 0.8
"""Of the time that is left when the rounds begin; estimates are no promises."""


@dataclass(frozen=True)
class Measured:
    """points have no fitted time yet (0). http_s: wall. notes: what was left out or failed."""

    points: list[Point]
    http_s: float
    rounds: float
    notes: list[str]


class Measurement:
    """Engines under measurement; made and used inside a running loop. Times are divided by the dilation.

    rng: orders the points and places the disturbances. prompts: never repeat.
    """

    def __init__(
        self,
        prefill: Sequence[CalibratedEngine],
        decode: Sequence[CalibratedEngine],
        limits: Limits,
        profile: HardwareProfile,
        dilation: float,
        prompts: Prompts,
        rng: np.random.Generator,
    ) -> None:
        self._decode = decode[0]
        self._all = [*prefill, *decode]
        self._timed = [*prefill, decode[0]]
        self._pairs = [(p, d) for p in prefill for d in decode]
        self._limits = limits
        self._profile = profile
        self._dilation = dilation
        self._prompts = prompts
        self._rng = rng

    async def run(self, budget_s: float, rounds: int, progress: Progress) -> Measured:
        """Warm up, then measure round by round while there is time. budget_s: engine time for all of it."""
        deadline_s = time.monotonic() + budget_s * self._dilation
        slowness = await self.warm_up()
        http_s = await self._http_s()
        left_s = (deadline_s - time.monotonic()) / self._dilation
        plan = plan_round(
            len(self._timed), len(self._pairs), self._limits, self._profile, slowness, left_s * ROUND_SHARE
        )
        progress.total = len(plan.tasks) * rounds
        progress.note(
            f"{len(plan.tasks)} points a round, about {plan.round_s * self._dilation:.0f} s; {rounds} rounds at most"
        )
        return await self._rounds(plan, rounds, deadline_s, http_s, progress)

    async def warm_up(self) -> float:
        """Use every engine and every pair; returns how many times the profile's time a prefill takes."""
        length = min(WARM_UP_TOKENS, self._limits.max_model_len_tokens // 2)
        ratios = []
        for engine in self._all:
            for _ in range(WARM_UPS):
                stream = await self._answer(engine, length)
                ratios.append(stream.ttft_s / self._dilation / prefill_steps_s(length, self._profile))
            if stream.prompt_tokens is not None and stream.prompt_tokens != length:
                raise ClusterError(
                    f"{engine.name} counts {stream.prompt_tokens} tokens in a prompt of {length} token ids: "
                    "its times by length would be wrong"
                )
        for k in range(len(self._pairs)):
            await self._handoff(Task("handoff", 32, 0, k, 0.0))
        return float(np.median(ratios))

    async def _http_s(self) -> float:
        times = [await self._decode.round_trip_s() for _ in range(HTTP_ROUND_TRIPS)]
        return float(np.median(times))

    async def _rounds(self, plan: Plan, rounds: int, deadline_s: float, http_s: float, progress: Progress) -> Measured:
        points: list[Point] = []
        failures: list[str] = []
        n_done = 0
        for _ in range(rounds):
            for k in self._rng.permutation(len(plan.tasks)).tolist():
                task = plan.tasks[k]
                if time.monotonic() + task.estimate_s * self._dilation > deadline_s:
                    continue
                try:
                    points += await self.measure(task)
                except EngineError as error:
                    failures.append(str(error))
                    if len(failures) > max(FAILURES_ALLOWED * len(plan.tasks) * rounds, 2):
                        raise ClusterError(f"{len(failures)} measurements failed, the last: {error}") from error
                n_done += 1
                progress.advance()
        notes = [left_out_text(plan.left_out)] if plan.left_out else []
        if failures:
            notes.append(f"{len(failures)} of {n_done} measurements failed, the first: {failures[0]}")
        return Measured(points, http_s, n_done / len(plan.tasks), notes)

    async def measure(self, task: Task) -> list[Point]:
        """The points of one task; raises EngineError."""
        if task.kind == "prefill":
            return await self._prefill(task)
        if task.kind == "decode":
            return await self._decode_batch(task)
        if task.kind == "interference":
            return await self._interference(task)
        return await self._handoff(task)

    async def _prefill(self, task: Task) -> list[Point]:
        engine = self._timed[task.engine]
        stream = await self._answer(engine, task.prompt_tokens)
        return [self._point("prefill", engine.name, stream.ttft_s, prompt_tokens=task.prompt_tokens)]

    async def _handoff(self, task: Task) -> list[Point]:
        prefill, decode = self._pairs[task.engine]
        prompt = self._prompts.take(task.prompt_tokens)
        leg = await prefill.prefill_leg(prompt)
        stream = await decode.stream(prompt, 2, Stream(), leg.handle)
        return [
            self._point("prefill", prefill.name, leg.wall_s, prompt_tokens=task.prompt_tokens),
            self._point("handoff", decode.name, stream.ttft_s, prompt_tokens=task.prompt_tokens),
        ]

    async def _decode_batch(self, task: Task) -> list[Point]:
        output = decode_output_tokens(task.batch, task.prompt_tokens, self._limits)
        streams = await self._streams(task.batch, task.prompt_tokens, output)
        found = batch_gap(streams, task.prompt_tokens)
        if found is None:
            return []
        gap_s, context_tokens = found
        return [self._point("decode", self._decode.name, gap_s, batch=task.batch, context_tokens=context_tokens)]

    async def _interference(self, task: Task) -> list[Point]:
        running = [Stream() for _ in range(task.batch)]
        output = interference_output_tokens()
        disturbance: list[tuple[float, float]] = []

        async def disturb() -> None:
            await self._until_tokens(running, QUIET_TOKENS)
            # Anywhere within a step, as requests arrive.
            await asyncio.sleep(float(self._rng.uniform(0.0, 1.0)) * self._profile.step.floor_s * self._dilation)
            stream = await self._answer(self._decode, task.prompt_tokens)
            disturbance.append((stream.sent_s, stream.token_times_s[0]))

        await _together(
            *(self._one(stream, INTERFERENCE_CONTEXT, output) for stream in running),
            disturb(),
        )
        found = longest_gap(running, INTERFERENCE_CONTEXT, *disturbance[0])
        if found is None:
            return []
        gap_s, context_tokens = found
        name = self._decode.name
        return [self._point("interference", name, gap_s, task.prompt_tokens, task.batch, context_tokens)]

    async def _until_tokens(self, streams: Sequence[Stream], n_tokens: int) -> None:
        while min(len(stream.token_times_s) for stream in streams) < n_tokens:
            await asyncio.sleep(POLL_S)

    async def _streams(self, n: int, prompt_tokens: int, output_tokens: int) -> list[Stream]:
        streams = [Stream() for _ in range(n)]
        await _together(*(self._one(stream, prompt_tokens, output_tokens) for stream in streams))
        return streams

    async def _one(self, stream: Stream, prompt_tokens: int, output_tokens: int) -> None:
        await self._decode.stream(self._prompts.take(prompt_tokens), output_tokens, stream)

    async def _answer(self, engine: CalibratedEngine, prompt_tokens: int) -> Stream:
        """One token after a cold prompt."""
        return await engine.stream(self._prompts.take(prompt_tokens), 1, Stream())

    def _point(
        self, kind: Kind, engine: str, wall_s: float, prompt_tokens: int = 0, batch: int = 0, context_tokens: int = 0
    ) -> Point:
        return Point(kind, engine, prompt_tokens, batch, context_tokens, wall_s / self._dilation, 0.0)


def with_fitted(points: Sequence[Point], fitted_s: Sequence[float]) -> list[Point]:
    """The points with what the fit says of each."""
    return [
        msgspec.structs.replace(point, fitted_s=float(time_s)) for point, time_s in zip(points, fitted_s, strict=True)
    ]


def batch_gap(streams: Sequence[Stream], prompt_tokens: int) -> tuple[float, int] | None:
    """Median wall time a token while all streams ran, and their KV tokens in the middle of it, summed.

    None where they did not all run for MIN_GAPS steps.
    """
    start_s = max(stream.token_times_s[0] for stream in streams)
    end_s = min(stream.token_times_s[-1] for stream in streams)
    gaps: list[float] = []
    for stream in streams:
        times = [time_s for time_s in stream.token_times_s if start_s <= time_s <= end_s]
        if len(times) <= MIN_GAPS:
            return None
        gaps += (np.diff(times) * stream.events_per_token).tolist()
    return float(np.median(gaps)), _context_tokens(streams, prompt_tokens, (start_s + end_s) / 2.0)


def longest_gap(streams: Sequence[Stream], prompt_tokens: int, from_s: float, to_s: float) -> tuple[float, int] | None:
    """The longest gap that ended between two times, the median over the streams, and their KV tokens before it.

    The answer's own event may come before or after the streams' of the same step, so half a gap is allowed after.
    None where a stream did not run before, between and after.
    """
    longest = []
    for stream in streams:
        times = np.array(stream.token_times_s)
        gaps = np.diff(times)
        slack_s = float(np.median(gaps)) / 2.0 if len(gaps) else 0.0
        within = (times[1:] > from_s) & (times[1:] <= to_s + slack_s)
        if not within.any() or times[0] > from_s or times[-1] <= to_s + slack_s:
            return None
        longest.append(float(gaps[within].max()))
    return float(np.median(longest)), _context_tokens(streams, prompt_tokens, from_s)


def _context_tokens(streams: Sequence[Stream], prompt_tokens: int, at_s: float) -> int:
    emitted = sum(time_s <= at_s for stream in streams for time_s in stream.token_times_s)
    return len(streams) * prompt_tokens + emitted


def left_out_text(tasks: Sequence[Task]) -> str:
    """What was left out, for people."""
    names = {
        f"{task.kind} of {task.prompt_tokens} tokens" + (f" x {task.batch}" if task.kind == "decode" else "")
        for task in tasks
    }
    return f"left out for want of time: {', '.join(sorted(names))}"


async def _together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run them to the end; where one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
