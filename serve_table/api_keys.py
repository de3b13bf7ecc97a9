"""Keys: who may ask, read from files and compared in constant time."""

import hashlib
import hmac
from pathlib import Path

from serve_table.engine_response import Headers
from serve_table.errors import ConfigError, RequestError

_VISIBLE = frozenset(range(0x21, 0x7F))


class KeySet:
    """The keys that open one port. Only their digests are kept."""

    def __init__(self, keys: list[bytes]) -> None:
        self._digests = [_digest(key) for key in keys]

    def knows(self, key: bytes) -> bool:
        """Every key is compared, and as long as all others, so that the time tells nothing."""
        given = _digest(key)
        known = False
        for digest in self._digests:
            known |= hmac.compare_digest(given, digest)
        return known

    def check(self, headers: Headers) -> bytes:
        """The key that a request bears; RequestError (401) where that is none of these."""
        key = bearer_key(headers)
        if key is None:
            raise _refusal("a key is needed: send Authorization: Bearer KEY")
        if not self.knows(key):
            raise _refusal("the key in Authorization is not known")
        return key


def read_keys(flag: str, path: Path) -> list[bytes]:
    """The keys of a file, one a line; blank lines and lines that begin with # are left out.

    Raises ConfigError where it cannot be read, has none, or a line is no key. Says where, never what it says there.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if not _VISIBLE.issuperset(key):
            raise ConfigError(f"{flag} {path}, line {number}: a key is one word of visible ASCII characters")
        keys.append(key)
    if not keys:
        raise ConfigError(f"{flag} {path} has no key: write one a line")
    return keys


def bearer_key(headers: Headers) -> bytes | None:
    """The key in `Authorization: Bearer KEY`; None where there is none, or more than one."""
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].partition(b" ")
    return key.strip() or None if scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(message: str) -> RequestError:
    return RequestError(401, message, ((b"www-authenticate", b"Bearer"),))
