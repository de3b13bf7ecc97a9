"""`rutter workload`: what a workload or trace asks of a cluster, before it is run."""

import argparse

import msgspec
import numpy as np

from learn.trace import Ints, Trace
from pipelines.imports.report import rate_profile
from pipelines.traces import trace_by_name, trace_names
from pipelines.workloads import CONTEXT_TOKENS, WORKLOADS
from serve_table.errors import TraceError
from serve_table.slo import TIGHT

SYNTHETIC_REQUESTS = 2_000
SYNTHETIC_REQUESTS_PER_S = 5.0


class Lengths(msgspec.Struct, frozen=True):
    """Of one column of token counts."""

    mean_tokens: float
    p50_tokens: float
    p90_tokens: float
    p99_tokens: float
    max_tokens: int
    total_tokens: int


class Summary(msgspec.Struct, frozen=True):
    """Of one trace. requests_per_s: null where the requests span no time. shared_prefix_share: share of the prompt
    tokens that an earlier request's prefix holds too, so what a cache that never evicts would save.
    """

    name: str
    requests: int
    span_s: float
    requests_per_s: float | None
    prompt: Lengths
    output: Lengths
    tight_share: float
    shared_prefix_share: float
    profile_part_s: float
    profile_requests_per_s: tuple[float, ...]
    notes: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(trace_names())
    parser.add_argument(
        "trace",
        nargs="?",
        default="mixed",
        help=f"{names}, or FORMAT:PATH with azure, mooncake or burstgpt (%(default)s)",
    )
    parser.add_argument(
        "--requests", type=int, metavar="N", help=f"how many ({SYNTHETIC_REQUESTS} synthetic, else all)"
    )
    parser.add_argument("--rate", type=float, metavar="R", help="requests a second on average (a trace has its own)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of a synthetic workload, and of the SLO classes (%(default)s)"
    )
    parser.add_argument("--start", type=int, default=0, metavar="N", help="skip the first N requests")
    parser.add_argument("--from", type=float, dest="from_s", metavar="S", help="from this second of a trace on")
    parser.add_argument("--to", type=float, dest="to_s", metavar="S", help="up to this second of a trace")
    parser.add_argument("--max-model-len", type=int, default=CONTEXT_TOKENS, metavar="TOKENS", help="leave longer out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    synthetic = args.trace in WORKLOADS
    summary = summarise(
        trace_by_name(
            args.trace,
            SYNTHETIC_REQUESTS if synthetic and args.requests is None else args.requests,
            args.seed,
            SYNTHETIC_REQUESTS_PER_S if synthetic and args.rate is None else args.rate,
            args.start,
            from_s=args.from_s,
            to_s=args.to_s,
            max_model_len_tokens=args.max_model_len,
        )
    )
    print(msgspec.json.encode(summary).decode() if args.json else "\n".join(text_lines(summary)))
    return 0


def summarise(trace: Trace) -> Summary:
    """The trace's summary; TraceError for one without requests."""
    if len(trace) == 0:
        raise TraceError(f"trace {trace.name!r}: no request is left in this slice; ask for another")
    span_s = float(trace.arrival_s[-1])
    profile = rate_profile(trace.arrival_s)
    return Summary(
        name=trace.name,
        requests=len(trace),
        span_s=span_s,
        requests_per_s=(len(trace) - 1) / span_s if span_s > 0 else None,
        prompt=_lengths(trace.prompt_tokens),
        output=_lengths(trace.output_tokens),
        tight_share=float(np.mean(trace.slo_class == TIGHT)),
        shared_prefix_share=shared_prefix_share(trace),
        profile_part_s=profile.part_s,
        profile_requests_per_s=tuple(float(rate) for rate in profile.requests_per_s),
        notes=trace.notes,
    )


def _lengths(tokens: Ints) -> Lengths:
    p50, p90, p99 = np.quantile(tokens, (0.5, 0.9, 0.99)).tolist()
    return Lengths(float(tokens.mean()), p50, p90, p99, int(tokens.max()), int(tokens.sum()))


def shared_prefix_share(trace: Trace) -> float:
    """Share of all prompt tokens in prefix blocks that an earlier request had already."""
    chains = [
        trace.block_ids[start : start + length]
        for start, length in zip(trace.chain_start.tolist(), trace.chain_length.tolist(), strict=True)
    ]
    blocks = np.concatenate(chains)
    repeated = len(blocks) - len(np.unique(blocks))
    return repeated * trace.hash_block_tokens / int(trace.prompt_tokens.sum())


def text_lines(summary: Summary) -> list[str]:
    rate = "" if summary.requests_per_s is None else f", {summary.requests_per_s:.3g} a second"
    lines = [f"{summary.name}: {summary.requests:,} requests in {summary.span_s:,.1f} s{rate}"]
    for name, lengths in (("prompt", summary.prompt), ("output", summary.output)):
        lines.append(
            f"{name} tokens: mean {lengths.mean_tokens:,.0f}, P50 {lengths.p50_tokens:,.0f}, "
            f"P90 {lengths.p90_tokens:,.0f}, P99 {lengths.p99_tokens:,.0f}, max {lengths.max_tokens:,}, "
            f"sum {lengths.total_tokens:,}"
        )
    lines.append(f"tight SLO class: {summary.tight_share:.1%} of requests")
    lines.append(f"shared prefixes: {summary.shared_prefix_share:.1%} of prompt tokens")
    if summary.profile_requests_per_s:
        rates = " ".join(f"{rate:.2f}" for rate in summary.profile_requests_per_s)
        lines.append(f"rate: {rates} requests a second, in parts of {summary.profile_part_s:,.0f} s")
    return lines + [f"note: {note.strip()}" for note in summary.notes]
