"""`rutter check`: the correctness gates on a cluster, one line each."""

import argparse
import sys

import msgspec

from pipelines.engine_urls import add_url_arguments, engine_urls
from pipelines.gates import TIMEOUT_S, gates
from serve_table.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `rutter check`."""
    add_url_arguments(parser)
    add = parser.add_argument
    add("--model", help="served model name; default: the first that the first engine serves")
    add("--timeout-s", type=float, default=TIMEOUT_S, help="wait for one answer (%(default)s)")
    add("--json", action="store_true", help="print the whole report as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the gates; 0 where all pass, 1 where one fails."""
    if not 0.0 < args.timeout_s < float("inf"):
        raise ConfigError(f"--timeout-s {args.timeout_s}: must be above 0")
    urls = engine_urls(args)
    report = gates(urls, args.model or urls.model, timeout_s=args.timeout_s, say=_say)
    if args.json:
        print(
            msgspec.json.format(
                msgspec.json.encode({"passed": report.passed, **msgspec.structs.asdict(report)})
            ).decode()
        )
        return 0 if report.passed else 1
    for gate in report.gates:
        print(gate.line)
    n_failed = len(report.failed)
    verdict = f"{n_failed} of {len(report.gates)} gates failed" if n_failed else f"all {len(report.gates)} gates passed"
    print(f"{verdict} on {len(report.prefill_urls)}P+{len(report.decode_urls)}D in {report.duration_s:.1f} s")
    return 1 if n_failed else 0


def _say(line: str) -> None:
    print(f"check: {line}", file=sys.stderr, flush=True)
