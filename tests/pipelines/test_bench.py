"""`rutter bench`: its result file, and that its figures come from what was run."""

import argparse
import dataclasses
import json
import math
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from learn.saturation import MID_COLLAPSE
from learn.simulation import simulate
from learn.trace import Trace
from pipelines import bench, bench_dynamo, bench_simulator
from pipelines.bench_artifact import full_size_artifact
from pipelines.bench_decision import decision_cases, decision_us, resident_book, with_residents
from pipelines.bench_report import TARGETS, Target, text_lines
from pipelines.bench_simulator import Setting
from pipelines.bench_timing import cpu_model, spread
from pipelines.progress import Progress
from pipelines.workloads import make_workload
from serve_table import artifact
from serve_table.artifact import MAX_BYTES
from serve_table.errors import ArtifactError, ConfigError, RunError, RutterError
from serve_table.harm import CONTEXT, N_SHARE, Residents
from serve_table.policy import Policy, policy
from serve_table.predictor import constant_predictor
from serve_table.slo import targets_from_profile
from serve_table.step_time import step_time_s

TINY = bench.Sizes(
    cases=20, blocks=3, loads=3, rows=300, requests=150, traces=1, rounds=2, peer_requests=60, peer_rounds=2
)
SLO = targets_from_profile(bench.TOPOLOGY.profile)
SETTING = Setting(bench.TOPOLOGY, SLO, constant_predictor())
PEER_WALL_MS = 250.0
KEYS = (
    "lookup_us",
    "decision_8_engines_us",
    "decision_64_engines_us",
    "price_8_engines_us",
    "price_64_engines_us",
    "artifact_bytes",
    "artifact_load_ms",
    "simulator_requests_per_s",
    "dynamo_replay_ratio",
)

FAKE_PEER = """#!{python}
import json, sys
words = sys.argv[1:]
if words[0] == "-c":
    print("1.4.2")
elif {fails}:
    sys.exit("Error: no such engine type")
else:
    rows = [json.loads(line) for line in open(words[2])]
    report = {{"completed_requests": len(rows) - {lost}, "wall_time_ms": {wall_ms}, "mean_ttft_ms": 90.0,
              "mean_tpot_ms": 13.0, "more": 1}}
    json.dump(report, open(words[words.index("--report-json") + 1], "w"))
"""


@pytest.fixture(scope="module")
def artifact_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "policy.safetensors"
    artifact.save(full_size_artifact(bench.TOPOLOGY, SLO, 1500, seed=1), path)
    return path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No default artifact or peer of the developer's takes part."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(bench_dynamo.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(bench, "QUICK", TINY)
    yield


def fake_peer(folder: Path, *, fails: bool = False, lost: int = 0) -> Path:
    path = folder / "peer"
    path.write_text(FAKE_PEER.format(python=sys.executable, fails=fails, lost=lost, wall_ms=PEER_WALL_MS))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def numbers(value: object) -> list[float]:
    """Every number in a decoded JSON document."""
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers(part)]
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def test_the_result_file_has_every_figure_and_the_peer_as_null_where_it_is_not_installed(
    artifact_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = bench.run(arguments("--quick", "--artifact", str(artifact_path)))
    assert status == 0
    result = json.loads(Path("build/bench.json").read_text(), parse_constant=pytest.fail)
    assert [key for key in KEYS if key not in result] == []
    assert result["dynamo_replay_ratio"] is None
    assert set(result["simulator_requests_per_s"]) == set(bench.SIMULATED_POLICIES)
    assert all(math.isfinite(number) for number in numbers(result))
    assert min(numbers({key: result[key] for key in KEYS})) > 0.0
    assert result["artifact_bytes"] == artifact_path.stat().st_size
    assert result["conditions"]["quick"] is True
    lookup = result["detail"]["lookup_us"]
    assert lookup["min"] <= lookup["median"] <= lookup["max"]
    assert lookup["repetitions"] == TINY.blocks
    assert result["detail"]["simulator"]["table"]["wall"]["repetitions"] == TINY.traces * TINY.rounds
    printed = capsys.readouterr().out
    assert "not installed; to compare: python -m venv build/dynamo-env" in printed
    assert printed.count("target: ") == len(TARGETS) - 1 + 2


def test_simulator_figures_follow_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*given: Any) -> Any:
        time.sleep(0.05)
        return simulate(*given)

    monkeypatch.setattr(bench_simulator, "simulate", slow)
    trace = make_workload("mixed", 100, 0, 10.0)
    speed = bench_simulator.measured_speeds(SETTING, [policy("least_loaded")], [trace], 2)["least_loaded"]
    assert 0.0 < speed.wall.median <= 100 / 0.05
    assert speed.process.median > 2 * speed.wall.median  # sleeping takes no CPU time
    assert speed.goodput == pytest.approx(simulate(trace, bench.TOPOLOGY, policy("least_loaded"), SLO, 200.0).goodput)


