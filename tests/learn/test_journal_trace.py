import math

import numpy as np
import pytest
from synthetic_rows import DECODE_ENGINES, PREFILL_ENGINES, journal_row, varied_rows

from learn.journal_trace import journal_trace, runs
from serve_table.errors import TraceError
from serve_table.situation import LOCAL, REMOTE
from serve_table.slo import TIGHT


def test_what_was_journaled_is_what_is_replayed() -> None:
    rows = varied_rows(40)
    run = journal_trace(list(reversed(rows)), "run")
    trace = run.trace
    assert trace.name == "run"
    np.testing.assert_allclose(trace.arrival_s, [0.1 * number for number in range(40)], atol=1e-12)
    assert trace.prompt_tokens.tolist() == [row.usage_prompt_tokens for row in rows]
    assert trace.output_tokens.tolist() == [row.output_tokens for row in rows]
    assert trace.slo_class.tolist() == [row.slo_class for row in rows]
    assert run.request_ids == tuple(row.request_id for row in rows)
    assert run.predicted_tokens.tolist() == [row.predicted_output_tokens for row in rows]
    assert run.ttft_s.tolist() == [row.ttft_s for row in rows]
    assert (run.prefill_engines, run.decode_engines) == (tuple(PREFILL_ENGINES), tuple(DECODE_ENGINES))
    for row, action, prefill, decode in zip(rows, run.action, run.prefill, run.decode, strict=True):
        assert row.executed == ("local" if action == LOCAL else "remote")
        assert row.executed_prefill_engine == (None if prefill < 0 else PREFILL_ENGINES[prefill])
        assert row.executed_decode_engine == DECODE_ENGINES[decode]


def test_the_executed_path_counts_not_the_decided_one() -> None:
    fallback = journal_row(0, executed="local", executed_prefill_engine=None, executed_decode_engine="http://d3")
    run = journal_trace([fallback, journal_row(1)])
    assert (run.action.tolist(), run.prefill.tolist(), run.decode.tolist()) == ([LOCAL, REMOTE], [-1, 1], [3, 1])


def test_only_shared_blocks_get_ids_and_no_chain_exceeds_its_prompt() -> None:
    rows = [
        journal_row(0, prefix_hashes=[901, 902, 903]),
        journal_row(1, prefix_hashes=[901, 902, 904, 905]),
        journal_row(2, prefix_hashes=[777]),
        journal_row(3, prefix_hashes=[901, 902], usage_prompt_tokens=100, slo_class=TIGHT),
    ]
    trace = journal_trace(rows).trace
    chains = [
        trace.block_ids[start : start + length].tolist()
        for start, length in zip(trace.chain_start, trace.chain_length, strict=True)
    ]
    assert chains == [[0, 1], [0, 1], [], [0]]
    assert trace.hash_block_tokens == 64


def test_blocks_of_text_are_taken_at_their_mean_size() -> None:
    rows = [
        journal_row(0, prefix_hashes=[1, 2, 3], hash_block_tokens=60),
        journal_row(1, prefix_hashes=[1], hash_block_tokens=80),
        journal_row(2, hash_block_tokens=16),
    ]
    trace = journal_trace(rows).trace
    assert trace.hash_block_tokens == 65
    assert trace.notes == ("prefix blocks of 60 to 80 tokens, all taken as 65",)


def test_rows_without_known_load_are_left_out_and_counted() -> None:
    rows = [
        journal_row(0),
        journal_row(0),
        journal_row(1, status="unavailable", executed=None, executed_decode_engine=None),
        journal_row(2, output_tokens=0, status="empty"),
        journal_row(3, output_tokens=None),
        journal_row(4, usage_prompt_tokens=None, prompt_tokens=math.nan),
        journal_row(5, status="aborted", output_tokens=7),
        journal_row(6, usage_prompt_tokens=None, prompt_tokens=333.0, prompt_tokens_source="bytes"),
    ]
    run = journal_trace(rows)
    assert run.trace.output_tokens.tolist() == [90, 7, 90]
    assert run.trace.prompt_tokens.tolist() == [500, 500, 333]
    assert run.left_out == {"duplicate_request_id": 1, "not_executed": 1, "no_output_tokens": 2, "not_finite": 1}
    assert "1 prompt lengths estimated from bytes" in run.trace.notes
    assert "2 journal rows left out: no_output_tokens" in run.trace.notes


def test_f15_missing_times_stay_missing() -> None:
    run = journal_trace([journal_row(0, ttft_s=None, tpot_s=None), journal_row(1)])
    assert np.isnan(run.ttft_s).tolist() == [True, False]
    assert np.isnan(run.tpot_s).tolist() == [True, False]


def test_runs_are_told_apart_by_the_router_s_start() -> None:
    first = [journal_row(number, time=1000.0 + 2.0 * number, arrival_s=1.0 * number, dilation=2.0) for number in (0, 9)]
    second = [journal_row(20, time=1100.0, arrival_s=3.0, dilation=2.0)]
    assert runs([*second, *first]) == [first, second]
    with pytest.raises(TraceError, match="rows of 2 router runs"):
        journal_trace([*first, *second])


def test_a_collection_continued_at_once_on_new_engines_is_two_runs() -> None:
    killed = [journal_row(number, time=1000.0 + number, arrival_s=1.0 * number) for number in (0, 1, 2)]
    again = [
        journal_row(
            number,
            time=1000.4 + number,
            arrival_s=1.0 * number,
            prefill_engines=["http://p8", "http://p9"],
            decode_engines=["http://d8", "http://d9"],
            prefill_engine="http://p8",
            decode_engine="http://d8",
        )
        for number in (3, 4)
    ]
    assert runs([*again, *killed]) == [killed, again]
    assert runs([*killed, journal_row(5, time=1006.5, arrival_s=5.0)])[0] == killed


def test_mixed_clusters_and_empty_journals_are_no_trace() -> None:
    with pytest.raises(TraceError, match=r"emulated at dilation 1, vllm-cpu at dilation 1"):
        journal_trace([journal_row(0), journal_row(1, cluster_kind="vllm-cpu")])
    with pytest.raises(TraceError, match="no journal row has both"):
        journal_trace([journal_row(0, output_tokens=None)])
