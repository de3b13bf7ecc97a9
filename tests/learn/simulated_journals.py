"""Journals whose truth is known: runs of the simulator as `learn.journal_trace` would give them back."""

from dataclasses import replace

import numpy as np
from synthetic_rows import FleetState, journal_row

from learn.journal_trace import JournalTrace
from learn.simulation import Topology, simulate
from learn.trace import Trace
from serve_table.journal import Row
from serve_table.policy import policy
from serve_table.situation import ACTION_NAMES, LOCAL
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B, HardwareProfile


def profile_times(decode: float, prefill: float, handoff: float) -> HardwareProfile:
    """The a40-3b profile with its decode step, prefill tokens and hand-off so many times as slow."""
    step, transfer = A40_3B.step, A40_3B.handoff
    return replace(
        A40_3B,
        step=replace(
            step,
            floor_s=step.floor_s * decode,
            per_token_s=step.per_token_s * decode,
            per_token_beyond_s=step.per_token_beyond_s * prefill,
            per_context_token_s=step.per_context_token_s * decode,
        ),
        handoff=replace(transfer, latency_s=transfer.latency_s * handoff, per_token_s=transfer.per_token_s * handoff),
    )


def journal_of(
    trace: Trace, topology: Topology, policy_name: str = "least_loaded", explore: float = 0.3, seed: int = 0
) -> JournalTrace:
    """What a journal would hold of the trace's run under an exploring policy."""
    slo = targets_from_profile(A40_3B)
    run = simulate(trace, topology, policy(policy_name), slo, 200.0, seed, explore)
    n = len(trace)
    return JournalTrace(
        trace=trace,
        request_ids=tuple(f"r{i}" for i in range(n)),
        action=run.action,
        prefill=run.prefill,
        decode=run.decode,
        predicted_tokens=np.full(n, 200.0),
        held_s=run.held_s,
        ttft_s=run.ttft_s,
        tpot_s=run.tpot_s,
        prefill_engines=tuple(f"http://p{i}" for i in range(topology.prefill_engines)),
        decode_engines=tuple(f"http://d{i}" for i in range(topology.decode_engines)),
        left_out={},
    )


def rows_of(trace: Trace, topology: Topology, seed: int = 0, start_time: float = 1_700_000_000.0) -> list[Row]:
    """The journal rows of such a run, for a topology of 2P+4D; pressures are drawn, not the run's own."""
    journal = journal_of(trace, topology, seed=seed)
    rng = np.random.default_rng(seed)
    slo = targets_from_profile(A40_3B)
    rows = []
    for i in range(len(trace)):
        prompt, slo_class = int(trace.prompt_tokens[i]), int(trace.slo_class[i])
        ttft_s = float(journal.ttft_s[i])
        tpot_s = float(journal.tpot_s[i]) if np.isfinite(journal.tpot_s[i]) else None
        action = int(journal.action[i])
        row = journal_row(
            i,
            request_id=f"s{seed}-{i:06d}",
            time=start_time + float(trace.arrival_s[i]),
            arrival_s=float(trace.arrival_s[i]),
            prompt_tokens=float(prompt),
            usage_prompt_tokens=prompt,
            predicted_output_tokens=200.0,
            output_tokens=int(trace.output_tokens[i]),
            slo_class=slo_class,
            fleet=FleetState(float(rng.exponential(2000.0)), float(rng.integers(0, 40))).row(),
            action=ACTION_NAMES[action],
            prefill_engine=None if action == LOCAL else journal.prefill_engines[journal.prefill[i]],
            decode_engine=journal.decode_engines[journal.decode[i]],
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            slo_met=slo[slo_class].met(prompt, ttft_s, tpot_s),
        )
        rows.append(row)
    return rows