def test_decision_times_are_those_of_whole_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = policy("least_loaded")
    cases = decision_cases(10, 3, 5, constant_predictor(), 0)
    decide, asked = Policy.decide, []

    def slow(self: Policy, *given: Any) -> Any:
        asked.append(given)
        time.sleep(0.001)
        return decide(self, *given)

    monkeypatch.setattr(Policy, "decide", slow)
    assert min(decision_us(chosen, cases, 2)) >= 1000.0
    assert len(asked) == 20
    assert [len(cases[0].fleet.prefill_up), len(cases[0].fleet.decode_up)] == [3, 5]
    assert type(cases[0].fleet.decode_tokens) is list


def test_a_price_is_measured_among_residents_that_count(artifact_path: Path) -> None:
    price = policy("price", artifact=artifact.load(artifact_path))
    book = resident_book(price, 3, 5, 60, seed=1)
    cases = with_residents(decision_cases(10, 3, 5, constant_predictor(), 0), book)
    assert book.requests == [12.0] * 5 == cases[0].fleet.decode_requests
    assert min(book.seen().shares[d * N_SHARE + CONTEXT] for d in range(5)) > 0.0
    asked: list[Residents] = []

    def seen() -> Residents:
        asked.append(book.seen())
        return asked[-1]

    assert min(decision_us(price, cases, 2, seen)) > 0.0
    assert len(asked) == 20


def test_traces_are_simulated_at_saturation(artifact_path: Path) -> None:
    sizes = dataclasses.replace(TINY, requests=1000, traces=2, rounds=1)
    report = bench.measured(sizes, artifact_path, None, False)
    assert report.detail.simulator["round_robin"].goodput == pytest.approx(MID_COLLAPSE, abs=0.02)


def test_the_built_artifact_is_of_full_size(artifact_path: Path) -> None:
    built = artifact.load(artifact_path)
    assert len(built.arrays["clusters"]) > 15_000
    assert artifact_path.stat().st_size <= MAX_BYTES
    assert set(built.arrays["actions"].tolist()) == {0, 1}


def test_an_artifact_that_cannot_be_used_ends_the_bench(tmp_path: Path) -> None:
    path = tmp_path / "torn.safetensors"
    path.write_bytes(b"\x10")
    with pytest.raises(ArtifactError, match=r"torn.safetensors is refused"):
        bench.run(arguments("--quick", "--artifact", str(path)))


def test_a_result_file_that_cannot_be_written_is_said_in_one_line(
    artifact_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="choose another --json"):
        bench.run(arguments("--quick", "--artifact", str(artifact_path), "--json", "file/bench.json"))
    assert "look-up: " in capsys.readouterr().out  # the figures are not lost


def test_the_ratio_is_ours_to_the_peers_round_by_round(tmp_path: Path) -> None:
    trace = make_workload("mixed", 60, 0, 10.0)
    with Progress("test") as progress:
        comparison = bench_dynamo.compare(fake_peer(tmp_path), trace, SETTING, 3, tmp_path, progress)
    assert progress.done == 6
    assert comparison.version == "1.4.2"
    assert [pair.router_mode for pair in comparison.pairs] == ["round_robin", "kv_router"]
    for pair in comparison.pairs:
        assert pair.theirs.requests_per_s == spread([60 / (PEER_WALL_MS / 1000.0)] * 3)
        assert pair.ratio.median == pytest.approx(pair.ours.requests_per_s.median / 240.0)
        assert pair.ours.mean_tpot_ms > 9.9


