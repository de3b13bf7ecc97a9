"""The engines of a cluster as a command line names them: by the cluster's name, or by URLs."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from pipelines.cluster_state import CLUSTERS_FOLDER, known_clusters, read_state
from serve_table.errors import ClusterError, ConfigError


@dataclass(frozen=True)
class EngineUrls:
    """Where a cluster's engines are. kind, model, name: None where the command line alone names the engines."""

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    kind: str | None = None
    model: str | None = None
    name: str | None = None


def add_url_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `engine_urls`."""
    add = parser.add_argument
    add("cluster", nargs="?", help="name of a cluster that `rutter cluster up` started; not needed where it is alone")
    add("--prefill-url", action="extend", nargs="+", default=[], metavar="URL", help="an existing cluster's engines")
    add("--decode-url", action="extend", nargs="+", default=[], metavar="URL", help="an existing cluster's engines")


def engine_urls(args: argparse.Namespace, root: Path = CLUSTERS_FOLDER) -> EngineUrls:
    """The engines of the flags; ConfigError where they name none, ClusterError where the cluster is not there."""
    if args.prefill_url or args.decode_url:
        if args.cluster is not None:
            raise ConfigError(f"name the cluster {args.cluster!r} or its engines' URLs, not both")
        if not args.decode_url:
            raise ConfigError("--decode-url is missing: a cluster needs at least one decode engine")
        for url in (*args.prefill_url, *args.decode_url):
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{url!r} is no URL: http://HOST:PORT is")
        return EngineUrls(tuple(args.prefill_url), tuple(args.decode_url))
    return named_cluster(args.cluster, root)


def named_cluster(name: str | None, root: Path = CLUSTERS_FOLDER) -> EngineUrls:
    """The engines of a cluster that was started here; None names the only one."""
    names = known_clusters(root)
    if name is None:
        if not names:
            raise ConfigError("no cluster is running: start one with `rutter cluster up`, or give --decode-url")
        if len(names) > 1:
            raise ConfigError(f"several clusters are known, name one: {', '.join(names)}")
        name = names[0]
    state = read_state(root / name) if name in names else None
    if state is None:
        known = f"known are {', '.join(names)}" if names else "none is"
        raise ClusterError(f"no cluster {name!r} is running: {known}")
    if not state.ready:
        raise ClusterError(f"cluster {name!r} is not ready: wait for its `rutter cluster up`")
    urls = {role: tuple(e.url for e in state.engines if e.role == role) for role in ("prefill", "decode")}
    return EngineUrls(urls["prefill"], urls["decode"], kind=state.kind, model=state.model, name=name)
