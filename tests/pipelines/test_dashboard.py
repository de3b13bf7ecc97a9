"""Which stored search `rutter dashboard` opens."""

import os
from pathlib import Path

import optuna
import pytest

from learn.study import StoredStudy
from pipelines.dashboard import newest_study, opened
from pipelines.stages import Run
from serve_table.errors import ConfigError, RunError


def test_the_newest_study_of_the_run_is_opened(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(RunError, match="run `rutter train` first"):
        newest_study(run)
    for age_s, folder in ((100, "train-old"), (10, "train-new")):
        study = tmp_path / folder / "study.jsonl"
        study.parent.mkdir()
        study.write_text("")
        os.utime(study, (1e9 - age_s, 1e9 - age_s))
    (tmp_path / "train-new" / "study.jsonl.lock").write_text("")
    assert newest_study(run) == tmp_path / "train-new" / "study.jsonl"


def test_journals_databases_and_urls(tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    StoredStudy(path, "search")
    storage = opened(str(path))
    assert optuna.get_all_study_names(storage) == ["search"]
    optuna.delete_study(storage=storage, study_name="search")
    assert optuna.get_all_study_names(opened(str(path))) == []
    assert opened("mysql://host/studies") == "mysql://host/studies"
    (tmp_path / "study.db").write_text("")
    assert opened(str(tmp_path / "study.db")) == f"sqlite:///{tmp_path / 'study.db'}"
    with pytest.raises(ConfigError, match="no such file"):
        opened(str(tmp_path / "study.sqlite"))
    assert not (tmp_path / "study.sqlite").exists()
