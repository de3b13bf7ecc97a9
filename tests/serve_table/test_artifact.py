"""The artifact: what is written comes back, and anything malformed is refused with its reason (F36)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_artifact import changed, sample_arrays, sample_artifact, sample_metadata, with_metadata

from serve_table.artifact import MAX_BYTES, Artifact, digest_of, empty_table, load, parse, save
from serve_table.errors import ArtifactError
from serve_table.situation import REMOTE

GOOD = sample_artifact().to_bytes()


def equal(a: Artifact, b: Artifact) -> bool:
    same = all(np.array_equal(a.arrays[name], b.arrays[name]) for name in a.arrays)
    return same and a.metadata == b.metadata and a.arrays.keys() == b.arrays.keys()


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    artifact = sample_artifact()
    path = tmp_path / "deep" / "policy.safetensors"
    save(artifact, path)
    loaded = load(path)
    assert equal(loaded, artifact)
    assert path.read_bytes() == GOOD
    assert loaded.digest() == digest_of(GOOD)
    assert [p.name for p in path.parent.iterdir()] == ["policy.safetensors"]


def test_parts_of_an_artifact() -> None:
    artifact = sample_artifact()
    assert (artifact.n_clusters, artifact.n_regimes) == (2, 4)
    assert artifact.predictor(0.8).predicted_tokens == [90.0, 400.0]
    assert artifact.predictor().predict(500.0, None) == 200.0
    assert artifact.slo_targets().tight.tpot_s == 0.018
    assert artifact.step_time().knee_tokens == 150.0
    assert artifact.handoff().latency_s == 0.005
    price = artifact.price()
    assert (price.handoff_latency_s, price.overhead_s, price.tight_tpot_s) == (0.005, 0.001, 0.018)
    assert (price.kv_tokens, price.max_num_seqs, price.max_num_batched_tokens) == (60_000.0, 256.0, 8192.0)
    assert (price.harm_weight, price.ttft_width, price.short_stay, price.step_factor) == (0.5, 0.06, 0.7, 1.0)
    assert artifact.table().actions[4] == REMOTE


def poke(index: Any, value: Any) -> Any:
    def change(array: Any) -> Any:
        array[index] = value
        return array

    return change


def document(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(change: Any) -> bytes:
    """The good file with a changed metadata document."""
    header, data = document(GOOD)
    metadata = json.loads(header["__metadata__"]["rutter"])
    change(metadata)
    header["__metadata__"]["rutter"] = json.dumps(metadata)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


MUTATED: dict[str, tuple[bytes, str]] = {
    "nan": (changed(placement=poke(2, np.nan)).to_bytes(), "'placement' holds NaN"),
    "infinity": (changed(centres_tokens=poke((0, 0), np.inf)).to_bytes(), "'centres_tokens' holds NaN or infinity"),
    "missing cell": (changed(actions=lambda a: a[:-1]).to_bytes(), "'actions' has shape (7,), expected (8,)"),
    "missing array": (
        Artifact({k: v for k, v in sample_arrays().items() if k != "handoff"}, sample_metadata()).to_bytes(),
        "'handoff' is missing",
    ),
    "unknown array": (
        Artifact({**sample_arrays(), "x": np.zeros(1)}, sample_metadata()).to_bytes(),
        "unknown array 'x'",
    ),
    "wrong k": (changed(counts=lambda a: a[:1]).to_bytes(), "'actions' has shape (8,), expected (4,)"),
    "foreign cluster": (changed(clusters=poke(0, 2)).to_bytes(), "names cluster 2 of 2"),
    "foreign action": (changed(actions=poke(0, 2)).to_bytes(), "something other than 0 (local) and 1 (remote)"),
    "descending edges": (changed(length_levels=lambda a: a[::-1].copy()).to_bytes(), "'length_levels' does not ascend"),
    "wrong type": (changed(grid_scale=lambda a: a.astype(np.float32)).to_bytes(), "float32"),
    "negative time": (changed(step_time=poke(0, -1.0)).to_bytes(), "floor_s is -1.0"),
    "truncated": (GOOD[: len(GOOD) // 2], "truncated"),
    "empty": (b"", "truncated"),
    "no width": (changed(price=poke(1, 0.0)).to_bytes(), "'ttft_width' of policy 'price' must be greater than 0"),
    "no KV cache": (changed(engine_limits=poke(0, 0)).to_bytes(), "'engine_limits' holds a number that is not pos"),
    "other policy": (with_header(lambda m: m.update(policy="dice")), "metadata cannot be read"),
    "newer format": (with_header(lambda m: m.update(format_version=5, new="field")), "format 5, this program reads"),
    "nan in metadata": (with_header(lambda m: m.update(table_agreement=float("nan"))), "metadata cannot be read"),
    "unknown metadata": (with_header(lambda m: m.update(extra=1)), "metadata cannot be read"),
    "other features": (with_header(lambda m: m["feature_names"].reverse()), "differ from this program's"),
    "one slo class": (with_header(lambda m: m["slo"].pop()), "'loose' and 'tight'"),
    "zero tpot": (with_header(lambda m: m["slo"][0].update(tpot_s=0)), "SLO targets of 'loose'"),
    "too large": (b"\0" * (MAX_BYTES + 1), f"at most {MAX_BYTES}"),
}


@pytest.mark.parametrize("name", MUTATED)
def test_f36_a_mutated_artifact_is_refused_with_its_reason(tmp_path: Path, name: str) -> None:
    content, reason = MUTATED[name]
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        load(path)
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@given(position=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
def test_f36_any_changed_byte_is_refused_or_gives_a_valid_artifact(position: int, value: int) -> None:
    content = GOOD[:position] + bytes([value]) + GOOD[position + 1 :]
    try:
        artifact = parse(content)
    except ArtifactError:
        return
    # Whatever was accepted can be decided with: every cell of the table names an action.
    assert parse(artifact.to_bytes()).arrays.keys() == artifact.arrays.keys()
    assert max(artifact.table().clusters) < artifact.n_clusters


@given(length=st.integers(0, len(GOOD) - 1))
def test_f36_any_truncation_is_refused(length: int) -> None:
    with pytest.raises(ArtifactError):
        parse(GOOD[:length])


def test_f36_a_broken_artifact_is_not_written_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    save(sample_artifact(), path)
    with pytest.raises(ArtifactError):
        save(changed(placement=poke(0, np.nan)), path)
    with pytest.raises(ArtifactError, match="metadata cannot be written"):
        save(with_metadata(table_agreement=float("nan")), path)
    assert path.read_bytes() == GOOD


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot read the artifact .*absent"):
        load(tmp_path / "absent")


def test_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot write"):
        save(sample_artifact(), tmp_path / "file" / "policy.safetensors")


def test_empty_table_is_one_remote_cluster() -> None:
    assert list(empty_table().actions) == [REMOTE]
