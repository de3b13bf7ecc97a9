"""Access: who may ask for what on the public port, and what the engines are told of it."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from serve_table.api_keys import KeySet, read_keys
from serve_table.endpoints import Endpoint
from serve_table.engine_response import Headers
from serve_table.errors import ConfigError
from serve_table.request_body import CACHE_SALT_FIELD, Fields
from serve_table.tenant_salts import TenantSalts
from serve_table.tenants import tenant_identity


@dataclass(frozen=True)
class Access:
    """api_keys: None where anybody may ask. engine_key: what the router itself shows to engines; None for nothing.
    tenant_salts: None where clients choose the salts of their prompts.
    """

    api_keys: KeySet | None = None
    engine_key: bytes | None = field(default=None, repr=False)
    tenant_salts: TenantSalts | None = None

    @property
    def passes_authorization(self) -> bool:
        """Whether engines see the clients' keys: only where those are the engines' own."""
        return self.api_keys is None and self.engine_key is None

    def check(self, endpoint: Endpoint | None, headers: Headers) -> None:
        """RequestError (401) where a key is needed and this is none. endpoint: None for a path that is not there."""
        is_open = endpoint is not None and endpoint.kind in ("health", "ready")
        if self.api_keys is not None and not is_open:
            self.api_keys.check(headers)

    def set_salt(self, fields: Fields, headers: Headers, by_own_header: bool) -> None:
        """Give a body the salt of its tenant, whatever the client wrote, where tenants have salts."""
        if self.tenant_salts is not None:
            salt = self.tenant_salts.of(tenant_identity(headers, by_own_header))
            fields[CACHE_SALT_FIELD] = msgspec.Raw(msgspec.json.encode(salt))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--api-keys", type=Path, metavar="FILE", help="keys of the clients, one a line; without it anybody may ask")
    add("--engine-key", type=Path, metavar="FILE", help="key that engines are shown in place of the client's")
    told = "replace cache_salt by one of the client's tenant; FILE: a secret, so that salts outlive a restart"
    add("--tenant-salts", type=Path, nargs="?", const=Path(), metavar="FILE", help=told)


def from_arguments(args: argparse.Namespace) -> Access:
    """Raises ConfigError for files that cannot be used and flags that do not go together."""
    engine_keys = None if args.engine_key is None else read_keys("--engine-key", args.engine_key)
    if engine_keys is not None and len(engine_keys) > 1:
        raise ConfigError(f"--engine-key {args.engine_key} has {len(engine_keys)} keys: engines are shown one")
    if args.tenant_salts is not None and args.api_keys is None and not args.tenant_header:
        raise ConfigError("--tenant-salts: nobody says who the tenants are; give --api-keys or --tenant-header as well")
    salts = None
    if args.tenant_salts is not None:
        salts = TenantSalts.lasting(args.tenant_salts) if args.tenant_salts != Path() else TenantSalts.passing()
    return Access(
        api_keys=None if args.api_keys is None else KeySet(read_keys("--api-keys", args.api_keys)),
        engine_key=None if engine_keys is None else engine_keys[0],
        tenant_salts=salts,
    )
