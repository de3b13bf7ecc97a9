"""The record of one request, filled as it goes and turned into its journal row in the end."""

import time
import uuid
from dataclasses import dataclass, field

from serve_table.answer import AnswerMeter
from serve_table.context import RouterContext
from serve_table.endpoints import Endpoint
from serve_table.engine_caches import CacheSource
from serve_table.features import PromptFeatures
from serve_table.harm import Residents
from serve_table.journal import FORMAT_VERSION, ExecutedPath, FleetRow, ResidentsRow, Row, Status
from serve_table.situation import LOCAL, NO_ENGINE, REASON_NAMES, REMOTE, WHOLE, Decision, Draws, Fleet, Request
from serve_table.slo import SloClass

MAX_CLIENT_ID_CHARACTERS = 200
SAFE_ROUTE = "decision_error"
"""Reason in rows whose decision failed: local, on the least loaded decode engine."""


@dataclass
class Admission:
    """What the decision saw and chose. decision is None where it failed and the safe route was taken. residents: None
    where the policy does not decide by them.
    """

    prompt: PromptFeatures
    request: Request
    cached_tokens_source: CacheSource
    fleet: Fleet
    residents: Residents | None
    rotation: int
    draws: Draws
    decision: Decision | None
    action: ExecutedPath
    prefill_engine: str | None
    decode_engine: str


@dataclass
class Record:
    """Times are of the context's monotonic clock; None until they happened."""

    endpoint: Endpoint
    arrival_s: float
    client_id: str | None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    time: float = field(default_factory=time.time)
    stream: bool = False
    single_sequence: bool = True
    slo_class: int = 0
    admission: Admission | None = None
    held: bool = False
    meter: AnswerMeter = field(default_factory=AnswerMeter)

    executed: ExecutedPath | None = None
    executed_prefill_engine: str | None = None
    executed_decode_engine: str | None = None
    fallback_reason: str | None = None
    attempts: int = 0
    status: Status | None = None
    http_status: int | None = None
    prefill_sent_s: float | None = None
    prefill_done_s: float | None = None
    prefill_cached_tokens: int | None = None
    decode_sent_s: float | None = None

    def fall_back(self, reason: str) -> None:
        """A remote decision that is executed locally; the first reason stands."""
        self.executed = "local"
        self.executed_prefill_engine = None
        self.fallback_reason = self.fallback_reason or reason

    def to_row(self, context: RouterContext, end_s: float) -> Row:
        dilation = context.config.dilation
        meter = self.meter
        ttft_s = tpot_s = None
        if self.stream and meter.first_text_s is not None:
            ttft_s = (meter.first_text_s - self.arrival_s) / dilation
            tpot_s = self._tpot_s(dilation)
        target = context.slo_targets[self.slo_class]
        target_tokens = self._target_tokens()
        remote = self.executed == "remote"
        return Row(
            version=FORMAT_VERSION,
            request_id=self.request_id,
            client_id=self.client_id,
            time=self.time,
            arrival_s=(self.arrival_s - context.started_s) / dilation,
            endpoint=self.endpoint.path,
            stream=self.stream,
            cluster_kind=context.config.cluster_kind,
            dilation=dilation,
            policy=context.policy.name,
            policy_digest=context.policy.digest,
            explore=context.config.explore,
            slo_class=self.slo_class,
            prefill_engines=list(context.config.prefill_urls),
            decode_engines=list(context.config.decode_urls),
            **_admission_columns(self.admission, self.held, context.config.hash_block_tokens),  # type: ignore[arg-type]
            executed=self.executed,
            executed_prefill_engine=self.executed_prefill_engine,
            executed_decode_engine=self.executed_decode_engine,
            fallback_reason=self.fallback_reason,
            attempts=self.attempts,
            status=self.status or "aborted",
            http_status=self.http_status,
            finish_reason=meter.finish_reason,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            e2e_s=(end_s - self.arrival_s) / dilation,
            prefill_leg_s=_difference(self.prefill_done_s, self.prefill_sent_s, dilation),
            handoff_age_s=_difference(self.decode_sent_s, self.prefill_done_s, dilation) if remote else None,
            usage_prompt_tokens=meter.prompt_tokens,
            output_tokens=meter.output_tokens,
            output_tokens_source=meter.output_tokens_source,
            cached_tokens=self.prefill_cached_tokens if remote else meter.cached_tokens,
            ttft_target_s=None if target_tokens is None else target.ttft_target_s(target_tokens),
            tpot_target_s=target.tpot_s,
            slo_met=self._slo_met(target, target_tokens, ttft_s, tpot_s),
        )

    def _tpot_s(self, dilation: float) -> float | None:
        """(time of the last token - time of the first) / (tokens - 1); None where there is no second token."""
        meter = self.meter
        tokens = meter.output_tokens
        if tokens is None or tokens <= 1 or meter.first_text_s is None or meter.last_token_s is None:
            return None
        # The tokens of several sequences are decoded side by side.
        return (meter.last_token_s - meter.first_text_s) / (tokens - 1) / dilation if self.single_sequence else None

    def _target_tokens(self) -> int | None:
        if self.meter.prompt_tokens is not None:
            return self.meter.prompt_tokens
        return int(self.admission.prompt.tokens) if self.admission is not None else None

    def _slo_met(
        self, target: SloClass, prompt_tokens: int | None, ttft_s: float | None, tpot_s: float | None
    ) -> bool | None:
        """None where no target applies: not streamed, refused as the client's fault, or the client left."""
        if not self.stream or prompt_tokens is None or self.status in (None, "aborted", "client_error"):
            return None
        return target.met(prompt_tokens, ttft_s, tpot_s) if self.status == "ok" else False


