"""Resumable stages: what a run folder has done already, with which configuration, and whether it still stands.

A run folder holds `state.json`, a lock, and one folder for each stage and configuration (`collect-1f0c9a2b`), so
a changed configuration starts anew without touching what another one made. A stage goes

    run = run_from(args)
    with run.lock():
        stage = run.begin("collect", config)
        if stage.record is not None:
            ...                          # done already: say so and end
        ...                              # work in stage.folder, continuing what a killed run left there
        run.finish("collect", config, {"journal": stage.folder / "journal"})

How a killed stage continues is the stage's own affair: its folder is as the kill left it.
"""

import argparse
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelines.path_digest import digest_of_path, size_of
from serve_table.artifact import write_atomically
from serve_table.errors import ArtifactError, ConfigError, RunError

STATE_VERSION = 1
RUNS_FOLDER = Path("build/runs")


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file or folder that a stage made. path: relative to the run folder where it lies inside, else absolute.

    digest: of the file's bytes, or of a folder's file names and bytes.
    """

    path: str
    size_bytes: int
    digest: str


class StageRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage under one configuration. config: canonical JSON text. finished_time: Unix time, null until done."""

    config: str
    finished_time: float | None = None
    outputs: dict[str, Output] = {}


class StageState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Records of a stage by configuration digest; `current` is the one begun or found done last."""

    current: str
    records: dict[str, StageRecord]


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int = STATE_VERSION
    stages: dict[str, StageState] = {}


@dataclass(frozen=True)
class Stage:
    """A stage that was begun. record: not None where it is done. changes: why it is not, though the stage was done
    or begun before: how the configuration differs from the previous one, or which output no longer stands.
    """

    name: str
    folder: Path
    record: StageRecord | None
    changes: tuple[str, ...]


class Run:
    """A run folder. Reading needs no lock; `begin` and `finish` are called inside `lock()`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out of the folder; RunError names the process that is in it.

        The kernel drops the lock with the process that holds it, however that ends: no lock outlives its owner.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RunError(f"cannot use the run folder {self.folder}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise RunError(
                    f"the run folder {self.folder} is in use by process {owner}: wait for it to end, "
                    "or name another folder with --run or --run-dir"
                ) from None
            except OSError as error:
                raise RunError(f"cannot lock the run folder {self.folder}: {error.strerror}") from error
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
            yield
        finally:
            os.close(descriptor)

    def begin(self, name: str, config: Mapping[str, object]) -> Stage:
        """Make this configuration the stage's current one; creates its folder and says whether it is done."""
        text = canonical(config)
        digest = digest_of_config(text)
        state = self._read()
        previous = state.stages.get(name)
        changes: tuple[str, ...] = ()
        records: dict[str, StageRecord] = {}
        if previous is not None:
            records = dict(previous.records)
            changes = differences(records[previous.current].config, text)
        record = self._standing(records.get(digest))
        if record is None and digest in records:
            altered = self._altered(records[digest])
            changes += (altered,) if altered is not None else ()
        folder = self.stage_folder(name, config)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot use the run folder {self.folder}: {error.strerror}") from error
        records[digest] = record or StageRecord(text)
        self._write(state, name, StageState(digest, records))
        return Stage(name, folder, record, changes)

    def done(self, name: str, config: Mapping[str, object]) -> StageRecord | None:
        """The record of this stage and configuration if it is finished and its outputs are as it left them."""
        stage = self._read().stages.get(name)
        return None if stage is None else self._standing(stage.records.get(digest_of_config(canonical(config))))

    def finish(self, name: str, config: Mapping[str, object], outputs: Mapping[str, Path]) -> StageRecord:
        """Record the stage as done with these files and folders, which nothing may write to from now on.

        RunError where one does not exist.
        """
        text = canonical(config)
        record = StageRecord(text, time.time(), {key: self._output(path) for key, path in outputs.items()})
        state = self._read()
        stage = state.stages.get(name)
        digest = digest_of_config(text)
        records = {**(stage.records if stage is not None else {}), digest: record}
        self._write(state, name, StageState(digest, records))
        return record

    def latest(self, name: str) -> StageRecord:
        """The record of the stage's current configuration; RunError where it is missing, unfinished or altered."""
        stage = self._read().stages.get(name)
        if stage is None:
            raise RunError(f"the run in {self.folder} has no {name!r} yet: run `rutter {name}` first")
        record = stage.records[stage.current]
        if record.finished_time is None:
            raise RunError(f"{name!r} is not finished in {self.folder}: run `rutter {name}` again to continue it")
        altered = self._altered(record)
        if altered is not None:
            raise RunError(f"{altered}: run `rutter {name}` again to make it anew")
        return record

    def finished(self, prefix: str) -> list[tuple[str, StageRecord]]:
        """The name and record of every stage of such a name that is finished and unaltered, under any configuration."""
        stages = [(name, stage) for name, stage in self._read().stages.items() if name.startswith(prefix)]
        return [(name, record) for name, stage in stages for record in stage.records.values() if self._standing(record)]

    def output_path(self, record: StageRecord, key: str) -> Path:
        """Where an output of a record lies; RunError where the stage made none of that name."""
        if key not in record.outputs:
            raise RunError(f"the run in {self.folder} recorded no output {key!r}, only {sorted(record.outputs)}")
        return self.folder / record.outputs[key].path

    def stage_folder(self, name: str, config: Mapping[str, object]) -> Path:
        """Where a stage works under this configuration."""
        return self.folder / f"{name}-{digest_of_config(canonical(config))[:8]}"

    def _standing(self, record: StageRecord | None) -> StageRecord | None:
        """The record itself if it is finished and its outputs are unaltered."""
        if record is None or record.finished_time is None or self._altered(record) is not None:
            return None
        return record

    def _altered(self, record: StageRecord) -> str | None:
        """What is wrong with the first output that is missing or not as recorded; None if all stand."""
        for output in record.outputs.values():
            path = self.folder / output.path
            if not path.exists():
                return f"{path} is gone"
            if size_of(path) != output.size_bytes or digest_of_path(path) != output.digest:
                return f"{path} was changed since it was made"
        return None

    def _output(self, path: Path) -> Output:
        if not path.exists():
            raise RunError(f"a stage's output is missing: {path}")
        absolute, inside = path.resolve(), self.folder.resolve()
        name = str(absolute.relative_to(inside)) if absolute.is_relative_to(inside) else str(absolute)
        return Output(name, size_of(path), digest_of_path(path))

    def _read(self) -> State:
        path = self.folder / "state.json"
        try:
            state = msgspec.json.decode(path.read_bytes(), type=State)
        except FileNotFoundError:
            return State()
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise RunError(f"{path} is damaged ({error}): remove it, and the run's stages are made anew") from error
        if state.version != STATE_VERSION:
            raise RunError(f"{path} has format {state.version}, this program reads {STATE_VERSION}: use another run")
        for name, stage in state.stages.items():
            if stage.current not in stage.records:
                raise RunError(f"{path} is damaged ({name!r} lost its record): remove it, and the stages are made anew")
        return state

    def _write(self, state: State, name: str, stage: StageState) -> None:
        content = msgspec.json.encode(State(STATE_VERSION, {**state.stages, name: stage}), order="deterministic")
        try:
            write_atomically(self.folder / "state.json", msgspec.json.format(content, indent=2) + b"\n")
        except ArtifactError as error:
            raise RunError(str(error)) from error


