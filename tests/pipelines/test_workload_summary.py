"""`rutter workload` on traces whose numbers are known."""

import json
from pathlib import Path

import numpy as np
import pytest

from learn.trace import Trace
from pipelines import cli
from pipelines.workload_summary import shared_prefix_share, summarise
from serve_table.errors import TraceError


def trace(n: int = 4) -> Trace:
    """Every request has 256 prompt tokens: requests 0 and 2 share two blocks of 64, request 3 one of them."""
    chains = np.array([[0, 2], [0, 0], [0, 2], [0, 1]])[:n]
    return Trace(
        "known",
        arrival_s=np.array([0.0, 1.0, 2.0, 6.0])[:n],
        prompt_tokens=np.full(n, 256),
        output_tokens=np.array([1, 2, 3, 94])[:n],
        slo_class=np.array([0, 0, 0, 1])[:n],
        chain_start=chains[:, 0],
        chain_length=chains[:, 1],
        block_ids=np.array([7, 8]),
    )


def test_summary_of_a_known_trace() -> None:
    summary = summarise(trace())
    assert summary.requests == 4
    assert summary.span_s == 6.0
    assert summary.requests_per_s == 0.5
    assert (summary.output.mean_tokens, summary.output.max_tokens, summary.output.total_tokens) == (25.0, 94, 100)
    assert sum(summary.profile_requests_per_s) * summary.profile_part_s == pytest.approx(4)


def test_shared_prefixes_count_repeated_blocks_only() -> None:
    assert shared_prefix_share(trace()) == 3 * 64 / 1024
    assert shared_prefix_share(trace(2)) == 0.0


def test_one_request_has_no_rate_and_none_is_an_error() -> None:
    assert summarise(trace(1)).requests_per_s is None
    with pytest.raises(TraceError, match="no request is left"):
        summarise(trace(0))


def test_the_command_on_a_synthetic_workload(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["workload", "multi-turn", "--requests", "200", "--rate", "4", "--seed", "3"]
    assert cli.main([*words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["requests"] == 200
    assert summary["requests_per_s"] == pytest.approx(4.0)
    assert summary["shared_prefix_share"] > 0.2
    assert cli.main(words) == 0
    assert capsys.readouterr().out.startswith("multi-turn: 200 requests in ")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["no-such"], 2, "unknown trace 'no-such'"),
        (["chat", "--requests", "0"], 2, "give at least 1"),
        (["chat", "--rate", "nan"], 2, "give a rate above 0"),
        (["azure:gone.csv"], 1, "gone.csv"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words, status, message
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["workload", *words]) == status
    error = capsys.readouterr().err
    assert error.startswith("rutter: ")
    assert message in error
    assert error.count("\n") == 1
