"""NVIDIA Dynamo's offline replay beside the simulator: the same trace, step times and engine limits, in turns."""

import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import msgspec
import numpy as np

from learn.trace import Trace
from pipelines.bench_simulator import Setting, timed_run
from pipelines.bench_timing import Spread, collector_off, spread
from pipelines.progress import Progress
from serve_table.errors import ConfigError, RutterError
from serve_table.policy import policy
from serve_table.step_time import HardwareProfile, step_time_s

PACKAGE = "ai-dynamo"
VERSION = "1.4.2"
ENVIRONMENT_VARIABLE = "RUTTER_DYNAMO_PYTHON"
DEFAULT_PYTHON = Path("build/dynamo-env/bin/python")
TIMEOUT_S = 600.0
TRACE_BLOCK_TOKENS = 512
KV_BYTES_PER_TOKEN = 114_688
"""Only its quotient with the bandwidth matters: that is the profile's hand-off time of a token."""

OUR_RUNS = 5
ROUTERS = (("round_robin", "round_robin"), ("kv_router", "dynamo_style"))
"""Router mode of the replay, and the policy of the simulator that is nearest to it. The first is the headline."""


class Side(msgspec.Struct, frozen=True):
    """One of the two: requests simulated a second, and the mean times that it simulated."""

    requests_per_s: Spread
    mean_ttft_ms: float
    mean_tpot_ms: float


class Pair(msgspec.Struct, frozen=True):
    """One router mode. ratio: of ours to theirs, round by round."""

    router_mode: str
    policy: str
    ours: Side
    theirs: Side
    ratio: Spread


class PeerReport(msgspec.Struct):
    """What is used of the replay's own report; wall_time_ms covers its runtime only, no start-up and no parsing."""

    completed_requests: int
    wall_time_ms: float
    mean_ttft_ms: float
    mean_tpot_ms: float


class Comparison(msgspec.Struct, frozen=True):
    version: str
    requests: int
    output_tokens: int
    rounds: int
    time_taken: str
    pairs: tuple[Pair, ...]


def peer_python(asked: Path | None) -> Path | None:
    """The interpreter that has the peer: asked for, else $RUTTER_DYNAMO_PYTHON, else build/dynamo-env; None if none.

    Raises ConfigError for one that was named and is no file.
    """
    named = asked or (Path(value) if (value := os.environ.get(ENVIRONMENT_VARIABLE)) else None)
    if named is None:
        return DEFAULT_PYTHON if DEFAULT_PYTHON.is_file() else None
    if not named.is_file():
        raise ConfigError(f"{named}: no such interpreter; give the bin/python of an environment with {PACKAGE}")
    return named


def installation_hint() -> str:
    folder = DEFAULT_PYTHON.parents[1]
    return f"python -m venv {folder} && {DEFAULT_PYTHON} -m pip install {PACKAGE}=={VERSION}"


def peer_version(python: Path) -> str:
    """Version of the peer in that environment; RutterError where it has none."""
    found = _output(
        [str(python), "-c", f"import importlib.metadata as m; print(m.version('{PACKAGE}'))"],
        f"{PACKAGE} is not installed there; {installation_hint()}",
    )
    return found.strip()


def compare(python: Path, trace: Trace, setting: Setting, rounds: int, folder: Path, progress: Progress) -> Comparison:
    """Replay the trace and simulate it, `rounds` times in turns. Raises RutterError where the replay fails.

    The trace must share no prefixes: each prompt gets blocks of its own. folder: for what the replay reads and
    writes. Times of arrival are cut to whole milliseconds, for both.
    """
    trace = replace(trace, arrival_s=np.floor(trace.arrival_s * 1000.0) / 1000.0)
    found = peer_version(python)
    write_mooncake(trace, folder / "trace.jsonl")
    write_step_times(setting.topology.profile, folder / "step_times.npz")
    theirs: dict[str, list[PeerReport]] = {mode: [] for mode, _ in ROUTERS}
    ours: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode, _ in ROUTERS}
    for _ in range(rounds):
        for mode, name in ROUTERS:
            theirs[mode].append(_replay(python, len(trace), setting, mode, folder))
            ours[mode].append(_simulate(trace, setting, name))
            progress.advance(1)
    pairs = tuple(_pair(mode, name, len(trace), ours[mode], theirs[mode]) for mode, name in ROUTERS)
    taken = "theirs: the replay's own wall_time_ms (no start-up, no parsing, logging off); ours: wall time of simulate"
    return Comparison(found, len(trace), int(trace.output_tokens.sum()), rounds, taken, pairs)


def _pair(
    mode: str, name: str, n_requests: int, ours: list[tuple[float, float, float]], theirs: list[PeerReport]
) -> Pair:
    our_rates = [n_requests / wall_s for wall_s, _, _ in ours]
    their_rates = [n_requests / (report.wall_time_ms / 1000.0) for report in theirs]
    return Pair(
        mode,
        name,
        Side(spread(our_rates), fmean(run[1] for run in ours) * 1000.0, fmean(run[2] for run in ours) * 1000.0),
        Side(
            spread(their_rates),
            fmean(report.mean_ttft_ms for report in theirs),
            fmean(report.mean_tpot_ms for report in theirs),
        ),
        spread([our / their for our, their in zip(our_rates, their_rates, strict=True)]),
    )


