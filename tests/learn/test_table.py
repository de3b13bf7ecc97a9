import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_rows import FleetState, journal_row, line_of, varied_rows

from learn.clusters import fit_clusters
from learn.frame import CleanFrame, clean, clean_journal
from learn.grid import LADDER, Grid, candidate_bins, choose_grid
from learn.lengths import fit_lengths
from learn.regimes import MIN_ROWS, Regimes
from learn.table import MAX_DIGESTS, CompiledTable, Costs, SearchRecord, build_artifact, compile_table, with_regimes
from serve_table.artifact import MAX_BYTES, Artifact, load, parse, save
from serve_table.artifact_metadata import Score
from serve_table.errors import ArtifactError
from serve_table.journal import Row
from serve_table.lookup import cluster_of, regime_of
from serve_table.policy import PlacementParams, policy
from serve_table.situation import LOCAL, REMOTE, Draws, Features, Fleet, Request
from serve_table.slo import targets_from_profile
from serve_table.step_time import A40_3B

Floats = npt.NDArray[np.float64]
EXTREMES = (0.0, -1.0, 1.0, 1e5, 1e12, 1e300, math.nan, math.inf)
LENGTH = st.one_of(st.sampled_from(EXTREMES), st.floats(0.0, 2e5))


def compiled_of(frame: CleanFrame, **given: Any) -> CompiledTable:
    clusters = fit_clusters(frame.features(), seed=1)
    return compile_table(frame.features(), frame.pressures(), clusters, seed=1, **given)


@cache
def varied_table() -> tuple[CleanFrame, CompiledTable]:
    frame = clean(varied_rows(1500))
    return frame, compiled_of(frame)


def artifact_of(frame: CleanFrame, compiled: CompiledTable, **given: Any) -> Artifact:
    actions = np.arange(compiled.n_actions) % 2
    search = SearchRecord(seed=7, sampler="tpe", search_jobs=1, trials=3, study="study", held_out=())
    parts: dict[str, Any] = {
        "actions": actions,
        "placement": PlacementParams(),
        "lengths": fit_lengths(frame.outcome("usage_prompt_tokens"), frame.outcome("output_tokens")),
        "costs": Costs(A40_3B.step, A40_3B.handoff, 0.002),
        "targets": targets_from_profile(A40_3B),
        "search": search,
        "form": "table",
        "price": {},
        "profile": A40_3B,
        "workload": "mixed",
        "prefill_engines": 2,
        "decode_engines": 4,
    }
    return build_artifact(frame, compiled, **(parts | given))


