"""What a calibration measures: the points, how long each takes by what is known so far, and which fit the time."""

from dataclasses import dataclass

from serve_table.calibration import Kind
from serve_table.errors import ConfigError
from serve_table.step_time import HardwareProfile, handoff_time_s, step_time_s

PREFILL_TOKENS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
SHORT_TOKENS = 256
"""Prompts up to here are measured twice a round: they take little time, and the knee is among them."""

DECODE_CONTEXTS = (100, 1000, 4000)
HANDOFF_TOKENS = (64, 256, 1000, 2000, 4000, 8000)
INTERFERENCE_TOKENS = (128, 256, 512, 1024, 1536, 3072)
INTERFERENCE_BATCH = 4
INTERFERENCE_CONTEXT = 100

DECODE_GAPS = 24
"""Steps of a batch whose median is one point."""

KV_SHARE = 0.8
"""Of an engine's KV that a batch may fill, so that nothing is preempted."""

SPARE_TOKENS = 64
HTTP_S = 0.01


@dataclass(frozen=True)
class Limits:
    """What the engines take. max_batch: sequences at once."""

    max_model_len_tokens: int
    kv_tokens: int
    max_batch: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class Task:
    """One thing to measure. engine: index of the engine, or of the prefill-decode pair, in the measurement's list.

    prompt_tokens: of the prompt, of each running sequence (decode) or of what disturbs them (interference).
    estimate_s: engine time.
    """

    kind: Kind
    prompt_tokens: int
    batch: int
    engine: int
    estimate_s: float


@dataclass(frozen=True)
class Plan:
    """One round of a calibration, cheapest first. left_out: tasks that do not fit into the time."""

    tasks: tuple[Task, ...]
    left_out: tuple[Task, ...]

    @property
    def round_s(self) -> float:
        return sum(task.estimate_s for task in self.tasks)


def plan_round(
    n_prefill_times: int, n_pairs: int, limits: Limits, profile: HardwareProfile, slowness: float, budget_s: float
) -> Plan:
    """The points of one round, the dearest left out where a round would not fit into `budget_s` of engine time.

    n_prefill_times: engines whose prefill is timed. n_pairs: prefill-decode pairs; 0 plans no hand-off. slowness: how
    many times the profile's times the engines' are. Raises ConfigError where too little fits to fit anything.
    """
    tasks = [
        *_prefills(n_prefill_times, limits, profile),
        *_decodes(limits, profile),
        *_interferences(limits, profile),
        *_handoffs(n_pairs, limits, profile),
    ]
    tasks = [_scaled(task, slowness) for task in tasks]
    tasks.sort(key=lambda task: task.estimate_s)
    kept: list[Task] = []
    time_s = 0.0
    for task in tasks:
        time_s += task.estimate_s
        if time_s > budget_s:
            break
        kept.append(task)
    if len({task.kind for task in kept}) < len({task.kind for task in tasks}) or len(kept) < len(tasks) / 2:
        whole_s = sum(task.estimate_s for task in tasks)
        raise ConfigError(
            f"a calibration of these engines takes at least {whole_s:.0f} s of engine time, {budget_s:.0f} s are left "
            "of --budget-s: give more"
        )
    return Plan(tuple(kept), tuple(tasks[len(kept) :]))


def prefill_lengths(limits: Limits) -> list[int]:
    """Prompt lengths to time, the last as long as the engine takes."""
    longest = min(limits.max_model_len_tokens, limits.kv_tokens) - SPARE_TOKENS
    return [length for length in PREFILL_TOKENS if length < longest] + ([longest] if longest >= 32 else [])


def decode_output_tokens(batch: int, prompt_tokens: int, limits: Limits) -> int:
    """Tokens for each of a batch: enough steps while the last ones still prefill, and DECODE_GAPS after that."""
    room = max(limits.max_num_batched_tokens - batch, 1)
    return -(-batch * prompt_tokens // room) + 8 + batch // 8 + DECODE_GAPS


def prefill_steps_s(prompt_tokens: int, profile: HardwareProfile) -> float:
    """Time of a cold prompt's steps on an idle engine."""
    constants, chunk = profile.step.as_list(), profile.max_num_batched_tokens
    starts = range(0, prompt_tokens, chunk)
    return sum(step_time_s(constants, min(prompt_tokens - start, chunk), start) for start in starts)


def _scaled(task: Task, slowness: float) -> Task:
    return Task(task.kind, task.prompt_tokens, task.batch, task.engine, task.estimate_s * slowness + HTTP_S)


def _prefills(n_engines: int, limits: Limits, profile: HardwareProfile) -> list[Task]:
    return [
        Task("prefill", length, 0, engine, prefill_steps_s(length, profile))
        for engine in range(n_engines)
        for length in prefill_lengths(limits)
        for _ in range(2 if length <= SHORT_TOKENS else 1)
    ]


def _decodes(limits: Limits, profile: HardwareProfile) -> list[Task]:
    tasks = []
    batch = 1
    while batch <= limits.max_batch:
        for context in DECODE_CONTEXTS:
            output = decode_output_tokens(batch, context, limits)
            fits = context + output + SPARE_TOKENS <= limits.max_model_len_tokens
            if fits and batch * (context + output) <= KV_SHARE * limits.kv_tokens:
                steps_s = output * step_time_s(profile.step.as_list(), batch, batch * context)
                prompts_s = batch * context * profile.step.per_token_beyond_s
                tasks.append(Task("decode", context, batch, 0, prompts_s + steps_s))
        batch *= 2
    return tasks


def _interferences(limits: Limits, profile: HardwareProfile) -> list[Task]:
    batch = min(INTERFERENCE_BATCH, limits.max_batch - 1)
    room = min(limits.max_num_batched_tokens - batch, limits.max_model_len_tokens - SPARE_TOKENS)
    lengths = [length for length in INTERFERENCE_TOKENS if length <= room]
    steps_s = interference_output_tokens() * step_time_s(profile.step.as_list(), batch, 0.0)
    return [
        Task("interference", length, batch, 0, steps_s + prefill_steps_s(length, profile))
        for length in lengths
        if batch >= 1
    ]


def interference_output_tokens() -> int:
    """Tokens of each running sequence: before, during and after the prefill that disturbs it."""
    return 40


def _handoffs(n_pairs: int, limits: Limits, profile: HardwareProfile) -> list[Task]:
    tasks = []
    for k, length in enumerate(length for length in HANDOFF_TOKENS if length <= prefill_lengths(limits)[-1]):
        if n_pairs == 0:
            break
        decode_s = handoff_time_s(profile.handoff.as_list(), length) + step_time_s(profile.step.as_list(), 1, length)
        tasks += [
            Task("handoff", length, 0, (k + repeat) % n_pairs, prefill_steps_s(length, profile) + decode_s)
            for repeat in range(2)
        ]
    return tasks
