"""What one emulated engine process is told: a strict JSON file in its run folder."""

from pathlib import Path

import msgspec

from serve_table.errors import ConfigError
from serve_table.step_time import HardwareProfile

DEFAULT_LEASE_S = 30.0
"""Engine seconds for which a prefill leg's KV is held: NixlConnector's default."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """lease_s: engine seconds, stretched by the dilation like all its times. port: where its socket listens."""

    name: str
    role: str
    host: str
    port: int
    model: str
    profile: HardwareProfile
    dilation: float = 1.0
    lease_s: float = DEFAULT_LEASE_S

    def __post_init__(self) -> None:
        if not 0.0 < self.dilation < float("inf"):
            raise ConfigError(f"dilation is {self.dilation}: must be above 0")
        if not 0.0 < self.lease_s < float("inf"):
            raise ConfigError(f"lease is {self.lease_s} s: must be above 0")
        if self.profile.kv_tokens < self.profile.block_tokens * 2:
            raise ConfigError(f"KV of {self.profile.kv_tokens} tokens holds no request: give at least two blocks")

    @property
    def max_model_len_tokens(self) -> int:
        """Longest request, prompt and answer; never more than the whole KV holds, or it could not run at all."""
        block = self.profile.block_tokens
        return min(self.profile.max_model_len_tokens, self.profile.kv_tokens // block * block)


def write_config(config: EngineConfig, path: Path) -> None:
    """Write a configuration; a file under its name is always whole."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
    part.replace(path)


def read_config(path: Path) -> EngineConfig:
    """The configuration in a file; ConfigError where it is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: no engine configuration: {error}") from error
