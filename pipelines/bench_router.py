"""`rutter bench-router`: the router beside the Rust vllm-router, in turns in front of the same engines without work."""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec
import uvloop

from pipelines.bench_artifact import DEFAULT_ARTIFACT
from pipelines.bench_router_report import Conditions, LoadFigures, Report, Round, Side, report_of, text_lines
from pipelines.bench_timing import collector_off, this_machine
from pipelines.cpu_affinity import CoreShares, core_shares, on_cores
from pipelines.idle_engine import IdleEngines
from pipelines.peer_router import PeerRouter, peer_program, peer_version
from pipelines.process_cost import process_cost
from pipelines.progress import Progress
from pipelines.router_process import RouterProcess
from pipelines.server_process import ServerProcess
from pipelines.stream_client import Counted, StreamKind, StreamLoad
from serve_table import artifact
from serve_table.artifact import write_atomically
from serve_table.errors import ArtifactError, ConfigError, RunError
from serve_table.journal import JournalReader

DEFAULT_JSON = Path("build/bench-router.json")
PREFILL_ENGINES, DECODE_ENGINES = 2, 4
LOADS = {"256": StreamKind(256), "32": StreamKind(32), "paced": StreamKind(128, pace_s=0.005)}
"""By the names of their figures in the result file."""
FIRST_EVENT = StreamKind(8)
TURNS = (("rutter", "peer", "peer", "rutter"), ("peer", "rutter", "rutter", "peer"))
"""Of the two in a round, in rounds by turns: what drifts meanwhile counts for both alike."""


@dataclass(frozen=True)
class Sizes:
    """turn_s: of one load on one router at a time; warm_s: before it. first_events: streams one at a time, of each way.
    limit_s: no round begins that would probably end after it.
    """

    rounds: int
    streams: int = 32
    turn_s: float = 1.2
    warm_s: float = 0.3
    first_events: int = 200
    events_a_write: int = 8
    limit_s: float = 220.0
    policy: str = "rutter"


FULL = Sizes(rounds=5)
QUICK = Sizes(rounds=2, turn_s=0.6, first_events=60)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", type=Path, default=DEFAULT_JSON, metavar="PATH", help="result file (%(default)s)")
    add("--quick", action="store_true", help="fewer and shorter rounds: less certain figures")
    add("--artifact", type=Path, default=DEFAULT_ARTIFACT, metavar="FILE", help="what Rutter decides by (%(default)s)")
    add("--peer", type=Path, metavar="PROGRAM", help="vllm-router ($RUTTER_VLLM_ROUTER, else of make vllm-router-env)")
    add("--policy", default=FULL.policy, help="Rutter's (%(default)s); round_robin sends two legs as the peer does")
    add("--events-a-write", type=int, default=FULL.events_a_write, help="of an engine, per stream (%(default)s)")


