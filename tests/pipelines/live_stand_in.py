"""A live cluster's stand-in for comparisons and searches: the simulator answers, and writes the router's journal."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_rows import journal_row, write_journal

from learn.evaluate import bench_of
from learn.simulation import Topology, simulate
from learn.trace import Trace
from pipelines import policy_run
from pipelines.gate_report import Gate, GateReport
from pipelines.live_run import ClusterConfig, Engines, RunPolicy
from pipelines.load_report import LoadReport, RequestRecord
from pipelines.pacing import PacingReport
from serve_table.artifact import load
from serve_table.policy import LEARNED_POLICIES, policy
from serve_table.predictor import constant_predictor
from serve_table.situation import ACTION_NAMES, REMOTE
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

URLS = ("http://p0", "http://d0")
TOPOLOGY = Topology(1, 1, A40_3B, 0.003)


@dataclass
class StandIn:
    """What it was asked, and what it is to do wrong. late_runs: numbers of the sent runs (from 1) whose engines are
    late; dies_in: the run in which the process is killed after half of the requests; fails: requests without an answer.
    """

    topology: Topology = TOPOLOGY
    gate_passes: bool = True
    late_runs: frozenset[int] = frozenset()
    dies_in: int | None = None
    fails: int = 0
    calls: list[str] = field(default_factory=list)
    sent: list[tuple[str, str, int]] = field(default_factory=list)

    @contextmanager
    def engines_of(self, *_: Any) -> Iterator[Engines]:
        self.calls.append("start")
        yield Engines(URLS[:1], URLS[1:])

    def gates(self, *_: Any, **__: Any) -> GateReport:
        self.calls.append("gates")
        gate = Gate(name="greedy text", passed=self.gate_passes, detail="d0 gives another text", advice="look")
        return GateReport(
            prefill_urls=[URLS[0]], decode_urls=[URLS[1]], model="m", engine_version="1", gates=[gate], duration_s=1.0
        )

    def reset_caches(self, *_: Any) -> None:
        self.calls.append("reset")

    def read_pace(self, *_: Any) -> list[PacingReport]:
        kept = len(self.sent) not in self.late_runs
        report = PacingReport(
            dilation=1.0,
            steps=1000,
            steps_late=0,
            steps_very_late=0 if kept else 900,
            lateness_p50_s=0.0,
            lateness_p99_s=0.0,
            lateness_max_s=0.0,
            re_anchored=0,
            re_anchored_s=0.0,
            kept=kept,
        )
        return [report] * len(URLS)

    def send(
        self,
        cluster: ClusterConfig,
        engines: Engines,  # noqa: ARG002 - as the real one
        chosen: RunPolicy,
        trace: Trace,
        folder: Path,
        progress: object,  # noqa: ARG002 - as the real one
        id_prefix: str,
    ) -> LoadReport:
        """Simulate the policy and journal it as the router would."""
        self.calls.append("send")
        self.sent.append((trace.name, chosen.name, chosen.seed))
        learned = None if chosen.artifact is None else load(chosen.artifact)
        decided = policy(chosen.name, chosen.params, learned if chosen.name in LEARNED_POLICIES else None)
        slo = targets_from_profile(A40_3B) if learned is None else learned.slo_targets()
        predictor = constant_predictor() if learned is None else learned.predictor()
        predicted = bench_of([trace], self.topology, slo, predictor).predicted[0]
        run = simulate(trace, self.topology, decided, slo, predicted, chosen.seed)
        dies = self.dies_in == len(self.sent)
        n = len(trace) // 2 if dies else len(trace)
        rows = []
        for i in range(n):
            ok = i >= self.fails
            rows.append(
                journal_row(
                    i,
                    client_id=f"{id_prefix}-{i:06d}",
                    cluster_kind=cluster.kind,
                    slo_class=int(trace.slo_class[i]),
                    usage_prompt_tokens=int(trace.prompt_tokens[i]),
                    output_tokens=int(trace.output_tokens[i]),
                    prefill_engines=list(URLS[:1]),
                    decode_engines=list(URLS[1:]),
                    action=ACTION_NAMES[run.action[i]],
                    prefill_engine=URLS[0] if run.action[i] == REMOTE else None,
                    decode_engine=URLS[1],
                    policy=chosen.name,
                    policy_digest=decided.digest,
                    status="ok" if ok else "upstream_error",
                    ttft_s=float(run.ttft_s[i]) if ok else None,
                    tpot_s=float(run.tpot_s[i]) if ok and np.isfinite(run.tpot_s[i]) else None,
                    slo_met=bool(run.slo_met[i]) if ok else None,
                )
            )
        write_journal(folder / "journal", rows)
        if dies:
            raise SystemExit("killed")
        records = tuple(
            RequestRecord(index=i, request_id=f"{id_prefix}-{i:06d}", scheduled_s=0.0, lateness_s=0.0) for i in range(n)
        )
        return LoadReport(n, records, True, 1.0, cluster.dilation, None)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Replaces engines, gates, cache resets, pace and load of `compare`, `saturate` and `export --confirm live`."""
    stand = StandIn()
    for module in ("compare", "saturate", "confirm"):
        monkeypatch.setattr(f"pipelines.{module}.engines_of", stand.engines_of)
    monkeypatch.setattr(policy_run, "gates", stand.gates)
    monkeypatch.setattr(policy_run, "reset_caches", stand.reset_caches)
    monkeypatch.setattr(policy_run, "reset_pace", lambda *_: None)
    monkeypatch.setattr(policy_run, "read_pace", stand.read_pace)
    monkeypatch.setattr(policy_run, "send_through_router", stand.send)
    return stand
