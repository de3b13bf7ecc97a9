"""Readiness: whether a request can be served, and what is not as it should be."""

from serve_table.fleet import EngineFleet


def readiness(fleet: EngineFleet) -> tuple[bool, list[str]]:
    """Ready with one decode engine. The reasons name engines and what they said: for operators only."""
    reasons = [
        f"{engine.role} engine {number} is down: {engine.down_reason}"
        for engines in (fleet.prefill, fleet.decode)
        for number, engine in enumerate(engines)
        if not engine.up
    ]
    ready = any(engine.up for engine in fleet.decode)
    if not ready:
        reasons.insert(0, "no decode engine is up")
    elif not any(engine.up for engine in fleet.prefill):
        reasons.insert(0, "no prefill engine is up: every request prefills locally")
    return ready, reasons
