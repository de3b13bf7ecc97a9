"""Deciding again from a journal row: the proof that a row holds all that its decision saw."""

from serve_table.decision import PRICE
from serve_table.errors import JournalError
from serve_table.harm import NO_RESIDENTS, Residents
from serve_table.journal import Row
from serve_table.policy import Policy
from serve_table.situation import Decision, Draws, Fleet, Request


def request_and_fleet(row: Row) -> tuple[Request, Fleet]:
    """What the decision saw. Raises JournalError for a row without a decision."""
    seen = row.fleet
    if seen is None:
        raise JournalError(f"request {row.request_id}: it was refused before a decision, so nothing can be decided")
    request = Request(
        prompt_tokens=row.prompt_tokens,
        predicted_output_tokens=row.predicted_output_tokens,
        slo_class=row.slo_class,
        prefill_cached_tokens=seen.prefill_cached_tokens,
        decode_cached_tokens=seen.decode_cached_tokens,
        remote_allowed=row.remote_allowed,
        waited_s=row.waited_s or 0.0,
        held_ahead_tokens=row.held_ahead_tokens or 0.0,
    )
    fleet = Fleet(
        prefill_requests=seen.prefill_requests,
        prefill_tokens=seen.prefill_tokens,
        prefill_up=seen.prefill_up,
        decode_requests=seen.decode_requests,
        decode_tokens=seen.decode_tokens,
        decode_prefill_tokens=seen.decode_prefill_tokens,
        decode_up=seen.decode_up,
        whole_engines=len(row.prefill_engines) if is_elastic(row) else 0,
    )
    return request, fleet


def decode_candidates(row: Row) -> list[str]:
    """Engines as a decision's `decode` counts them: in an elastic fleet the prefill engines come after the others."""
    return [*row.decode_engines, *row.prefill_engines] if is_elastic(row) else row.decode_engines


def is_elastic(row: Row) -> bool:
    """Whether its prefill engines might have served the whole request."""
    n_whole = 0 if row.fleet is None else len(row.fleet.decode_up) - len(row.decode_engines)
    return n_whole > 0 and n_whole == len(row.prefill_engines)


def residents_of(row: Row) -> Residents:
    """The residents that the decision saw; nobody where it did not look at them."""
    seen = row.residents
    if seen is None:
        return NO_RESIDENTS
    return Residents(seen.now_s, seen.prefill_since_s, seen.shares, seen.constants, seen.prefilled_tokens)


def redecide(row: Row, policy: Policy) -> Decision:
    """Decide again as the router did. The same policy (compare `digest`) gives the journaled choice.

    Raises JournalError for a row without a decision, and for the price where the row was decided without residents.
    Rows of reason `decision_error` took the safe route instead.
    """
    if policy.number == PRICE and row.residents is None:
        raise JournalError(
            f"request {row.request_id}: policy {row.policy!r} journaled no residents, which policy {policy.name!r} "
            "decides by"
        )
    request, fleet = request_and_fleet(row)
    return policy.decide(request, fleet, row.rotation, row.explore, Draws(*row.draws), residents_of(row))
