"""A decode engine's side of the hand-off: claims and releases at the prefill engines, on this machine only."""

import ipaddress
from collections import OrderedDict

import msgspec

from pipelines.emulated.kv_handles import Claim, Release
from serve_table.engine_client import EngineClient
from serve_table.engine_response import EngineTimeouts
from serve_table.errors import EngineError

MAX_PEERS = 64
TIMEOUTS = EngineTimeouts(connect_s=2.0, first_byte_s=5.0, gap_s=5.0)
CLAIM_PATH = "/emulated/kv/claim"
RELEASE_PATH = "/emulated/kv/release"
JSON_HEADERS = [(b"content-type", b"application/json")]


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its address; a name is not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class KvPeers:
    """The prefill engines that handles have named so far."""

    def __init__(self) -> None:
        self._clients: OrderedDict[tuple[str, int], EngineClient] = OrderedDict()

    async def claim(self, host: str, port: int, claim: Claim) -> str | None:
        """Use a handle at its prefill engine; the reason where that fails."""
        if not is_loopback(host):
            return f"{host} is no loopback address: emulated engines hand over on one machine only"
        try:
            return await self._post(host, port, CLAIM_PATH, msgspec.json.encode(claim))
        except EngineError as error:
            return str(error)

    async def release(self, host: str, port: int, release: Release) -> None:
        """Let the prefill engine free a handle's blocks; one that is gone needs no telling."""
        if not is_loopback(host):
            return
        try:
            await self._post(host, port, RELEASE_PATH, msgspec.json.encode(release))
        except EngineError:
            return

    def close(self) -> None:
        """Close the idle connections."""
        for client in self._clients.values():
            client.close()

    async def _post(self, host: str, port: int, path: str, body: bytes) -> str | None:
        response = await self._client(host, port).request("POST", path, JSON_HEADERS, body, TIMEOUTS)
        try:
            answer = await response.body()
        finally:
            response.close()
        return None if response.status == 200 else answer.decode("utf-8", errors="replace")

    def _client(self, host: str, port: int) -> EngineClient:
        key = (host, port)
        if key not in self._clients:
            address = f"[{host}]" if ":" in host else host
            self._clients[key] = EngineClient(f"http://{address}:{port}", TIMEOUTS)
            if len(self._clients) > MAX_PEERS:
                self._clients.popitem(last=False)[1].close()
        self._clients.move_to_end(key)
        return self._clients[key]
