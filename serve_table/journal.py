"""The journal: one row a request, appended as JSON lines in segments.

A row describes what the decision saw and what really happened. It never holds prompt text: prefixes are
salted block hashes. Durations are seconds of engine time: measured with a monotonic clock, then divided by
the cluster's dilation. A torn last line is what a crash leaves and is tolerated; every broken line is counted
with its file and place.
"""

import os
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

import msgspec

from serve_table.errors import JournalError

FORMAT_VERSION = 1

Status = Literal["ok", "aborted", "empty", "client_error", "upstream_error", "timeout", "unavailable"]
ExecutedPath = Literal["local", "remote", "whole"]


class FleetRow(msgspec.Struct, frozen=True):
    """`serve_table.situation.Fleet` and the engines' cached tokens, as the decision saw them. In an elastic fleet the
    decode columns are longer than the row's decode engines by its prefill engines.
    """

    prefill_requests: list[float]
    prefill_tokens: list[float]
    prefill_up: list[float]
    decode_requests: list[float]
    decode_tokens: list[float]
    decode_prefill_tokens: list[float]
    decode_up: list[float]
    prefill_cached_tokens: list[float]
    decode_cached_tokens: list[float]


class ResidentsRow(msgspec.Struct, frozen=True):
    """`serve_table.harm.Residents` as a decision of the price saw them."""

    now_s: float
    prefill_since_s: MutableSequence[float]
    shares: MutableSequence[float]
    constants: Sequence[float] = ()
    """The price's as they were estimated then; empty in older rows, which were decided by the policy's own."""
    prefilled_tokens: MutableSequence[float] = msgspec.field(default_factory=list)
    """Empty where the fleet is not elastic."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Missing is null. Times in seconds of engine time unless named otherwise.

    time: wall clock, Unix seconds, for people only. arrival_s: monotonic, since this router started.
    e2e_s: arrival to the last byte. prefill_leg_s: time of the prefill leg. handoff_age_s: prefill answer to the
    decode request's first byte sent. slo_met: null where no target applies. Engines are named as given.
    """

    version: int
    request_id: str
    client_id: str | None
    time: float
    arrival_s: float
    endpoint: str
    stream: bool
    cluster_kind: str
    dilation: float

    policy: str
    policy_digest: str
    explore: float
    rotation: int
    draws: list[float]
    prompt_tokens: float
    prompt_tokens_source: Literal["ids", "tokenizer", "bytes"]
    predicted_output_tokens: float
    slo_class: int
    remote_allowed: bool
    prefix_hashes: list[int]
    hash_block_tokens: int
    prefill_engines: list[str]
    decode_engines: list[str]
    fleet: FleetRow | None
    """null where no decision was made: no decode engine was up, or the body was refused."""

    action: ExecutedPath | None
    """whole: prefilled and decoded on a prefill engine, which is then the decode engine of this row."""
    prefill_engine: str | None
    decode_engine: str | None
    cluster: int | None
    regime: int | None
    propensity: float | None
    reason: str | None

    executed: ExecutedPath | None
    """null where no engine was asked for tokens."""
    executed_prefill_engine: str | None
    executed_decode_engine: str | None
    fallback_reason: str | None
    attempts: int

    status: Status
    http_status: int | None
    finish_reason: str | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    prefill_leg_s: float | None
    handoff_age_s: float | None
    usage_prompt_tokens: int | None
    output_tokens: int | None
    output_tokens_source: Literal["usage", "events"] | None
    cached_tokens: int | None
    """From the leg that prefilled."""
    ttft_target_s: float | None
    tpot_target_s: float | None
    slo_met: bool | None

    cached_tokens_source: Literal["events", "index", "mixed"] | None = None
    """Where `fleet`'s cached tokens are from: KV events, the router's own index, or both; null in older rows."""
    residents: ResidentsRow | None = None
    """null where the policy does not decide by them."""
    waited_s: float | None = None
    """How long the request had been held in the router at the decision that stands; null where it never was."""
    held_ahead_tokens: float | None = None
    """Uncached prompt tokens of held requests that were to go before it at that decision; null without one."""