def strictly_parsed(artifact: Artifact) -> dict[str, Any]:
    """The metadata by a JSON parser that refuses NaN and Infinity, as the standard does."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    content = artifact.to_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")], parse_constant=refuse)
    metadata: dict[str, Any] = json.loads(header["__metadata__"]["rutter"], parse_constant=refuse)
    return metadata


def test_the_table_agrees_with_exact_k_means() -> None:
    frame, compiled = varied_table()
    exact = compiled.clusters.assign(frame.features())
    table = compiled.decision_table(np.zeros(compiled.n_actions))
    found = [cluster_of(table, Features(*row[:4], int(row[4]), 0.0, 0.0)) for row in frame.features().tolist()]
    assert compiled.agreement == np.mean(exact == found)
    assert compiled.agreement >= 0.97
    assert compiled.held_out_agreement is not None
    assert compiled.held_out_agreement >= 0.97
    assert compiled.grid.n_cells <= 30_000


def test_a_continuum_of_correlated_lengths_agrees_too() -> None:
    rng = np.random.default_rng(8)
    prompt = np.exp(rng.normal(6.5, 1.0, 4000)).round() + 1
    output = np.exp(rng.normal(5.0, 0.8, 4000)).round() + 1
    features = np.column_stack([prompt, prompt, prompt, output, (rng.random(4000) < 0.3).astype(float)])
    clusters = fit_clusters(features, seed=1, k=4)
    compiled = compile_table(features, np.zeros((4000, 2)), clusters, seed=1)
    assert compiled.agreement >= 0.97
    assert compiled.held_out_agreement is not None
    assert compiled.held_out_agreement >= 0.97


@given(LENGTH, LENGTH, LENGTH, LENGTH, st.sampled_from([0, 1, 2, -1]))
def test_look_up_is_the_compiled_cell(a: float, b: float, c: float, d: float, slo_class: int) -> None:
    compiled = varied_table()[1]
    table = compiled.decision_table(np.zeros(compiled.n_actions))
    features = np.array([[a, b, c, d, float(slo_class)]])
    cell = compiled.grid.cells(features)[0]
    assert cluster_of(table, Features(a, b, c, d, slo_class, 0.0, 0.0)) == compiled.cell_clusters[cell]


def test_cells_without_rows_have_the_exact_cluster_of_their_middle() -> None:
    frame, compiled = varied_table()
    empty = np.setdiff1d(np.arange(compiled.grid.n_cells), compiled.grid.cells(frame.features()))
    middles = compiled.grid.representatives(empty, compiled.clusters.scaler.mean)
    assert compiled.cell_clusters[empty].tolist() == compiled.clusters.assign(middles).tolist()
    grid = Grid((0.9, 0.9, 0.9, 0.9), (5, 6, 7, 8))
    every = np.arange(grid.n_cells)
    assert grid.cells(grid.representatives(every, np.zeros(4))).tolist() == every.tolist()


def test_a_length_of_one_bin_stands_for_what_is_typical() -> None:
    grid = Grid((1.0, 1.0, 1.0, 1.0), (3, 1, 1, 1))
    features = grid.representatives(np.array([2, 5]), np.log1p([10.0, 20.0, 30.0, 40.0]))
    np.testing.assert_allclose(features[0], [math.expm1(2.5)] * 3 + [40.0, 0.0])
    assert features[1, 4] == 1.0


def test_candidate_grids_fit_and_cannot_be_refined() -> None:
    candidates = candidate_bins((True, True, False, True), 3000)
    assert candidates
    for bins in candidates:
        assert bins[2] == 1
        assert 2 * math.prod(bins) <= 3000
        for axis in (0, 1, 3):
            finer = LADDER[min(LADDER.index(bins[axis]) + 1, len(LADDER) - 1)]
            assert finer == bins[axis] or 2 * math.prod(bins) // bins[axis] * finer > 3000


def test_grid_choice_repeats() -> None:
    frame, compiled = varied_table()
    first = choose_grid(frame.features(), compiled.clusters, seed=3)
    assert choose_grid(frame.features(), compiled.clusters, seed=3) == first


def test_cells_with_few_rows_are_marked_as_inherited() -> None:
    frame, compiled = varied_table()
    regimes = compiled.regimes.of(frame.pressures())
    rows = np.zeros(compiled.n_actions, dtype=int)
    np.add.at(rows, compiled.clusters.labels * len(compiled.regimes) + regimes, 1)
    assert rows.tolist() == compiled.counts.tolist()
    assert compiled.inherited.tolist() == [int(count < MIN_ROWS) for count in rows]
    strict = compiled_of(frame, min_rows=10_000)
    assert strict.inherited.tolist() == [1] * strict.n_actions


def test_other_regimes_count_the_cells_anew() -> None:
    frame, compiled = varied_table()
    one_regime = with_regimes(compiled, Regimes((), ()), frame.pressures())
    assert one_regime.counts.tolist() == np.bincount(compiled.clusters.labels).tolist()
    assert one_regime.n_actions == len(compiled.clusters)


def test_artifact_holds_the_parts_and_is_the_same_again(tmp_path: Path) -> None:
    frame, compiled = varied_table()
    artifact = artifact_of(frame, compiled)
    again = artifact_of(frame, compiled_of(frame))
    assert artifact.to_bytes() == again.to_bytes()
    assert len(artifact.to_bytes()) <= MAX_BYTES
    save(artifact, tmp_path / "policy.safetensors")
    loaded = load(tmp_path / "policy.safetensors")
    assert loaded.table() == compiled.decision_table(np.arange(compiled.n_actions) % 2)
    assert loaded.params() == [0.0, 1.0, 1.0, 1.0, 0.0, 2.0, 1.0]
    assert (loaded.step_time(), loaded.handoff()) == (A40_3B.step, A40_3B.handoff)
    assert loaded.slo_targets() == targets_from_profile(A40_3B)
    lengths = fit_lengths(frame.outcome("usage_prompt_tokens"), frame.outcome("output_tokens"))
    assert loaded.predictor(0.9) == lengths.predictor(0.9)
    assert loaded.metadata.table_agreement == compiled.agreement
    assert loaded.metadata.journal_rows == 1500
    assert loaded.metadata.journal_last_time == frame.rows["time"].max()
    assert set(loaded.metadata.library_versions) >= {"python", "numpy", "scikit-learn"}


def test_many_segments_are_named_by_one_digest() -> None:
    frame, compiled = varied_table()
    many = replace(frame, digests=tuple(f"{number:064x}" for number in range(MAX_DIGESTS + 1)))
    few = replace(frame, digests=("a" * 64,))
    assert [len(digest) for digest in artifact_of(many, compiled).metadata.journal_digests] == [64]
    assert artifact_of(few, compiled).metadata.journal_digests == ["a" * 64]


def test_parts_that_do_not_fit_are_refused() -> None:
    frame, compiled = varied_table()
    with pytest.raises(ArtifactError, match=r"actions of shape \(3,\)"):
        artifact_of(frame, compiled, actions=[0, 1, 0])
    with pytest.raises(ArtifactError, match=r"must be 0 \(local\) or 1"):
        artifact_of(frame, compiled, actions=np.full(compiled.n_actions, 2))
    with pytest.raises(ArtifactError, match="at most 65536 are allowed: compile with fewer cells"):
        artifact_of(frame, compiled, workload="w" * 70_000)


def score(**given: Any) -> Score:
    values = {"goodput": 0.9, "goodput_low": 0.8, "goodput_high": 1.0, "ttft_p90_s": 0.1, "ttft_p99_s": 0.2}
    return Score(**({"policy": "table", "tpot_p90_s": 0.02} | values | given))


def searched(*scores: Score) -> SearchRecord:
    return SearchRecord(seed=7, sampler="tpe", search_jobs=1, trials=3, study="study", held_out=scores)


def test_f36_gaps_in_the_data_become_null_never_nan() -> None:
    rows = [journal_row(number, output_tokens=1, tpot_s=None, ttft_s=0.1) for number in range(30)]
    frame = clean(rows)
    compiled = compiled_of(frame)
    held_out = score(ttft_p90_s=math.nan, ttft_p99_s=math.inf, tpot_p90_s=None)
    artifact = artifact_of(frame, compiled, search=searched(held_out))
    metadata = strictly_parsed(artifact)
    (entry,) = metadata["held_out"]
    assert [entry[name] for name in ("ttft_p90_s", "ttft_p99_s", "tpot_p90_s")] == [None, None, None]
    assert parse(artifact.to_bytes()).metadata == artifact.metadata
    timeless = replace(frame, rows=frame.rows.assign(time=math.nan))
    assert strictly_parsed(artifact_of(timeless, compiled))["journal_last_time"] is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_f36_what_must_be_known_is_refused_when_it_is_not(bad: float) -> None:
    frame, compiled = varied_table()
    for name in ("goodput", "goodput_low", "goodput_high"):
        with pytest.raises(ArtifactError, match=f"{name} of 'table' is {bad}"):
            artifact_of(frame, compiled, search=searched(score(**{name: bad})))
    with pytest.raises(ArtifactError, match="the dilation is"):
        artifact_of(replace(frame, dilation=bad), compiled)
    with pytest.raises(ArtifactError, match="'overhead_s' holds NaN or infinity"):
        artifact_of(frame, compiled, costs=Costs(A40_3B.step, A40_3B.handoff, bad))


def varied(number: int, **given: Any) -> Row:
    """A row with its own lengths and pressures, but for what is given."""
    rng = np.random.default_rng(number)
    prompt = int(rng.integers(50, 5000))
    state = FleetState(prefill_tokens=float(rng.integers(0, 5000)), decode_requests=float(rng.integers(0, 40)))
    values = {"prompt_tokens": float(prompt), "usage_prompt_tokens": prompt, "fleet": state.row()}
    return journal_row(number, **(values | given))


DEGENERATE: dict[str, list[Row]] = {
    "all equal": [journal_row(number) for number in range(60)],
    "three distinct rows": [
        varied(number % 3, request_id=f"r{number}", arrival_s=float(number)) for number in range(60)
    ],
    "constant prompts": [varied(number, prompt_tokens=700.0, usage_prompt_tokens=700) for number in range(60)],
    "a column without a value": [varied(number, usage_prompt_tokens=None, output_tokens=None) for number in range(60)],
    "NaN and infinity": [
        varied(number, predicted_output_tokens=(math.nan, math.inf, 90.0)[number % 3]) for number in range(60)
    ],
    "wild scale": [varied(number, prompt_tokens=10.0 ** (number % 13)) for number in range(60)],
    "one row": [varied(0)],
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_f32_degenerate_journals_give_a_sound_artifact(name: str) -> None:
    frame = clean(DEGENERATE[name])
    compiled = compiled_of(frame)
    artifact = parse(artifact_of(frame, compiled).to_bytes())
    strictly_parsed(artifact)
    assert artifact.arrays["counts"].min() > 0
    assert len(np.unique(artifact.arrays["centres_tokens"].round(6), axis=0)) == artifact.n_clusters
    has_rows = compiled.counts >= MIN_ROWS
    assert np.all(has_rows | (artifact.arrays["inherited"] == 1))
    if name == "NaN and infinity":
        assert frame.report.dropped == {"missing_feature": 40}
    table_policy = policy("table", artifact=artifact)
    table = artifact.table()
    fleet = Fleet(*([0.0] * 2, [0.0] * 2, [1.0] * 2), *([0.0] * 4, [0.0] * 4, [0.0] * 4, [1.0] * 4))
    for extreme in EXTREMES:
        features = Features(extreme, extreme, extreme, extreme, 1, extreme, extreme)
        assert 0 <= cluster_of(table, features) < artifact.n_clusters
        assert 0 <= regime_of(table, features) < artifact.n_regimes
        request = Request(extreme, extreme, 0, [0.0] * 2, [0.0] * 4, True)
        decision = table_policy.decide(request, fleet, 0, 0.0, Draws(0.5, 0.5, 0.5, 0.5))
        assert decision.action in (LOCAL, REMOTE)


def test_f19_a_torn_journal_gives_the_table_of_its_clean_prefix(tmp_path: Path) -> None:
    rows = varied_rows(200)
    lines = [line_of(row) for row in rows]
    torn = tmp_path / "torn-000001.jsonl"
    torn.write_bytes(b"".join(lines[:-1]) + lines[-1][:100] + bytes(4096))
    frame = clean_journal([torn])
    prefix = replace(clean(rows[:-1]), digests=frame.digests)
    assert (len(frame), len(frame.report.broken)) == (199, 1)
    artifact, expected = (artifact_of(each, compiled_of(each)) for each in (frame, prefix))
    assert artifact.metadata.journal_dropped == {"broken_line": 1}
    same = msgspec.structs.replace(artifact.metadata, journal_dropped={})
    assert same == expected.metadata
    assert all(np.array_equal(artifact.arrays[key], expected.arrays[key]) for key in expected.arrays)