def _difference(end_s: float | None, start_s: float | None, dilation: float) -> float | None:
    return None if end_s is None or start_s is None else (end_s - start_s) / dilation


def _admission_columns(admission: Admission | None, held: bool, hash_block_tokens: int) -> dict[str, object]:
    """The columns of what the decision saw; without a decision the request was refused before its features."""
    if admission is None:
        return {
            "rotation": 0,
            "draws": [],
            "prompt_tokens": 0.0,
            "prompt_tokens_source": "bytes",
            "predicted_output_tokens": 0.0,
            "remote_allowed": False,
            "prefix_hashes": [],
            "hash_block_tokens": hash_block_tokens,
            "fleet": None,
            "action": None,
            "prefill_engine": None,
            "decode_engine": None,
            "cluster": None,
            "regime": None,
            "propensity": None,
            "reason": None,
            "cached_tokens_source": None,
            "residents": None,
            "waited_s": None,
            "held_ahead_tokens": None,
        }
    request, decision = admission.request, admission.decision
    fleet = admission.fleet._asdict()
    del fleet["whole_engines"]
    return {
        "rotation": admission.rotation,
        "draws": list(admission.draws),
        "prompt_tokens": request.prompt_tokens,
        "prompt_tokens_source": admission.prompt.source,
        "predicted_output_tokens": request.predicted_output_tokens,
        "remote_allowed": request.remote_allowed,
        "prefix_hashes": list(admission.prompt.block_hashes),
        "hash_block_tokens": admission.prompt.block_tokens,
        "fleet": FleetRow(
            **fleet,
            prefill_cached_tokens=list(request.prefill_cached_tokens),
            decode_cached_tokens=list(request.decode_cached_tokens),
        ),
        "action": admission.action,
        "prefill_engine": admission.prefill_engine,
        "decode_engine": admission.decode_engine,
        "cluster": None if decision is None or decision.cluster == NO_ENGINE else decision.cluster,
        "regime": None if decision is None or decision.regime == NO_ENGINE else decision.regime,
        "propensity": None if decision is None else decision.propensity,
        "cached_tokens_source": admission.cached_tokens_source,
        "residents": None if admission.residents is None else _residents_row(admission.residents),
        "waited_s": request.waited_s if held else None,
        "held_ahead_tokens": request.held_ahead_tokens,
        "reason": SAFE_ROUTE if decision is None else REASON_NAMES[decision.reason],
    }


def _residents_row(residents: Residents) -> ResidentsRow:
    return ResidentsRow(
        residents.now_s,
        residents.prefill_since_s,
        residents.shares,
        residents.constants,
        list(residents.prefilled_tokens),
    )


def action_name(action: int) -> ExecutedPath:
    names: dict[int, ExecutedPath] = {LOCAL: "local", REMOTE: "remote", WHOLE: "whole"}
    return names[action]
