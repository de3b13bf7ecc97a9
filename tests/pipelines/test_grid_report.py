"""The report of a simulated comparison, on rows whose truth is known."""

import msgspec
import pytest
from result_rows import result_row

from pipelines.grid_report import report_lines
from pipelines.results import ResultRow

# Goodput by policy and workload, over two seeds.
GOODPUT = {
    ("rutter", "mixed"): (0.92, 0.90),
    ("dynamo_style", "mixed"): (0.90, 0.88),
    ("round_robin", "mixed"): (0.79, 0.77),
    ("rutter", "chat"): (0.80, 0.60),
    ("dynamo_style", "chat"): (0.70, 0.70),
    ("round_robin", "chat"): (0.79, 0.77),
}


def rows(prefill: int = 2, decode: int = 4) -> list[ResultRow]:
    place = {"prefill_engines": prefill, "decode_engines": decode, "cluster_kind": "simulated", "requests": 4000}
    return [
        result_row(policy, seed, value, workload=workload, **place)
        for (policy, workload), values in GOODPUT.items()
        for seed, value in enumerate(values)
    ]


def test_policies_by_workload_best_mean_first_and_rutter_against_each_cell_s_best() -> None:
    lines = report_lines(rows())
    assert lines[1] == "2P+4D, mean goodput:"
    assert lines[2].split() == ["policy", "mixed", "chat", "mean"]
    assert [line.split() for line in lines[3:6]] == [
        ["rutter", "0.910", "0.700", "0.805"],
        ["dynamo_style", "0.890", "0.700", "0.795"],
        ["round_robin", "0.780", "0.780", "0.780"],
    ]
    assert lines[7].startswith("mixed at 10.1 requests/s: rutter is better than dynamo_style, +0.020 [")
    assert lines[8].startswith("chat at 10.1 requests/s: rutter is level with round_robin, -0.080 [")
    assert "paired over 2 seeds; +0.000 [" in lines[8]
    assert lines[8].endswith("over dynamo_style, P90 TTFT 1.00 times, P99 TTFT 1.00 times, P90 TPOT 1.00 times")
    assert lines[-2:] == [
        "rutter against the best baseline of each of 2 cells: mean -0.030, least -0.080, at least -0.005 in 1; better "
        "in 1, worse in 0, not to be told apart in 1",
        "rutter against tuned dynamo_style in 2 cells: goodput +0.010, least +0.000; P90 TTFT 1.00 times (largest "
        "1.00), P99 TTFT 1.00 times (largest 1.00), P90 TPOT 1.00 times (largest 1.00)",
    ]


def test_times_are_ratios_to_dynamo_style_of_the_same_cell() -> None:
    slower = [msgspec.structs.replace(row, ttft_p99_s=0.5) if row.policy == "rutter" else row for row in rows()]
    longer = [msgspec.structs.replace(row, tpot_p90_s=0.04) if row.workload == "chat" else row for row in slower]
    lines = report_lines(longer)
    assert lines[7].endswith("P99 TTFT 1.25 times, P90 TPOT 1.00 times")
    assert "P99 TTFT 1.25 times (largest 1.25), P90 TPOT 1.00 times" in lines[-1]
    latency = [
        msgspec.structs.replace(row, policy="rutter_latency") if row.policy == "rutter" else row for row in rows()
    ]
    assert "rutter_latency against the best baseline of each of 2 cells" in report_lines(latency)[-2]


def test_topologies_have_tables_of_their_own_and_missing_policies_a_dash() -> None:
    other = [row for row in rows(1, 2) if (row.policy, row.workload) != ("round_robin", "chat")]
    lines = report_lines([*rows(), *other])
    assert lines.index("2P+4D, mean goodput:") < lines.index("1P+2D, mean goodput:")
    assert ["round_robin", "0.780", "-", "0.780"] in [line.split() for line in lines]
    assert "of each of 4 cells" in lines[-2]


def test_baselines_alone_have_no_verdict() -> None:
    lines = report_lines([row for row in rows() if row.policy != "rutter"])
    assert lines[-2:] == [
        "mixed at 10.1 requests/s: best is dynamo_style, 0.890",
        "chat at 10.1 requests/s: best is round_robin, 0.780",
    ]


@pytest.mark.parametrize("n_seeds", [1, 2])
def test_markdown_has_the_same_figures(n_seeds: int) -> None:
    lines = report_lines([row for row in rows() if row.seed < n_seeds], markdown=True)
    assert lines[3:5] == ["| policy | mixed | chat | mean |", "| --- | --- | --- | --- |"]
    assert len([line for line in lines if line.startswith("| ")]) == 5
    assert len([line for line in lines if line.startswith("- ")]) == 2
