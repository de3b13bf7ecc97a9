"""The start of one vLLM engine process, noted so that the same engine can be started again."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipelines.cluster_state import EngineRecord
from pipelines.engine_process import EngineProcess, start_process
from pipelines.vllm_cpu.engine_flags import EnginePorts, engine_environment
from serve_table.artifact import write_atomically
from serve_table.errors import ClusterError

MODULE = "pipelines.vllm_cpu.engine_main"


class EngineStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command line, and what its environment has beside ours."""

    words: list[str]
    environment: dict[str, str]


def start_engine(
    record: EngineRecord, python: Path, flags: Sequence[str], ports: EnginePorts, folder: Path
) -> EngineProcess:
    """Start an engine and note in `folder` how."""
    start = EngineStart([str(python), "-m", MODULE, *flags], engine_environment(ports))
    write_atomically(_note_of(record, folder), msgspec.json.format(msgspec.json.encode(start), indent=2))
    return start_process(record, start.words, start.environment)


def start_again(record: EngineRecord, folder: Path) -> EngineProcess:
    """Start an engine as it was started before, on the same ports. ClusterError where its note is gone."""
    path = _note_of(record, folder)
    try:
        start = msgspec.json.decode(path.read_bytes(), type=EngineStart)
    except (OSError, msgspec.DecodeError) as error:
        raise ClusterError(f"{path} does not say how {record.name} was started: {error}") from error
    return start_process(msgspec.structs.replace(record, children=[]), start.words, start.environment)


def _note_of(record: EngineRecord, folder: Path) -> Path:
    return folder / f"{record.name}.json"