@pytest.mark.parametrize(
    ("given", "reason"), [({"fails": True}, "no such engine type"), ({"lost": 1}, "completed 59 of 60 requests")]
)
def test_a_peer_that_fails_costs_no_other_figure(
    artifact_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any], reason: str
) -> None:
    peer = fake_peer(tmp_path, **given)
    words = ("--quick", "--artifact", str(artifact_path), "--dynamo-python", str(peer))
    assert bench.run(arguments(*words)) == 1
    result = json.loads(Path("build/bench.json").read_text())
    assert result["dynamo_replay_ratio"] is None
    assert reason in result["detail"]["dynamo_replay_error"]
    assert result["lookup_us"] > 0.0
    assert reason in capsys.readouterr().err


def test_the_peers_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_dynamo.peer_python(None) is None
    with pytest.raises(ConfigError, match=r"nowhere: no such interpreter"):
        bench_dynamo.peer_python(tmp_path / "nowhere")
    monkeypatch.setenv(bench_dynamo.ENVIRONMENT_VARIABLE, sys.executable)
    assert bench_dynamo.peer_python(None) == Path(sys.executable)
    assert bench_dynamo.peer_python(fake_peer(tmp_path)) == tmp_path / "peer"
    with pytest.raises(RutterError, match=r"ai-dynamo is not installed there; python -m venv"):
        bench_dynamo.peer_version(Path(sys.executable))


def test_the_replays_trace_is_the_same_and_shares_no_block(tmp_path: Path) -> None:
    trace: Trace = make_workload("mixed", 50, 3, 10.0)
    bench_dynamo.write_mooncake(trace, tmp_path / "trace.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [row["input_length"] for row in rows] == trace.prompt_tokens.tolist()
    assert [row["output_length"] for row in rows] == trace.output_tokens.tolist()
    assert np.abs(np.array([row["timestamp"] for row in rows]) - 1000.0 * trace.arrival_s).max() <= 0.5
    blocks = [block for row in rows for block in row["hash_ids"]]
    assert len(set(blocks)) == len(blocks)
    assert all(0 <= 512 * len(row["hash_ids"]) - row["input_length"] < 512 for row in rows)


def test_the_replays_engines_keep_the_profiles_times_and_limits(tmp_path: Path) -> None:
    profile = bench.TOPOLOGY.profile
    bench_dynamo.write_step_times(profile, tmp_path / "times.npz")
    with np.load(tmp_path / "times.npz") as times:
        context, active = times["decode_context_length"], times["decode_active_kv_tokens"]
        itl_ms = times["decode_itl"][40, 8]
        prompts, ttft_ms = times["prefill_isl"], times["prefill_ttft_ms"]
    step = profile.step.as_list()
    assert itl_ms == pytest.approx(1000.0 * step_time_s(step, active[40] / context[8], active[40]))
    assert ttft_ms[-1] == pytest.approx(1000.0 * step_time_s(step, prompts[-1], 0.0))
    assert np.all(np.diff(prompts) > 0)
    assert np.all(np.diff(context) > 0)
    given = bench_dynamo.engine_arguments(profile, "decode", tmp_path / "times.npz")
    assert given["num_gpu_blocks"] == 3750
    seconds_a_token = float(given["kv_bytes_per_token"]) / (float(given["kv_transfer_bandwidth"]) * 1e9)
    assert seconds_a_token == pytest.approx(profile.handoff.per_token_s)


def test_the_report_names_the_peers_figures(artifact_path: Path, tmp_path: Path) -> None:
    report = bench.measured(TINY, artifact_path, fake_peer(tmp_path), True)
    text = "\n".join(text_lines(report))
    assert report.dynamo_replay_ratio is not None
    assert "against 240 requests/s" in text
    assert "target: at least 50, " in text
    assert msgspec.json.decode(msgspec.json.encode(report))["detail"]["dynamo_replay"]["requests"] == 60


@pytest.mark.parametrize(
    ("target", "met", "missed"),
    [
        (Target("under", 2.0), 1.99, 2.0),
        (Target("at most", 65536.0), 65536.0, 65537.0),
        (Target("at least", 50.0), 50.0, 49.9),
    ],
)
def test_targets(target: Target, met: float, missed: float) -> None:
    assert target.judged(met).endswith(", met")
    assert target.judged(missed).endswith(", missed")


def test_the_processors_name(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nmodel name\t: Other\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Some CPU @ 3 GHz"
    assert cpu_model(tmp_path / "absent") != ""
