"""`rutter serve`: the router's flags, and what they make."""

import argparse
import contextlib
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve_table import access
from serve_table import calibration as calibration_file
from serve_table.admin import Admin, is_loopback
from serve_table.api_keys import KeySet, read_keys
from serve_table.artifact import Artifact, load
from serve_table.calibration import Calibration
from serve_table.context import CLUSTER_KINDS, RouterConfig, RouterContext
from serve_table.engine_response import EngineTimeouts
from serve_table.errors import ConfigError
from serve_table.features import FileTokenizer
from serve_table.health import ProbePolicy
from serve_table.http_servers import RouterServers, listening_socket, url_of
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
    access.add_arguments(parser)
    add(
        "--admin-port",
        type=int,
        help="port of /metrics and all else for operators, 0 a free one; closed without it",
    )
    add("--admin-host", default="127.0.0.1", help="address of the admin port")
    add("--admin-keys", type=Path, metavar="FILE", help="keys that open it, one a line; needed where not on loopback")
    add("--exit-with-stdin", action="store_true", help="end in good order when standard input closes, as by a starter")
    add("--log-level", default="warning", help=", ".join(LOG_LEVELS))


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; 0 after a clean end. Raises RutterError where it cannot start, ConfigError for flags."""
    return serve(build_router(args), args)


def build_router(args: argparse.Namespace) -> Router:
    """The router of these flags. Raises ConfigError, ArtifactError and JournalError."""
    if args.log_level not in LOG_LEVELS:
        raise ConfigError(f"--log-level {args.log_level!r}: known are {', '.join(LOG_LEVELS)}")
    for flag, port in (("--port", args.port), ("--admin-port", args.admin_port or 0)):
        if not 0 <= port <= 65535:
            raise ConfigError(f"{flag} {port} must be from 0 to 65535")
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
        access.from_arguments(args),
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


def serve(router: Router, args: argparse.Namespace) -> int:
    """Serve on the ports asked for until a signal, then let open streams finish."""
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # Faults of a request are counted and journaled; uvicorn's own lines would repeat them with a stack.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    admin = admin_application(router.context, args)
    config = router.context.config
    with contextlib.ExitStack() as open_sockets:
        listener = open_sockets.enter_context(listening_socket(args.host, args.port))
        lines = [
            f"{url_of(listener)} policy {router.context.policy.name}, "
            f"{len(config.prefill_urls)} prefill and {len(config.decode_urls)} decode engines"
        ]
        servers = RouterServers(router, listener, args.drain_s)
        if admin is not None:
            admin_listener = listening_socket(args.admin_host, args.admin_port, "--admin-port")
            servers.add_admin(admin, open_sockets.enter_context(admin_listener))
            lines.append(f"admin port {url_of(admin_listener)}")
        sys.stdout.write("".join(f"rutter serve: {line}\n" for line in lines))
        sys.stdout.flush()
        servers.run(args.exit_with_stdin)
    return 0


def admin_application(context: RouterContext, args: argparse.Namespace) -> Admin | None:
    """None where --admin-port opens none. Raises ConfigError where others could reach it without a key."""
    if args.admin_port is None:
        if args.admin_keys is not None:
            raise ConfigError("--admin-keys says who may use the admin port: open it with --admin-port")
        return None
    if args.admin_keys is not None:
        return Admin(context, KeySet(read_keys("--admin-keys", args.admin_keys)))
    if not is_loopback(args.admin_host):
        raise ConfigError(f"--admin-host {args.admin_host} can be reached from elsewhere: give --admin-keys")
    return Admin(context, None)
