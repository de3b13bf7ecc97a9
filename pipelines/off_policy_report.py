"""What `rutter off-policy` found: a report as JSON, and the same as text for people."""

import textwrap

import msgspec

from learn.logged_choices import REASONS
from learn.off_policy import Estimate, OffPolicy
from pipelines.text_table import aligned

CHOICES = {
    "action": "local or remote as the candidate has it, engines as the journal's policy places them given that",
    "full": "local or remote and the engines as the candidate has them",
}
"""What of a candidate's choice is evaluated, and what that means."""

LIMIT = (
    "Limit: requests interfere, a choice changes the load that others see. IPS, SNIPS and DR tell how one request "
    "would fare that follows the candidate alone while all others follow the journal's policy and make its load; they "
    "do not tell how a cluster fares whose every request follows the candidate. A candidate that loads engines "
    "otherwise than the journal's policy did is therefore misjudged, in either direction and with narrow intervals. "
    "Take them as a diagnostic beside the simulator and live runs, never instead of them."
)
WIDTH = 120
HEADER = (
    *("candidate", "choice", "matched", "effective", "weight", "IPS", "SNIPS", "DR", "simulated"),
    *("TTFT met", "TPOT met"),
)


class CandidateReport(msgspec.Struct, frozen=True):
    """One candidate. estimates: by choice of `CHOICES`, then by objective. simulated_goodput: of every request under
    the candidate, None without fitted costs.
    """

    policy: str
    digest: str
    params: dict[str, float | str]
    estimates: dict[str, dict[str, OffPolicy]]
    simulated_goodput: float | None


class Report(msgspec.Struct, frozen=True):
    """supported_share: of the usable rows, those that were explored. on_policy: by objective, exploration included.
    replayed_goodput: of the journaled choices in the simulator, None without fitted costs. clip: largest weight.
    """

    journals: list[str]
    journal_digests: list[str]
    broken_lines: int
    rows: int
    left_out: dict[str, int]
    logged_by: list[str]
    supported_share: float
    on_policy: dict[str, Estimate]
    replayed_goodput: float | None
    artifact: str | None
    notes: list[str]
    clip: float | None
    seed: int
    candidates: list[CandidateReport]
    choices: dict[str, str] = msgspec.field(default_factory=CHOICES.copy)
    limit: str = LIMIT


def report_lines(report: Report) -> list[str]:
    """The report for people."""
    on_policy = report.on_policy
    replayed = report.replayed_goodput
    return [
        f"off-policy: {report.rows} explored rows, logged by {', '.join(report.logged_by)}; support: "
        f"{report.supported_share:.1%} of the usable rows were explored, in these every possible choice had its chance",
        *(f"  left out {count}: {reason} ({REASONS[reason]})" for reason, count in report.left_out.items()),
        *([f"  {report.broken_lines} broken lines skipped: see `rutter check-journal`"] if report.broken_lines else []),
        f"on-policy, as journaled with its exploration: goodput {interval_text(on_policy['goodput'])}, "
        f"TTFT met {on_policy['ttft'].value:.3f}, TPOT met {on_policy['tpot'].value:.3f}"
        + ("" if replayed is None else f"; the journaled choices replayed in the simulator: goodput {replayed:.3f}"),
        "weights not clipped" if report.clip is None else clipped_line(report, report.clip),
        *report.notes,
        "",
        "goodput of each candidate, 95 % intervals:",
        *table_lines(report),
        "",
        *(f"{name}: {meaning}." for name, meaning in report.choices.items()),
        "effective: rows of equal weight that would tell as much; weight: the largest. simulated: every request of the "
        "journal under the candidate"
        + ("; none without --artifact." if report.artifact is None else ".")
        + " TTFT, TPOT met: DR.",
        *disagreement_lines(report),
        "",
        *textwrap.wrap(report.limit, WIDTH),
    ]


def table_lines(report: Report) -> list[str]:
    """Two rows a candidate: the action alone, and the full choice."""
    rows: list[tuple[str, ...]] = [HEADER]
    refusals = []
    for candidate in report.candidates:
        simulated = "-" if candidate.simulated_goodput is None else f"{candidate.simulated_goodput:.3f}"
        for choice, found in candidate.estimates.items():
            rows.append((candidate.policy, choice, *cells(found["goodput"]), simulated, *target_cells(found)))
            if found["goodput"].refusal is not None:
                refusals.append(f"{candidate.policy}, {choice}, refused: {found['goodput'].refusal}.")
    return [*aligned(rows, left=2), *refusals]


def cells(found: OffPolicy) -> tuple[str, ...]:
    """From `matched` to `DR` of HEADER."""
    estimates = (interval_text(found.ips), interval_text(found.snips), interval_text(found.dr))
    return f"{found.matched}", f"{found.effective_rows:.0f}", f"{found.largest_weight:.1f}", *estimates


def target_cells(found: dict[str, OffPolicy]) -> tuple[str, ...]:
    """Attainment of each target, doubly robust."""
    estimates = [found[name].dr for name in ("ttft", "tpot")]
    return tuple("-" if one is None else f"{one.value:.3f}" for one in estimates)


def interval_text(found: Estimate | None) -> str:
    return "refused" if found is None else f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def clipped_line(report: Report, clip: float) -> str:
    cut = max((found["goodput"].clipped for one in report.candidates for found in one.estimates.values()), default=0)
    return f"weights clipped at {clip:g}, of one candidate at most {cut} rows: biased towards rows of small weight"


def disagreement_lines(report: Report) -> list[str]:
    """Which candidates the simulator sees outside the doubly robust interval."""
    apart = []
    for one in report.candidates:
        for choice, found in one.estimates.items():
            dr = found["goodput"].dr
            if one.simulated_goodput is not None and dr is not None and not dr.low <= one.simulated_goodput <= dr.high:
                apart.append(f"{one.policy} ({choice}: {dr.value:.3f}, simulated {one.simulated_goodput:.3f})")
    return [f"The simulator is outside the DR interval for {', '.join(apart)}."] if apart else []
