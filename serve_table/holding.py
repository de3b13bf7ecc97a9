"""Holding: requests wait in the router until a prefill engine is nearly free, and are then decided again.

`serve_table.guard` says which are held and when more are taken; this is its clock, its timer and its queue. Whenever a
prefill leg is over, an engine goes or comes back, or time enough has passed, held requests are tried in their order.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Literal, Protocol

from serve_table.fleet import EngineFleet
from serve_table.guard import MAX_TRIED, must_hold, takes_more, takes_more_at_s
from serve_table.harm import Residents
from serve_table.held_queue import HeldQueue, HeldRequest
from serve_table.metrics import RouterMetrics
from serve_table.placement import count_up
from serve_table.residents import ResidentBook
from serve_table.situation import NO_ENGINE, Fleet, Request, features_of
from serve_table.tenants import Tenant

TIMER_SLACK_S = 1e-6
"""A backlog may be a rounding error too long at the very moment that it should be short enough."""
LEAST_TIMER_S = 0.001

Reason = Literal["free", "local", "overdue", "no_prefill_engine", "cancelled", "failed"]
"""Why a request is held no longer: its prefill engine is nearly free, it is better off without one, it was held for the
longest time allowed, no engine is up, its client left, or deciding failed."""


class Arrival(Protocol):
    """A request on its way to its engines, as `serve_table.admission` has it."""

    @property
    def request(self) -> Request: ...
    @property
    def fleet(self) -> Fleet: ...
    @property
    def residents(self) -> Residents: ...
    @property
    def prefill(self) -> int:
        """Of the last decision; NO_ENGINE where it prefills locally."""

    def decide(self, waited_s: float, held_ahead_tokens: float) -> None:
        """Decide, again, from what is known now."""

    def hold(self) -> None:
        """It is held from now on."""

    def reserve(self) -> object:
        """Give it the engines of its last decision."""


def _unset() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, kw_only=True)
class _Turn(HeldRequest):
    """A held request, and the future that is done when its turn has come."""

    arrival: Arrival
    came: "asyncio.Future[None]" = field(default_factory=_unset)


class Holding:
    """The held requests of one router. Only for the price, and where its hold_s is greater than 0.

    max_hold_s: after which a request goes whatever the backlog, in the engines' own seconds, of which each takes
    `dilation` seconds here.
    """

    def __init__(
        self, fleet: EngineFleet, residents: ResidentBook, metrics: RouterMetrics, max_hold_s: float, dilation: float
    ) -> None:
        self._params = residents.params
        self._fleet = fleet
        self._residents = residents
        self._metrics = metrics
        self._max_hold_s = max_hold_s
        self._dilation = dilation
        self._queue: HeldQueue[_Turn] = HeldQueue(self._params)
        self._woken: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._queue)

    async def admit(self, arrival: Arrival, tenant: Tenant) -> None:
        """Decide and reserve: without a pause where nothing is to be waited for, else when the request's turn has come.

        A request whose caller is cancelled is held no longer.
        """
        now_s = self._residents.clock()
        turn = _Turn(request=arrival.request, since_s=now_s, tenant=tenant, arrival=arrival)
        arrival.decide(0.0, self._queue.ahead_tokens(turn, now_s) if self._queue else 0.0)
        if arrival.prefill == NO_ENGINE or not (self._queue or self._is_to_wait(arrival)):
            arrival.reserve()
        else:
            await self._wait(turn)

    def wake(self) -> None:
        """A prefill engine has less to do, or went, or came: try the held requests as soon as the caller pauses, since
        it may not have said yet why.
        """
        if self._queue and self._woken is None:
            self._woken = asyncio.get_running_loop().call_soon(self._try_all)

    def stop(self) -> None:
        """Try nothing any more."""
        for handle in (self._woken, self._timer):
            if handle is not None:
                handle.cancel()
        self._woken = self._timer = None

    def _is_to_wait(self, arrival: Arrival) -> bool:
        return must_hold(self._params, arrival.fleet, arrival.residents, arrival.prefill)

    async def _wait(self, turn: _Turn) -> None:
        turn.tokens = _uncached_tokens(turn.arrival)
        turn.arrival.hold()
        self._queue.add(turn)
        # Another engine than those that the others wait for may be free.
        self.wake()
        try:
            await turn.came
        finally:
            if turn in self._queue:
                self._end(turn, "cancelled")

    def _try_all(self) -> None:
        """Release whom no backlog may keep any longer, then decide again, in order, until no engine takes more."""
        self.stop()
        now_s = self._residents.clock()
        while self._queue and now_s - self._queue.first().since_s >= self._max_hold_s:
            self._try(self._queue.first(), now_s, 0.0, is_overdue=True)
        any_up = count_up(self._fleet.snapshot().prefill_up) > 0
        ahead_tokens = 0.0
        for tried, turn in enumerate(self._queue.in_order(now_s)):
            if (tried >= MAX_TRIED and any_up) or not self._takes_more():
                break
            if not self._try(turn, now_s, ahead_tokens, is_overdue=False):
                ahead_tokens += turn.tokens
        self._set_timer()

    def _takes_more(self) -> bool:
        return takes_more(self._params, self._fleet.snapshot(), self._residents.seen())

    def _try(self, turn: _Turn, now_s: float, ahead_tokens: float, is_overdue: bool) -> bool:
        """Decide one request again; whether it is held no longer."""
        if turn.came.done():
            self._end(turn, "cancelled")
            return True
        arrival = turn.arrival
        try:
            arrival.decide(now_s - turn.since_s, ahead_tokens)
            turn.tokens = _uncached_tokens(arrival)
            if not is_overdue and self._is_to_wait(arrival):
                return False
            arrival.reserve()
        except Exception as error:  # noqa: BLE001 - raised where the request waits, and reported there
            turn.came.set_exception(error)
            self._end(turn, "failed")
            return True
        turn.came.set_result(None)
        self._end(turn, "overdue" if is_overdue else self._reason(arrival))
        return True

    def _reason(self, arrival: Arrival) -> Reason:
        if arrival.prefill != NO_ENGINE:
            return "free"
        return "local" if count_up(arrival.fleet.prefill_up) > 0 else "no_prefill_engine"

    def _end(self, turn: _Turn, reason: Reason) -> None:
        """It is held no longer."""
        self._queue.remove(turn, released=reason not in ("cancelled", "failed"))
        self._metrics.held_ended.labels(reason).inc()
        self._metrics.held_time.observe(self._residents.clock() - turn.since_s)

    def _set_timer(self) -> None:
        """Try again when an engine will take more though nothing happens, and when the first has waited too long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._queue:
            return
        now_s = self._residents.clock()
        at_s = takes_more_at_s(self._params, self._fleet.snapshot(), self._residents.seen())
        at_s = min(at_s, self._queue.first().since_s + self._max_hold_s) + TIMER_SLACK_S
        delay_s = max((at_s - now_s) * self._dilation, LEAST_TIMER_S)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._try_all)


def _uncached_tokens(arrival: Arrival) -> float:
    return features_of(arrival.request, arrival.fleet).uncached_prefill_tokens
