"""`rutter explain`: what it shows is what the table does."""

import argparse
from dataclasses import astuple
from pathlib import Path

import pytest
from sample_artifact import sample_artifact
from sample_row import sample_row

from serve_table import explain
from serve_table.artifact import Artifact, save
from serve_table.artifact_metadata import LearnedForm
from serve_table.errors import ConfigError, JournalError
from serve_table.harm import N_SHARE, Resident, Residents, renew_share
from serve_table.journal import JournalWriter, ResidentsRow
from serve_table.price_params import LEARNED_FIELDS


@pytest.fixture
def artifact(tmp_path: Path) -> str:
    path = tmp_path / "policy.safetensors"
    save(sample_artifact(), path)
    return str(path)


def explained(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    assert explain.run(parser.parse_args(flags)) == 0
    return capsys.readouterr().out


def test_given_features_show_cluster_action_and_loads(artifact: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--prompt-tokens", "1000", "--cached-prefill-tokens", "400", "--decode-pressure-requests", "3")
    text = explained(capsys, "--artifact", artifact, *flags)
    assert "cluster    1 of 2, 340 rows, centre prompt_tokens 900, uncached_prefill_tokens 900" in text
    assert "regime     0 of 4" in text
    assert "action     remote\n" in text
    assert "uncached_prefill_tokens = 600" in text
    assert "predicted_output_tokens = 200" in text
    assert text.count("prefill    prefill ") == 2
    assert text.count("decode     decode ") == 3
    assert "load -0.4000" in text
    assert "load 3.0000" in text
    assert "choice     remote, prefill prefill 0, decode decode 0 (policy)" in text
    assert "price      prefilled on prefill 0 in 36." in text
    assert [line.count(", remote ") for line in text.splitlines() if line.startswith("price      decode ")] == [1] * 3


def prices(text: str) -> dict[str, float]:
    """By action and engine, as `price` lines show them."""
    found = {}
    for line in text.splitlines():
        name, _, values = line.removeprefix("price      ").partition(": ")
        if line.startswith("price") and values and values != "down":
            for value in values.split(", "):
                found[f"{value.split()[0]} {name}"] = float(value.split()[1])
    return found


def test_the_price_shows_what_every_engine_is_worth_and_the_harm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = sample_artifact("price")
    save(artifact, tmp_path / "policy.safetensors")
    shares = [0.0] * 3 * N_SHARE
    # Two residents of the first engine are at their target's edge.
    edge = Residents(5.0, [0.0, 0.0], shares)
    for streamed in (40.0, 60.0):
        resident = Resident(0, 1000.0, 100.0, streamed, (streamed - 1.0) * 0.0249, False)
        renew_share(list(astuple(artifact.price())), edge, 0, 2.0, resident, [0.0] * N_SHARE, 0)
    row = sample_row(request_id="mine", residents=ResidentsRow(*edge), policy="rutter", policy_digest="other")
    writer = JournalWriter(tmp_path / "journal")
    writer.append(row)
    writer.close()
    flags = ("--artifact", str(tmp_path / "policy.safetensors"), "--journal", str(tmp_path / "journal"))
    text = explained(capsys, *flags, "--request-id", "mine")
    assert "policy     rutter is the price of this artifact" in text
    assert [" with harm " in line for line in text.splitlines() if line.startswith("price      http://d")] == [
        *(True, False, False)
    ]
    values = prices(text)
    assert len(values) == 6
    action, engine = max(values, key=lambda name: values[name]).split()
    chosen = next(line for line in text.splitlines() if line.startswith("choice"))
    assert chosen.startswith(f"choice     {action}, ")
    assert f"decode {engine} (policy)" in chosen


def guarded(form: LearnedForm, table_weight: float, hold_s: float) -> Artifact:
    artifact = sample_artifact(form)
    for name, value in (("table_weight", table_weight), ("hold_s", hold_s)):
        artifact.arrays["price"][LEARNED_FIELDS.index(name)] = value
    return artifact


def test_the_table_s_weight_is_in_the_local_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for weight in (0.0, 0.25):
        path = tmp_path / f"{weight}.safetensors"
        save(guarded("price", weight, 0.0), path)
        shown.append(explained(capsys, "--artifact", str(path), "--prompt-tokens", "1000"))
    without, with_weight = shown
    assert "action     remote\n" in with_weight
    assert "with table" not in without
    assert with_weight.count(" with table -0.2500") == 3
    for name, value in prices(without).items():
        assert prices(with_weight)[name] == pytest.approx(value - (0.25 if name.startswith("local") else 0.0))


def test_the_guard_shows_whether_a_request_would_be_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "policy.safetensors"
    flags = ("--artifact", str(path), "--prompt-tokens", "1000", "--prefill-pressure-tokens")
    for form, hold_s, pressure_tokens, line in (
        ("price", 0.0, "600", "off: this policy holds nothing"),
        ("table", 0.02, "600", "off: this policy holds nothing"),
        ("price", 0.02, "600", "would be held: backlog of prefill 0 36.3 ms, allowed 20.0 ms; in time"),
        ("price", 0.04, "600", "would not be held: backlog of prefill 0 36.3 ms, allowed 40.0 ms; in time"),
        ("price", 0.02, "60000", "would not be held: it prefills locally"),
    ):
        save(guarded(form, 0.25, hold_s), path)
        assert f"guard      {line}\n" in explained(capsys, *flags, pressure_tokens)


def test_the_guard_shows_that_a_row_was_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "policy.safetensors"
    save(guarded("price", 0.0, 0.02), path)
    writer = JournalWriter(tmp_path / "journal")
    residents = ResidentsRow(0.0, [0.0, 0.0], [0.0] * 3 * N_SHARE)
    for name, waited_s, ahead_tokens in (("held", 0.0375, 800.0), ("free", None, 0.0)):
        row = sample_row(request_id=name, residents=residents, waited_s=waited_s, held_ahead_tokens=ahead_tokens)
        writer.append(row)
    writer.close()
    flags = ("--artifact", str(path), "--journal", str(tmp_path / "journal"), "--request-id")
    text = explained(capsys, *flags, "held")
    assert "guard      was held for 37.5 ms until this decision\n" in text
    assert "guard      800 tokens held before it\n" in text
    assert "held " not in explained(capsys, *flags, "free").replace("be held", "")


def test_busy_prefill_engines_and_inherited_cells_show(artifact: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--prompt-tokens", "50", "--prefill-pressure-tokens", "5000", "--decode-pressure-requests", "30")
    text = explained(capsys, "--artifact", artifact, *flags)
    assert "regime     3 of 4" in text
    assert "action     local (inherited: too few rows of its own)" in text
    assert "prefill    " not in text


def test_a_row_shows_what_was_chosen_and_done(
    artifact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = JournalWriter(tmp_path / "journal")
    writer.append(sample_row(request_id="other"))
    writer.append(sample_row(request_id="mine", policy="table", policy_digest=sample_artifact().digest()))
    writer.close()
    flags = ("--artifact", artifact, "--journal", str(tmp_path / "journal"), "--request-id")
    text = explained(capsys, *flags, "mine")
    assert "prefill    http://p1: load 0.8600" in text
    assert "choice     remote, prefill http://p0, decode http://d1 (policy)" in text
    assert "journaled  remote, prefill http://p1, decode http://d0 (policy; table" in text
    assert "another policy" not in text
    assert "executed   remote, prefill http://p1, decode http://d0, status ok" in text
    assert "round_robin 0123456789abcdef, another policy" in explained(capsys, *flags, "other")
    with pytest.raises(JournalError, match="no request 'absent'"):
        explained(capsys, *flags, "absent")


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--request-id", "x"),
        ("--prompt-tokens", "5", "--journal", "j", "--request-id", "x"),
        ("--prompt-tokens", "nan"),
        ("--prompt-tokens", "5", "--decode-pressure-requests", "-1"),
        ("--prompt-tokens", "5", "--slo-class", "gold"),
    ],
)
def test_wrong_flags_are_named(artifact: str, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        explained(capsys, "--artifact", artifact, *flags)