class JournalWriter:
    """Appends rows to segments `NAME-NNNNNN.jsonl` in a folder, a new segment after `segment_bytes`.

    A row is one `write` of a whole line. `append` raises JournalError when the disk refuses; the caller counts
    it and goes on serving: after a failed write the next row starts a new segment, so that a torn line stays
    the last of its segment.
    """

    def __init__(self, folder: Path, name: str = "journal", segment_bytes: int = 64 * 2**20) -> None:
        self.folder = folder
        self.name = name
        self.segment_bytes = segment_bytes
        self._encoder = msgspec.json.Encoder()
        self._file: IO[bytes] | None = None
        self._written_bytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JournalError(f"cannot create the journal folder {folder}: {error.strerror}") from error

    def append(self, row: Row) -> None:
        line = self._encoder.encode(row) + b"\n"
        try:
            file = self._file
            if file is None or self._written_bytes + len(line) > self.segment_bytes:
                file = self._open_next_segment()
            self._written_bytes += len(line)
            if file.write(line) != len(line):
                raise OSError(28, "No space left on device")
        except OSError as error:
            self.close()
            raise JournalError(f"cannot write the journal in {self.folder}: {error.strerror}") from error

    def _open_next_segment(self) -> IO[bytes]:
        self.close()
        numbers = [segment_number(path) for path in self.folder.glob(f"{self.name}-*.jsonl")]
        path = self.folder / f"{self.name}-{max(numbers, default=0) + 1:06d}.jsonl"
        # Unbuffered and exclusive: each row reaches the kernel whole, and two routers never share a segment.
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by `close`
        self._written_bytes = 0
        return self._file

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def segment_number(path: Path) -> int:
    """NNNNNN of a segment's name; 0 where the name has no number."""
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


@dataclass
class BrokenLine:
    """Where a journal line could not be used, and why."""

    path: Path
    offset_bytes: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path} at byte {self.offset_bytes}: {self.reason}"


@dataclass
class JournalReader:
    """Reads rows from files and folders of segments; broken lines are kept in `broken`, never guessed at.

    strict: raise JournalError at the first broken line instead.
    """

    paths: list[Path]
    strict: bool = False
    broken: list[BrokenLine] = field(default_factory=list)

    def segments(self) -> list[Path]:
        found: list[Path] = []
        for path in self.paths:
            if path.is_dir():
                found.extend(sorted(path.glob("*.jsonl")))
            elif path.is_file():
                found.append(path)
            else:
                raise JournalError(f"no journal at {path}: give a folder of .jsonl segments or one such file")
        return found

    def __iter__(self) -> Iterator[Row]:
        decoder = msgspec.json.Decoder(Row)
        for path in self.segments():
            offset_bytes = 0
            with open(path, "rb") as file:
                for line in file:
                    row = self._decode(decoder, path, offset_bytes, line)
                    offset_bytes += len(line)
                    if row is not None:
                        yield row

    def _decode(self, decoder: "msgspec.json.Decoder[Row]", path: Path, offset_bytes: int, line: bytes) -> Row | None:
        stripped = line.strip(b"\x00\r\n ")
        try:
            if not stripped:
                if line.strip(b"\r\n ") == b"":
                    return None
                raise msgspec.DecodeError("only NUL bytes, as a crash leaves them")
            row = decoder.decode(stripped)
            if row.version != FORMAT_VERSION:
                raise msgspec.DecodeError(f"row format {row.version}, this program reads {FORMAT_VERSION}")
            return row
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            broken = BrokenLine(path, offset_bytes, str(error))
            if self.strict:
                raise JournalError(f"{broken}; run without --strict to skip broken lines") from error
            self.broken.append(broken)
            return None


def free_bytes(folder: Path) -> int:
    """Free space where a journal is written."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