def _simulate(trace: Trace, setting: Setting, name: str) -> tuple[float, float, float]:
    """Median wall time of a few runs, mean TTFT and mean TPOT, in seconds."""
    predicted = setting.predicted_tokens(trace)
    with collector_off():
        runs = [timed_run(trace, predicted, setting, policy(name), 0) for _ in range(OUR_RUNS + 1)][
            1:
        ]  # the first warms
    return median(run.wall_s for run in runs), runs[0].ttft_s, runs[0].tpot_s


def _replay(python: Path, n_requests: int, setting: Setting, mode: str, folder: Path) -> PeerReport:
    report_path = folder / "report.json"
    report_path.unlink(missing_ok=True)
    command = [str(python), "-m", "dynamo.replay", str(folder / "trace.jsonl"), "--trace-format", "mooncake"]
    command += ["--trace-block-size", str(TRACE_BLOCK_TOKENS), "--replay-mode", "offline", "--router-mode", mode]
    for role, n_engines in (
        ("prefill", setting.topology.prefill_engines),
        ("decode", setting.topology.decode_engines),
    ):
        arguments = engine_arguments(setting.topology.profile, role, folder / "step_times.npz")
        command += [f"--{role}-engine-args", json.dumps(arguments), f"--num-{role}-workers", str(n_engines)]
    command += ["--report-json", str(report_path)]
    _output(command, "see the message")
    try:
        report = msgspec.json.decode(report_path.read_bytes(), type=PeerReport)
    except (OSError, msgspec.DecodeError) as error:
        raise RutterError(f"dynamo.replay left no usable report: {error}") from error
    if report.completed_requests != n_requests or not report.wall_time_ms > 0.0:
        raise RutterError(
            f"dynamo.replay completed {report.completed_requests} of {n_requests} requests "
            f"in {report.wall_time_ms} ms: no rate can be had from this"
        )
    return report


def _output(command: list[str], advice: str) -> str:
    """Standard output of a command of the peer's; RutterError with its last words where it fails."""
    environment = {**os.environ, "DYN_LOG": "error"}  # at its default level the replay logs every request
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, env=environment, check=False
        )
    except OSError as error:
        raise RutterError(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise RutterError(f"{' '.join(command[:3])} took more than {TIMEOUT_S:.0f} s and was ended") from error
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        last = words[-1].strip() if words else f"exit status {done.returncode}"
        raise RutterError(f"{' '.join(command[:3])} failed: {last} ({advice})")
    return done.stdout


def engine_arguments(profile: HardwareProfile, role: str, step_times: Path) -> dict[str, str | int | float | bool]:
    """The profile as the replay's engines take it. Its hand-off has no fixed latency, and prefix caches, which this
    trace cannot use, are off because the replay is faster without.
    """
    arguments: dict[str, str | int | float | bool] = {
        "engine_type": "vllm",
        "worker_type": role,
        "block_size": profile.block_tokens,
        "num_gpu_blocks": profile.kv_tokens // profile.block_tokens,
        "max_num_seqs": profile.max_num_seqs,
        "max_num_batched_tokens": profile.max_num_batched_tokens,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        "planner_profile_data": str(step_times),
    }
    if profile.handoff.per_token_s > 0.0:
        arguments["kv_bytes_per_token"] = KV_BYTES_PER_TOKEN
        arguments["kv_transfer_bandwidth"] = KV_BYTES_PER_TOKEN / profile.handoff.per_token_s / 1e9
    return arguments


def write_mooncake(trace: Trace, path: Path) -> None:
    """The trace as Mooncake JSON lines, with blocks that no two requests share."""
    next_block = 0
    with open(path, "w", encoding="utf-8") as file:
        for arrival_s, prompt, output in zip(
            trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True
        ):
            n_blocks = math.ceil(prompt / TRACE_BLOCK_TOKENS)
            row = {
                "timestamp": round(arrival_s * 1000.0),
                "input_length": prompt,
                "output_length": output,
                "hash_ids": list(range(next_block, next_block + n_blocks)),
            }
            file.write(json.dumps(row) + "\n")
            next_block += n_blocks


def write_step_times(profile: HardwareProfile, path: Path) -> None:
    """The profile's step times as the tables that the replay's engines interpolate, in milliseconds."""
    step = profile.step.as_list()
    short = np.array([1.0, 16.0, 64.0, profile.step.knee_tokens])
    prompts = np.unique(np.concatenate([short, np.arange(256.0, profile.max_model_len_tokens + 1.0, 128.0)]))
    active_tokens = np.linspace(0.0, profile.kv_tokens, 121)
    context_tokens = np.linspace(profile.block_tokens, profile.max_model_len_tokens, 257)
    itl_ms = [
        [1000.0 * step_time_s(step, max(active / context, 1.0), active) for context in context_tokens.tolist()]
        for active in active_tokens.tolist()
    ]
    np.savez(
        path,
        prefill_isl=prompts,
        prefill_ttft_ms=np.array([1000.0 * step_time_s(step, prompt, 0.0) for prompt in prompts.tolist()]),
        decode_active_kv_tokens=active_tokens,
        decode_context_length=context_tokens,
        decode_itl=np.array(itl_ms),
    )
