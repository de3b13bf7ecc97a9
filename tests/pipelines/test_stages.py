"""Run folders: done, changed, damaged, in use, killed."""

import argparse
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pipelines.stages import Run, add_run_arguments, canonical, differences, run_from
from serve_table.errors import ConfigError, RunError


def finished(run: Run, config: dict[str, object], content: str = "rows") -> Path:
    """A collect stage that made one journal; returns the journal's file."""
    stage = run.begin("collect", config)
    journal = stage.folder / "journal"
    journal.mkdir(exist_ok=True)
    (journal / "journal-000001.jsonl").write_text(content)
    run.finish("collect", config, {"journal": journal})
    return journal / "journal-000001.jsonl"


def test_a_finished_stage_is_done_for_equal_configurations_only(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    config = {"trace": Path("a.csv"), "seed": 3, "slo": {"ttft_s": 0.5}}
    assert run.done("collect", config) is None
    finished(run, config)
    record = Run(tmp_path / "run").done("collect", {"slo": {"ttft_s": 0.5}, "seed": 3, "trace": "a.csv"})
    assert record is not None
    assert run.output_path(record, "journal").is_dir()
    assert run.begin("collect", config).record == record
    assert run.done("collect", {**config, "seed": 4}) is None


def test_a_changed_configuration_says_what_changed_and_leaves_the_old_outputs(tmp_path: Path) -> None:
    run = Run(tmp_path)
    old: dict[str, object] = {"seed": 3, "slo": {"ttft_s": 0.5}, "trace": "a"}
    journal = finished(run, old)
    stage = run.begin("collect", {"seed": 4, "slo": {"ttft_s": 0.5, "tpot_s": 0.1}, "trace": "a"})
    assert stage.record is None
    assert stage.changes == ("seed: 3 -> 4", "slo.tpot_s: not set -> 0.1")
    assert journal.read_text() == "rows"
    assert journal.parent.parent != stage.folder
    assert run.begin("collect", old).record is not None


def test_an_unfinished_stage_continues_in_its_folder(tmp_path: Path) -> None:
    config = {"seed": 1}
    stage = Run(tmp_path).begin("collect", config)
    (stage.folder / "half").write_text("half")
    again = Run(tmp_path).begin("collect", config)
    assert again.record is None
    assert again.changes == ()
    assert (again.folder / "half").read_text() == "half"


def test_latest_follows_the_stage_begun_last(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(RunError, match="run `rutter collect` first"):
        run.latest("collect")
    finished(run, {"seed": 1}, "one")
    first = run.latest("collect")
    run.begin("collect", {"seed": 2})
    with pytest.raises(RunError, match="not finished"):
        run.latest("collect")
    run.begin("collect", {"seed": 1})
    assert run.latest("collect") == first


@pytest.mark.parametrize("damage", ["changed", "gone", "another file"])
def test_an_altered_output_is_not_done(tmp_path: Path, damage: str) -> None:
    run = Run(tmp_path)
    journal = finished(run, {"seed": 1})
    if damage == "changed":
        journal.write_text("wors")
    elif damage == "gone":
        journal.unlink()
    else:
        (journal.parent / "journal-000002.jsonl").write_text("more")
    assert run.done("collect", {"seed": 1}) is None
    with pytest.raises(RunError, match="run `rutter collect` again"):
        run.latest("collect")
    assert "was changed" in run.begin("collect", {"seed": 1}).changes[0]


def test_outputs_outside_the_run_and_missing_ones(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    artifact = tmp_path / "table.safetensors"
    run.begin("export", {})
    with pytest.raises(RunError, match=r"table\.safetensors"):
        run.finish("export", {}, {"artifact": artifact})
    artifact.write_bytes(b"table")
    record = run.finish("export", {}, {"artifact": artifact})
    assert run.output_path(record, "artifact") == artifact
    with pytest.raises(RunError, match="no output 'table'"):
        run.output_path(record, "table")


def test_a_moved_run_folder_still_stands(tmp_path: Path) -> None:
    finished(Run(tmp_path / "old"), {"seed": 1})
    (tmp_path / "old").rename(tmp_path / "new")
    assert Run(tmp_path / "new").done("collect", {"seed": 1}) is not None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "damaged"),
        ('{"version": 1, "stages": {"collect"', "damaged"),
        ('{"version": 1, "stages": {"collect": {"current": "x", "records": {}}}}', "lost its record"),
        ('{"version": 1, "surprise": NaN}', "damaged"),
        ('{"version": 2, "stages": {}}', "format 2"),
    ],
)
def test_a_damaged_state_is_one_clear_line(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(RunError, match=reason) as caught:
        Run(tmp_path).begin("collect", {})
    assert "state.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_f36_the_state_is_strict_json_and_refuses_nan(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(ConfigError, match="strict JSON"):
        run.begin("train", {"rate": float("nan")})
    with pytest.raises(ConfigError, match="strict JSON"):
        run.begin("train", {"rate": object()})
    finished(run, {"rate": 1.5})

    def refuse(text: str) -> None:
        raise ValueError(text)

    json.loads((tmp_path / "state.json").read_text(), parse_constant=refuse)


def test_a_folder_in_use_is_refused_and_a_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        from pipelines.stages import Run
        with Run(Path(sys.argv[1])).lock():
            print("locked", flush=True)
            sys.stdin.read()
    """
    run = Run(tmp_path / "run")
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(run.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"locked\n"
        with pytest.raises(RunError, match=f"process {owner.pid}"), run.lock():
            pass
    finally:
        owner.kill()
        owner.communicate(timeout=10)
    with run.lock():
        pass
    with run.lock():
        pass


def test_an_unusable_run_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot use the run folder"), Run(tmp_path / "file" / "run").lock():
        pass


def test_run_from_arguments() -> None:
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    assert run_from(parser.parse_args([])).folder == Path("build/runs/default")
    assert run_from(parser.parse_args(["--run", "azure"])).folder == Path("build/runs/azure")
    assert run_from(parser.parse_args(["--run-dir", "/data/x"])).folder == Path("/data/x")
    for name in ("../x", "a/b", "", ".", ".."):
        with pytest.raises(ConfigError, match="--run"):
            run_from(parser.parse_args(["--run", name]))


def test_differences_of_equal_configurations_are_none() -> None:
    text = canonical({"a": {"b": [1, 2]}, "c": None})
    assert differences(text, text) == ()
    assert differences(text, canonical({"a": 1})) == ("a: not set -> 1", "a.b: [1, 2] -> not set", "c: null -> not set")