def run(args: argparse.Namespace) -> int:
    if args.events_a_write < 1:
        raise ConfigError(f"--events-a-write {args.events_a_write} must be at least 1")
    sizes = replace(QUICK if args.quick else FULL, policy=args.policy, events_a_write=args.events_a_write)
    report = measured(sizes, args.artifact, peer_program(args.peer))
    print("\n".join(text_lines(report)))
    try:
        write_atomically(args.json, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except ArtifactError as error:
        raise RunError(f"{error}; choose another --json") from error
    print(f"written to {args.json}")
    return 0


def measured(sizes: Sizes, artifact_path: Path, program: Path) -> Report:
    """All rounds. program: the peer's. Raises ArtifactError, ClusterError where something does not start, and RunError
    where a stream fails.
    """
    machine = this_machine()  # before the bench itself loads it
    conditions = _conditions(sizes, artifact_path, program)
    cores = core_shares()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rutter-bench-router-")))
        progress = stack.enter_context(Progress("bench-router", sizes.rounds, "rounds"))
        stack.enter_context(on_cores(cores.rest))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        log = folder / "engines.log"
        engines = stack.enter_context(IdleEngines(PREFILL_ENGINES, DECODE_ENGINES, log, sizes.events_a_write))
        rounds: list[Round] = []
        began_s = time.monotonic()
        for number in range(sizes.rounds):
            taken_s = time.monotonic() - began_s
            if rounds and taken_s * (number + 1) / number > sizes.limit_s:
                progress.note(f"ends after {number} rounds: one more would end later than {sizes.limit_s:.0f} s")
                break
            rutter = RouterProcess(
                engines.prefill_urls,
                engines.decode_urls,
                folder / f"journal-{number}",
                sizes.policy,
                folder / "rutter.log",
                artifact=artifact_path,
            )
            peer = PeerRouter(program, engines.prefill_urls, engines.decode_urls, folder / "peer.log")
            turns = TURNS[number % len(TURNS)]
            rounds.append(_Measurement(sizes, runner, rutter, peer, engines.decode_urls[0]).round(turns, cores))
            progress.advance(1, seconds=time.monotonic() - began_s)
        return report_of(rounds, machine, conditions)


class _Measurement:
    """One round: both routers started anew, each load on them in turns, ended."""

    def __init__(
        self, sizes: Sizes, runner: asyncio.Runner, rutter: RouterProcess, peer: PeerRouter, engine_url: str
    ) -> None:
        self._sizes = sizes
        self._runner = runner
        self._rutter = rutter
        self._routers: dict[str, ServerProcess] = {"rutter": rutter, "peer": peer}
        self._engine_url = engine_url
        self._rows_read = 0

    def round(self, turns: Sequence[str], cores: CoreShares) -> Round:
        with ExitStack() as stack:
            for name in dict.fromkeys(turns):
                with on_cores(cores.router):
                    stack.enter_context(self._routers[name])
            for name in self._routers:
                self._turn(name, LOADS["32"])
            self._local_share()
            figures: dict[str, dict[str, LoadFigures]] = {name: {} for name in self._routers}
            local_shares = {}
            for load, kind in LOADS.items():
                counted: dict[str, list[Counted]] = {name: [] for name in self._routers}
                for name in turns:
                    counted[name].append(self._turn(name, kind))
                for name, parts in counted.items():
                    figures[name][load] = LoadFigures.of(parts)
                local_shares[load] = self._local_share()
            firsts = self._runner.run(self._first_events())
            local_shares["first_event"] = self._local_share()
            sides = {
                name: Side(figures[name], firsts[name], process_cost(router.pid).peak_memory_bytes)
                for name, router in self._routers.items()
            }
        return Round(tuple(turns), sides["rutter"], sides["peer"], firsts["direct"], local_shares)

    def _turn(self, name: str, kind: StreamKind) -> Counted:
        router = self._routers[name]

        async def load() -> Counted:
            async with StreamLoad(router.url, self._sizes.streams, kind) as streams:
                return await streams.run(self._sizes.warm_s, self._sizes.turn_s, lambda: process_cost(router.pid).cpu_s)

        with collector_off():
            return self._runner.run(load())

    async def _first_events(self) -> dict[str, float]:
        """Median time to the first event, of one stream at a time by every way in turns."""
        urls = {name: router.url for name, router in self._routers.items()} | {"direct": self._engine_url}
        times_s: dict[str, list[float]] = {name: [] for name in urls}
        async with AsyncExitStack() as stack:
            loads = {
                name: await stack.enter_async_context(StreamLoad(url, 1, FIRST_EVENT)) for name, url in urls.items()
            }
            for _ in range(self._sizes.first_events):
                for name, load in loads.items():
                    times_s[name].append(await load.first_event_s())
        return {name: median(values) for name, values in times_s.items()}

    def _local_share(self) -> float:
        """Of Rutter's requests since the last call, those that were served with one leg."""
        rows = list(JournalReader([self._rutter.journal]))[self._rows_read :]
        self._rows_read += len(rows)
        failed = [row for row in rows if row.status != "ok"]
        if failed or not rows:
            raise RunError(f"the router's journal has {len(failed)} of {len(rows)} rows that are not ok")
        return sum(row.executed != "remote" for row in rows) / len(rows)


def _conditions(sizes: Sizes, artifact_path: Path, program: Path) -> Conditions:
    loaded = artifact.load(artifact_path)
    return Conditions(
        peer=peer_version(program),
        policy=sizes.policy,
        artifact=str(artifact_path),
        artifact_digest=loaded.digest(),
        engines=f"{PREFILL_ENGINES}P+{DECODE_ENGINES}D",
        events_a_write=sizes.events_a_write,
        streams=sizes.streams,
        prompt_bytes=LOADS["256"].prompt_bytes,
        paced_event_s=LOADS["paced"].pace_s,
        turn_s=sizes.turn_s,
        first_events=sizes.first_events,
        rounds=sizes.rounds,
        cores=str(core_shares()),
    )
