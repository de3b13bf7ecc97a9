"""Tenants' cache salts: prompts of two tenants never share cached blocks, on engines or in the router's own index."""

import hashlib
import hmac
import secrets
from pathlib import Path

from serve_table.errors import ConfigError

MIN_SECRET_BYTES = 16


class TenantSalts:
    """One salt a tenant, which nobody can tell who has not the secret, the tenant itself included."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @staticmethod
    def passing() -> "TenantSalts":
        """Of a secret that ends with this router: what engines have cached is not found again after it."""
        return TenantSalts(secrets.token_bytes(32))

    @staticmethod
    def lasting(path: Path) -> "TenantSalts":
        """Of the secret in a file, which several routers may share. Raises ConfigError where it is none."""
        try:
            secret = path.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--tenant-salts {path}: {error.strerror}") from error
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"--tenant-salts {path}: a secret has at least {MIN_SECRET_BYTES} bytes")
        return TenantSalts(secret)

    def of(self, identity: bytes) -> str:
        """The salt of the tenant of this identity."""
        return hmac.new(self._secret, identity, hashlib.sha256).hexdigest()
