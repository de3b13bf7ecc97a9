"""`rutter serve`: the router's flags, its socket, its signals."""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from serve_table import calibration as calibration_file
from serve_table.artifact import Artifact, load
from serve_table.calibration import Calibration
from serve_table.context import CLUSTER_KINDS, RouterConfig, RouterContext
from serve_table.engine_response import EngineTimeouts
from serve_table.errors import ConfigError, RutterError
from serve_table.features import FileTokenizer
from serve_table.health import ProbePolicy
from serve_table.policy import POLICIES, policy
from serve_table.predictor import constant_predictor
from serve_table.price_params import price_constants
from serve_table.router import Router
from serve_table.slo import CLASS_NAMES, SloTargets, targets_from_profile
from serve_table.step_time import HardwareProfile, hardware_profile

LOG_LEVELS = ("debug", "info", "warning", "error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `rutter serve`."""
    default = RouterConfig((), ("http://127.0.0.1:1",))
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    add("--prefill", action="extend", nargs="+", default=[], metavar="URL", help="prefill engines")
    add("--decode", action="extend", nargs="+", default=[], metavar="URL", help="decode engines")
    endpoint = "TCP[,TCP]"
    events = "of each engine in the same order, and its replay endpoint; - for none"
    add("--prefill-kv-events", action="extend", nargs="+", default=[], metavar=endpoint, help=f"KV events {events}")
    add("--decode-kv-events", action="extend", nargs="+", default=[], metavar=endpoint, help=f"KV events {events}")
    add("--policy", default="round_robin", help=f"one of {', '.join(POLICIES)}")
    add("--policy-params", metavar="JSON", help="object of parameters that replace the policy's defaults")
    add("--artifact", type=Path, metavar="FILE", help="table, length predictor and SLO targets made by rutter export")
    add("--explore", type=float, default=0.0, metavar="P", help="share of requests that choose at random")
    add("--seed", type=int, default=0, help="seed of the random draws")
    add("--journal", type=Path, metavar="FOLDER", help="write one row a request here")
    add("--cluster-kind", default="existing", help=f"what the engines are: {', '.join(CLUSTER_KINDS)}")
    add("--dilation", type=float, default=1.0, help="journaled durations are divided by it")
    add("--hardware", default="a40-3b", help="profile that sets the SLO targets where nothing else does")
    add("--calibration", type=Path, metavar="FILE", help="sets the SLO targets where no artifact does")
    add("--default-slo-class", default="loose", help=f"{' or '.join(CLASS_NAMES)}; header x-rutter-slo-class overrides")
    add("--tokenizer", type=Path, metavar="PATH", help="tokenizer.json, or its folder, for exact prompt lengths")
    add("--connect-timeout-s", type=float, default=default.timeouts.connect_s)
    add("--first-byte-timeout-s", type=float, default=default.timeouts.first_byte_s, help="of each leg")
    add("--gap-timeout-s", type=float, default=default.timeouts.gap_s, help="between two reads of an answer")
    add("--probe-interval-s", type=float, default=default.probes.interval_s, help="of engines that are down")
    add("--drain-s", type=int, default=30, help="how long open streams may go on after SIGTERM or SIGINT")
    add("--max-body-bytes", type=int, default=default.max_body_bytes)
    add("--hash-block-tokens", type=int, default=default.hash_block_tokens, help="block of the prefix index")
    add("--kv-tokens", type=int, help="KV budget of one engine; default: that of --hardware")
    add(
        "--max-hold-s", type=float, default=default.max_hold_s, help="longest hold of a request, where the policy holds"
    )
    add("--tenant-header", action="store_true", help="held requests take turns by x-rutter-tenant, not Authorization")
    add("--elastic", action="store_true", help="prefill engines may serve whole requests (vLLM's kv_both); price only")
    add("--allow-admin", action="store_true", help="let clients call /reset_prefix_cache")
    add("--exit-with-stdin", action="store_true", help="end in good order when standard input closes, as by a starter")
    add("--log-level", default="warning", help=", ".join(LOG_LEVELS))


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; 0 after a clean end. Raises RutterError where it cannot start, ConfigError for flags."""
    router = build_router(args)
    with listening_socket(args.host, args.port) as listener:
        return serve(router, listener, args)


def build_router(args: argparse.Namespace) -> Router:
    """The router of these flags. Raises ConfigError, ArtifactError and JournalError."""
    if args.log_level not in LOG_LEVELS:
        raise ConfigError(f"--log-level {args.log_level!r}: known are {', '.join(LOG_LEVELS)}")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port} must be from 0 to 65535")
    if args.drain_s < 0:
        raise ConfigError(f"--drain-s {args.drain_s} must be at least 0")
    profile = hardware_profile(args.hardware)
    config = RouterConfig(
        prefill_urls=tuple(url.rstrip("/") for url in args.prefill),
        decode_urls=tuple(url.rstrip("/") for url in args.decode),
        explore=args.explore,
        seed=args.seed,
        cluster_kind=args.cluster_kind,
        dilation=args.dilation,
        default_slo_class=SloTargets.index(args.default_slo_class),
        timeouts=EngineTimeouts(args.connect_timeout_s, args.first_byte_timeout_s, args.gap_timeout_s),
        probes=ProbePolicy(args.probe_interval_s),
        max_body_bytes=args.max_body_bytes,
        hash_block_tokens=args.hash_block_tokens,
        kv_tokens=profile.kv_tokens if args.kv_tokens is None else args.kv_tokens,
        allow_admin=args.allow_admin,
        prefill_kv_events=tuple(args.prefill_kv_events),
        decode_kv_events=tuple(args.decode_kv_events),
        max_hold_s=args.max_hold_s,
        tenant_header=args.tenant_header,
        elastic=args.elastic,
    )
    artifact: Artifact | None = load(args.artifact) if args.artifact is not None else None
    # A calibration is refused if it is damaged, whether it is needed or not.
    calibration = None if args.calibration is None else calibration_file.load(args.calibration)
    slo = slo_targets(artifact, calibration, profile)
    params = parse_params(args.policy_params)
    if args.policy == "price" and artifact is None:
        params = {**constants_of_price(calibration, profile, slo), "kv_tokens": config.kv_tokens, **params}
    context = RouterContext(
        config,
        policy(args.policy, params, artifact),
        artifact.predictor() if artifact is not None else constant_predictor(),
        slo,
        args.journal,
        FileTokenizer(args.tokenizer) if args.tokenizer is not None else None,
    )
    return Router(context)


def slo_targets(artifact: Artifact | None, calibration: Calibration | None, profile: HardwareProfile) -> SloTargets:
    """The artifact's, else the calibration's, else the profile's."""
    measured = artifact or calibration
    return targets_from_profile(profile) if measured is None else measured.slo_targets()


def constants_of_price(calibration: Calibration | None, profile: HardwareProfile, slo: SloTargets) -> dict[str, float]:
    """The price's constants without an artifact: the calibration's, else the profile's."""
    if calibration is None:
        return price_constants(profile, slo)
    fitted = replace(profile, step=calibration.step_time(), handoff=calibration.handoff())
    return price_constants(fitted, slo, calibration.overhead_s)


def parse_params(text: str | None) -> dict[str, Any]:
    """The object given as --policy-params."""
    if text is None:
        return {}
    try:
        params = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--policy-params is not JSON: {error}") from error
    if not isinstance(params, dict):
        raise ConfigError('--policy-params must be a JSON object, as {"threshold_tokens": 256}')
    return params


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound socket. Raises RutterError where the address is in use or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, a head and its body, or two
    # events, are 40 ms apart.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise RutterError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return listener


class _Server(uvicorn.Server):
    """A uvicorn server that ends on a signal instead of raising it again once it has ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def uvicorn_config(router: Router, drain_s: int) -> uvicorn.Config:
    """How uvicorn serves a router: the engines' own headers, nothing logged, nothing in between."""
    return uvicorn.Config(
        router,
        http="httptools",
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=drain_s,
    )


def serve(router: Router, listener: socket.socket, args: argparse.Namespace) -> int:
    """Serve on a bound socket until a signal, then let open streams finish."""
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # Faults of a request are counted and journaled; uvicorn's own lines would repeat them with a stack.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    host, port = listener.getsockname()[:2]
    config = router.context.config
    shown = f"[{host}]" if ":" in host else host
    sys.stdout.write(
        f"rutter serve: http://{shown}:{port} policy {router.context.policy.name}, "
        f"{len(config.prefill_urls)} prefill and {len(config.decode_urls)} decode engines\n"
    )
    sys.stdout.flush()
    server = _Server(uvicorn_config(router, args.drain_s))
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(serve_until_told(server, listener, args.exit_with_stdin))
    return 0


async def serve_until_told(server: uvicorn.Server, listener: socket.socket, exit_with_stdin: bool) -> None:
    """Serve until a signal or, where asked for, until nobody holds the other end of standard input."""
    loop = asyncio.get_running_loop()
    stdin = sys.stdin.fileno() if exit_with_stdin else -1

    def readable() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            server.handle_exit(signal.SIGTERM, None)

    if exit_with_stdin:
        try:
            loop.add_reader(stdin, readable)
        except OSError as error:
            raise ConfigError("--exit-with-stdin: standard input must be a pipe, a socket or a terminal") from error
    await server.serve(sockets=[listener])


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
