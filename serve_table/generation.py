"""One generative request on its way: decision, legs, relay, and exactly one journal row in the end."""

import logging

import msgspec

from serve_table.admission import Admitted, admit, read_hints
from serve_table.client_side import ClientLeftError, ClientWatch, read_body
from serve_table.context import RouterContext
from serve_table.endpoints import Endpoint
from serve_table.engine_response import EngineResponse, Headers
from serve_table.errors import EngineError, EngineTimeoutError, EngineUnreachableError, RequestError
from serve_table.fleet import Engine
from serve_table.journal import Status
from serve_table.prefill_leg import PrefillAnswer, run_prefill
from serve_table.record import MAX_CLIENT_ID_CHARACTERS, Record
from serve_table.relay import (
    Receive,
    Scope,
    Send,
    StreamRelay,
    forwarded_headers,
    path_and_query,
    returned_headers,
    send_refusal,
    send_whole,
)
from serve_table.request_body import (
    Fields,
    decode_body,
    needs_usage_injected,
    parse_fields,
    prefill_body,
    read,
)

logger = logging.getLogger("rutter")


class Generation:
    """One request at a generative endpoint."""

    def __init__(self, context: RouterContext, endpoint: Endpoint, scope: Scope, send: Send) -> None:
        headers: Headers = scope["headers"]
        self._context = context
        self._endpoint = endpoint
        self._headers = headers
        self._path = path_and_query(endpoint, scope)
        self._send = send
        self._started = False
        self._admitted: Admitted | None = None
        client_id = next((value for name, value in headers if name == b"x-request-id"), None)
        self.record = Record(
            endpoint,
            arrival_s=context.clock(),
            client_id=None if client_id is None else client_id.decode("latin-1")[:MAX_CLIENT_ID_CHARACTERS],
        )
        self._echoed_id = client_id if client_id is not None else self.record.request_id.encode()

    async def run(self, receive: Receive) -> None:
        """Serve the request to its end, whatever that is."""
        record = self.record
        try:
            body = await read_body(receive, self._context.config.max_body_bytes)
            async with ClientWatch(receive):
                await self._serve(body)
        except RequestError as error:
            record.status = "unavailable" if error.status == 503 else "client_error"
            await self._refuse(error)
        except EngineError as error:
            timed_out = isinstance(error, EngineTimeoutError)
            record.status = "timeout" if timed_out else "upstream_error"
            await self._refuse(
                RequestError(504, "the engine did not answer") if timed_out else RequestError(502, "engine failure")
            )
        except ClientLeftError:
            pass
        except Exception:
            logger.exception("request %s failed", record.request_id)
            record.status = record.status or "upstream_error"
            await self._refuse(RequestError(500, "internal error of the router"))
        finally:
            self._finish()

    async def _serve(self, body: bytes) -> None:
        context, record = self._context, self.record
        fields = parse_fields(body)
        context.access.set_salt(fields, self._headers, context.config.tenant_header)
        record.stream = read(fields, "stream", bool) is True
        record.single_sequence = bytes(fields.get("n", b"1")) in (b"1", b"null")
        record.slo_class = context.config.default_slo_class
        hints = read_hints(self._headers, context.config.default_slo_class)
        record.slo_class = hints.slo_class
        admitted = await admit(context, self._endpoint, fields, hints, self._headers, record)
        self._admitted = admitted
        handle = None
        if admitted.prefill is not None:
            answer = await self._prefill(admitted, admitted.prefill, fields)
            if answer is not None and answer.status != 200:
                await self._answer(answer.status, answer.headers, answer.body)
                return
            handle = answer.handle if answer is not None else None
        await self._decode(admitted, fields, handle)

    async def _prefill(self, admitted: Admitted, engine: Engine, fields: Fields) -> PrefillAnswer | None:
        """The prefill leg; None where it failed and the request falls back to its decode engine."""
        context, record = self._context, self.record
        record.executed = "remote"
        record.executed_prefill_engine = engine.url
        record.attempts += 1
        body = prefill_body(fields, self._endpoint)
        self._record_prefix(engine)
        record.prefill_sent_s = context.clock()
        failure: tuple[str, EngineError] | None = None
        try:
            answer = await run_prefill(engine, self._path, self._engine_headers(), body, context.config.timeouts)
            if answer.status >= 500:
                failure = ("status", EngineError(f"{engine.url} answered a prefill with {answer.status}"))
        except EngineError as error:
            failure = (failure_kind(error), error)
        finally:
            record.prefill_done_s = context.clock()
            admitted.reservation.prefill_returned()
        if failure is not None:
            context.health.mark_failed(engine, *failure)
            self._fall_back(f"prefill_{failure[0]}")
            return None
        if answer.status != 200:
            context.metrics.prefill_refusals.labels(engine.url).inc()
            return answer
        context.health.mark_served(engine)
        record.prefill_cached_tokens = answer.cached_tokens
        if answer.handle is None:
            self._fall_back("no_handle")
            return None
        return answer

    def _fall_back(self, reason: str) -> None:
        self.record.fall_back(reason)
        self._context.metrics.fallbacks.labels(reason).inc()

    async def _decode(self, admitted: Admitted, fields: Fields, handle: msgspec.Raw | None) -> None:
        remove_usage = needs_usage_injected(fields, self._endpoint)
        response = await self._open_decode(admitted, decode_body(fields, handle, remove_usage), handle is not None)
        try:
            # Nothing goes to the client before the first byte of the answer: until then errors are real statuses.
            first = await response.chunk()
            content_type = response.header(b"content-type") or b""
            if response.status == 200 and content_type.startswith(b"text/event-stream"):
                await self._relay(admitted, response, first, remove_usage)
            else:
                body = first + await response.body()
                if response.status == 200:
                    self.record.meter.observe_body(body)
                await self._answer(response.status, response.headers, body)
        except EngineError as error:
            self._context.health.mark_failed(admitted.decode, failure_kind(error), error)
            raise
        finally:
            response.close()
        if response.status >= 500:
            self._context.metrics.engine_failures.labels(admitted.decode.url, "status").inc()

    async def _open_decode(self, admitted: Admitted, body: bytes, has_handle: bool) -> EngineResponse:
        """Send the decode leg. Another engine is tried only where nothing was sent: a handle is for one use."""
        context, record = self._context, self.record
        tried: list[Engine] = []
        while True:
            engine = admitted.decode
            record.executed = "remote" if has_handle else "whole" if engine.role == "whole" else "local"
            record.executed_decode_engine = engine.url
            if not (has_handle and record.attempts == 1 and not tried):
                record.attempts += 1
            if not has_handle:
                admitted.reservation.begin_local_prefill()
            self._record_prefix(engine)
            headers = self._engine_headers()
            timeouts = context.config.timeouts
            try:
                response = await engine.client.request("POST", self._path, headers, body, timeouts, fresh=has_handle)
            except EngineUnreachableError as error:
                context.health.mark_failed(engine, "unreachable", error)
                tried.append(engine)
                other = context.fleet.another_decode(tried, context.rotation)
                if other is None:
                    record.executed_decode_engine = None
                    record.executed = None
                    raise RequestError(503, "no decode engine can be reached") from error
                record.fallback_reason = record.fallback_reason or "decode_unreachable"
                admitted.decode = other
                admitted.reservation.move_to(other)
            except EngineError as error:
                context.health.mark_failed(engine, failure_kind(error), error)
                raise
            else:
                record.decode_sent_s = response.sent_s
                return response

    async def _relay(self, admitted: Admitted, response: EngineResponse, first: bytes, remove_usage: bool) -> None:
        record = self.record
        record.stream = True
        relay = StreamRelay(record.meter, remove_usage, self._context.clock, admitted.reservation.streamed)
        await self._begin(response.status, response.headers)
        await relay.run(response, first, self._send)
        if relay.failure is not None:
            timed_out = isinstance(relay.failure, EngineTimeoutError)
            record.status = "timeout" if timed_out else "upstream_error"
            self._context.health.mark_failed(admitted.decode, failure_kind(relay.failure), relay.failure)
            return
        endings: dict[str, Status] = {"complete": "ok", "empty": "empty"}
        record.status = endings.get(record.meter.ending, "upstream_error")
        if record.status == "ok":
            self._context.health.mark_served(admitted.decode)

    async def _begin(self, status: int, headers: Headers) -> None:
        self._started = True
        self.record.http_status = status
        head = {"type": "http.response.start", "status": status, "headers": returned_headers(headers, self._echoed_id)}
        await self._send(head)

    async def _answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Pass a whole answer of an engine to the client, as it is."""
        record = self.record
        if status == 200:
            record.status = "empty" if record.meter.ending == "empty" else "ok"
        else:
            record.status = "client_error" if 400 <= status < 500 else "upstream_error"
        self._started = True
        record.http_status = status
        await send_whole(self._send, status, returned_headers(headers, self._echoed_id), body)

    async def _refuse(self, error: RequestError) -> None:
        """The router's own error, where the client has not had a head yet."""
        if self._started:
            return
        self._started = True
        self.record.http_status = error.status
        await send_refusal(self._send, error, [(b"x-request-id", self._echoed_id)])

    def _engine_headers(self) -> Headers:
        request_id = f"{self.record.request_id}-{self.record.attempts}"
        return forwarded_headers(self._headers, request_id, self._context.access.passes_authorization)

    def _record_prefix(self, engine: Engine) -> None:
        if self.record.admission is not None:
            self._context.caches.index.record(engine.url, self.record.admission.prompt.block_hashes)

    def _finish(self) -> None:
        """Release everything and write the row; nothing here may wait."""
        context, record = self._context, self.record
        admitted = self._admitted
        if admitted is not None:
            admitted.reservation.release()
            self._learn(admitted)
        row = record.to_row(context, context.clock())
        context.journal.append(row)
        metrics = context.metrics
        metrics.requests.labels(row.endpoint, row.policy, row.status).inc()
        if row.action is not None and row.reason is not None:
            metrics.decisions.labels(row.policy, row.action, row.reason).inc()
        if row.status == "ok" and row.executed is not None:
            if row.ttft_s is not None:
                metrics.ttft.labels(row.executed).observe(row.ttft_s)
            if row.tpot_s is not None:
                metrics.tpot.labels(row.executed).observe(row.tpot_s)
        if row.handoff_age_s is not None:
            metrics.handoff_age.observe(row.handoff_age_s)

    def _learn(self, admitted: Admitted) -> None:
        """Of prompts and answers, from what the engine says of this one."""
        context, record = self._context, self.record
        meter, admission = record.meter, record.admission
        if meter.prompt_tokens is not None:
            measured = admission.prompt if admission is not None else None
            context.prompts.observe(admitted.prompt, meter.prompt_tokens, measured)
        told = record.status == "ok" and record.single_sequence and meter.output_tokens is not None
        if told and admission is not None and admitted.predicted_tokens is not None and context.residents is not None:
            tokens = float(meter.output_tokens or 0)
            context.residents.answered(admission.request.prompt_tokens, admitted.predicted_tokens, tokens)


def failure_kind(error: EngineError) -> str:
    """Name of a failure in metrics and rows."""
    if isinstance(error, EngineUnreachableError):
        return "unreachable"
    return "timeout" if isinstance(error, EngineTimeoutError) else "broken"


async def generate(context: RouterContext, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one generative request."""
    await Generation(context, endpoint, scope, send).run(receive)