def canonical(config: Mapping[str, object]) -> str:
    """One text for equal configurations; ConfigError for what strict JSON cannot hold. Paths become text."""
    try:
        builtin = msgspec.to_builtins(dict(config), enc_hook=_path_text, str_keys=True)
        return json.dumps(builtin, allow_nan=False, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"a configuration holds only what strict JSON and paths can: {error}") from error


def _path_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"not {type(value).__name__}")


def digest_of_config(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(before: str, after: str) -> tuple[str, ...]:
    """Lines `key: old -> new` for two canonical texts; nested keys are joined with dots."""
    old, new = _flat(json.loads(before)), _flat(json.loads(after))
    keys = sorted(old.keys() | new.keys())
    return tuple(
        f"{key}: {old.get(key, 'not set')} -> {new.get(key, 'not set')}" for key in keys if old.get(key) != new.get(key)
    )


def _flat(config: object, prefix: str = "") -> dict[str, str]:
    if isinstance(config, dict) and config:
        flat: dict[str, str] = {}
        for key, value in config.items():
            flat |= _flat(value, f"{prefix}.{key}" if prefix else key)
        return flat
    return {prefix: json.dumps(config, ensure_ascii=False)}


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """`--run NAME` and `--run-dir FOLDER`, the same for every stage."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--run", default="default", metavar="NAME", help=f"run under {RUNS_FOLDER}/NAME (%(default)s)")
    group.add_argument("--run-dir", type=Path, metavar="FOLDER", help="run folder anywhere, instead of --run")


def run_from(args: argparse.Namespace) -> Run:
    """The run that `add_run_arguments` chose."""
    if args.run_dir is not None:
        return Run(args.run_dir)
    if not args.run or Path(args.run).name != args.run or args.run.startswith("."):
        raise ConfigError(f"--run {args.run!r}: a name without slashes; use --run-dir for a folder")
    return Run(RUNS_FOLDER / args.run)
