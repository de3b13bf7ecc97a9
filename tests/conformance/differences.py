"""Where emulated engines are meant to differ from vLLM: all of it, each with its reason.

A difference that is no fault stands here and nowhere else; whatever else differs is corrected in the emulator.
"""

from dataclasses import dataclass

from outcomes import Outcome, ok

USED_TWICE = "a handle used twice"
EXPIRED = "an expired handle"
MADE_UP = "a made-up request on a live engine"
LIFE_CYCLE = {USED_TWICE: ok(), EXPIRED: ok(), MADE_UP: ok()}
"""vLLM reads whatever blocks a handle names and asks nobody whose they are."""


@dataclass(frozen=True)
class Difference:
    """An emulated engine is meant to end a case otherwise."""

    case: str
    emulated: Outcome
    reason: str


_UNSUPPORTED = Outcome(400, "...", "BadRequestError")
_STALE = Outcome(500, "Internal server error", "InternalServerError")
_ONE_GREEDY_ANSWER = (
    "an emulated answer is one greedy text without probabilities; it refuses rather than answer wrongly"
)
_STALE_REASON = "vLLM answers from blocks that may be another prompt's by now; the emulator shows the router's mistake"

DIFFERENCES = (
    Difference("logprobs", _UNSUPPORTED, _ONE_GREEDY_ANSWER),
    Difference("logprobs in chat", _UNSUPPORTED, _ONE_GREEDY_ANSWER),
    Difference("echo", _UNSUPPORTED, _ONE_GREEDY_ANSWER),
    Difference("several answers", _UNSUPPORTED, _ONE_GREEDY_ANSWER),
    Difference("several prompts", _UNSUPPORTED, _ONE_GREEDY_ANSWER),
    Difference("stop text", _UNSUPPORTED, "stop_token_ids show the finish reason; stop texts would not add to it"),
    Difference("temperature out of range", ok(), "sampling parameters do not matter to answers that are always greedy"),
    Difference(USED_TWICE, _STALE, _STALE_REASON),
    Difference(EXPIRED, _STALE, _STALE_REASON),
    Difference(MADE_UP, _STALE, _STALE_REASON),
)

NOT_ASKED = {
    "do_remote_prefill without remote_block_ids": "it fails an assertion of vLLM's scheduler and ends the engine; the "
    "emulator answers 400",
    "do_remote_prefill without remote_host": "vLLM waits for ever for KV that nobody sends; the emulator answers 400",
    "a handle that names another machine": "vLLM tries for 5 s and answers 500; the emulator answers 500 at once and "
    "connects to loopback addresses only",
}
"""Differences that a running cluster is not asked about, with their reasons."""


def expected(name: str, specified: Outcome, kind: str) -> Outcome:
    """What a case ends with on a kind of cluster."""
    if kind != "emulated":
        return specified
    return next((difference.emulated for difference in DIFFERENCES if difference.case == name), specified)
