"""What the correctness gates found, for a person, a program, and a run that must not count without them."""

import msgspec

from serve_table.errors import ClusterError


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One gate. detail: what was found, the first problem where it failed; problems: all of them; advice: what to
    do, None where it passed.
    """

    name: str
    passed: bool
    detail: str
    advice: str | None = None
    problems: list[str] = []

    @property
    def line(self) -> str:
        mark = "pass" if self.passed else "FAIL"
        return f"{mark}  {self.name:<14}{self.detail}" + (f" -> {self.advice}" if self.advice is not None else "")


class GateReport(msgspec.Struct, frozen=True, kw_only=True):
    """All gates of one cluster. model, engine_version: None where the engines do not agree or do not say."""

    prefill_urls: list[str]
    decode_urls: list[str]
    model: str | None
    engine_version: str | None
    gates: list[Gate]
    duration_s: float

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    @property
    def failed(self) -> list[Gate]:
        return [gate for gate in self.gates if not gate.passed]

    def require_passed(self) -> None:
        """ClusterError with the first failure where a gate failed: the cluster's figures must not count."""
        if self.passed:
            return
        first = self.failed[0]
        more = f" (and {len(self.failed) - 1} more gates failed)" if len(self.failed) > 1 else ""
        advice = f"; {first.advice}" if first.advice is not None else ""
        raise ClusterError(f"the gate {first.name!r} failed: {first.detail}{advice}{more}; `rutter check` shows all")
