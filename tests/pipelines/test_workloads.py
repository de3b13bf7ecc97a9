"""Known truths of the synthetic workloads: rates, burstiness, lengths, classes, shared prefixes."""

from pathlib import Path

import numpy as np
import pytest

from pipelines.arrivals import Arrivals, Bursts
from pipelines.conversations import make_turns
from pipelines.lengths import LengthLaw
from pipelines.workloads import CONTEXT_TOKENS, WORKLOADS, draw_slo_classes, make_workload
from serve_table.errors import ConfigError

NAMES = list(WORKLOADS)


def dispersion(times_s, window_s):
    counts = np.bincount((times_s / window_s).astype(int))[:-1]
    return counts.var() / counts.mean()


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_trace_and_another_seed_another(name):
    first, again, other = (make_workload(name, 300, seed, 20.0) for seed in (7, 7, 8))
    for column in ("arrival_s", "prompt_tokens", "output_tokens", "slo_class", "chain_length", "block_ids"):
        assert np.array_equal(getattr(first, column), getattr(again, column))
    assert not np.array_equal(first.arrival_s, other.arrival_s)
    assert not np.array_equal(first.prompt_tokens, other.prompt_tokens)
    assert not np.array_equal(first.output_tokens, other.output_tokens)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_requests", [1, 2, 500])
def test_mean_rate_is_as_asked_and_everything_fits_the_context(name, n_requests):
    trace = make_workload(name, n_requests, 3, 12.5)
    assert len(trace) == n_requests
    assert trace.arrival_s[0] == 0.0
    if n_requests > 1:
        assert (n_requests - 1) / trace.arrival_s[-1] == pytest.approx(12.5)
    assert WORKLOADS[name].longest_tokens <= CONTEXT_TOKENS
    assert (trace.prompt_tokens + trace.output_tokens).max() <= WORKLOADS[name].longest_tokens


@pytest.mark.parametrize(
    ("name", "prompt_median", "output_median", "prompt_cap", "output_cap"),
    [("chat", 250, 180, 4_000, 1_000), ("reasoning", 400, 900, 3_000, 2_000), ("documents", 3_500, 120, 8_000, 500)],
)
def test_lengths_have_the_stated_medians_and_caps(name, prompt_median, output_median, prompt_cap, output_cap):
    trace = make_workload(name, 20_000, 5, 20.0)
    assert np.median(trace.prompt_tokens) == pytest.approx(prompt_median, rel=0.03)
    assert np.median(trace.output_tokens) == pytest.approx(output_median, rel=0.03)
    assert trace.prompt_tokens.max() == prompt_cap
    assert trace.output_tokens.max() == output_cap
    assert not trace.chain_length.any()


def test_lognormal_law_has_its_mean_where_no_limit_cuts_it():
    drawn = LengthLaw(1_000, 0.5, 1, 10**9).draw(200_000, np.random.default_rng(1))
    assert drawn.mean() == pytest.approx(1_000 * np.exp(0.125), rel=0.01)


def test_mixed_has_its_three_kinds_in_their_shares():
    trace = make_workload("mixed", 20_000, 5, 20.0)
    # Only documents are over 4,000 prompt tokens, and only reasoning answers are over 1,000.
    documents = make_workload("documents", 20_000, 6, 20.0)
    reasoning = make_workload("reasoning", 20_000, 6, 20.0)
    assert (trace.prompt_tokens > 4_000).mean() == pytest.approx(
        0.2 * (documents.prompt_tokens > 4_000).mean(), rel=0.1
    )
    assert (trace.output_tokens > 1_000).mean() == pytest.approx(
        0.2 * (reasoning.output_tokens > 1_000).mean(), rel=0.1
    )


@pytest.mark.parametrize("name", NAMES)
def test_three_in_ten_are_tight_and_the_share_can_be_set(name):
    assert make_workload(name, 5_000, 2, 20.0).slo_class.mean() == pytest.approx(0.3, abs=0.02)
    assert make_workload(name, 5_000, 2, 20.0, tight_share=0.0).slo_class.sum() == 0
    assert make_workload(name, 5_000, 2, 20.0, tight_share=1.0).slo_class.sum() == 5_000


def test_bursts_have_the_dispersion_of_the_modulated_poisson_process():
    bursts = Bursts(quiet_s=8.0, burst_s=2.0, rate_ratio=5.0)
    times_s = Arrivals(bursts=bursts).times_s(400_000, 20.0, np.random.default_rng(4))
    for window_s in (0.5, 5.0):
        assert dispersion(times_s, window_s) == pytest.approx(bursts.dispersion(20.0, window_s), rel=0.1)
    assert bursts.dispersion(20.0, 5.0) > 20


def test_burst_rates_average_to_the_rate_asked():
    bursts = Bursts(quiet_s=8.0, burst_s=2.0, rate_ratio=5.0)
    quiet, burst = bursts.rates(18.0)
    assert burst == pytest.approx(5 * quiet)
    assert (8 * quiet + 2 * burst) / 10 == pytest.approx(18.0)


@pytest.mark.parametrize(("gap_cv", "truth"), [(0.5, 0.25), (1.0, 1.0), (1.5, 2.25)])
def test_steady_arrivals_disperse_as_the_square_of_their_gaps_variation(gap_cv, truth):
    times_s = Arrivals(gap_cv=gap_cv).times_s(200_000, 20.0, np.random.default_rng(4))
    assert np.diff(times_s).std() / np.diff(times_s).mean() == pytest.approx(gap_cv, rel=0.03)
    assert dispersion(times_s, 5.0) == pytest.approx(truth, rel=0.12)


def test_later_turns_start_with_the_earlier_turns_prompt():
    spec = WORKLOADS["multi-turn"].conversations
    arrival_s = np.arange(3_000) / 20.0
    turns = make_turns(spec, arrival_s, 64, np.random.default_rng(1))
    chains = [
        turns.block_ids[start : start + length].tolist()
        for start, length in zip(turns.chain_start, turns.chain_length, strict=True)
    ]
    last = {}
    n_later = 0
    for index, who in enumerate(turns.conversation.tolist()):
        if who in last:
            n_later += 1
            before = last[who]
            assert turns.turn[index] == turns.turn[before] + 1
            assert turns.prompt_tokens[index] > turns.prompt_tokens[before] + turns.output_tokens[before]
            assert chains[index][: len(chains[before])] == chains[before]
            assert len(chains[before]) == turns.prompt_tokens[before] // 64  # the whole prompt can be found again
            assert arrival_s[index] > arrival_s[before]
        else:
            assert turns.turn[index] == 0
        last[who] = index
    assert n_later > 2_000
    assert turns.turn.max() == 7
    assert set(np.unique(turns.block_ids)) == set(range(turns.block_ids.max() + 1))  # dense from 0


def test_conversations_share_system_prompts_and_nothing_else():
    turns = make_turns(WORKLOADS["multi-turn"].conversations, np.arange(2_000) / 20.0, 64, np.random.default_rng(1))
    owners = {}
    for who, start, length in zip(turns.conversation, turns.chain_start, turns.chain_length, strict=True):
        for position, block in enumerate(turns.block_ids[start : start + length].tolist()):
            owners.setdefault((position, block), set()).add(int(who))
    system_blocks = 1_000 // 64
    assert all((len(who) > 1) == (position < system_blocks) for (position, _), who in owners.items())
    assert len({block for position, block in owners if position == 0}) == 4


def test_conversations_grow_to_four_to_six_thousand_tokens():
    spec = WORKLOADS["multi-turn"].conversations
    turns = make_turns(spec, np.arange(20_000) / 20.0, 64, np.random.default_rng(1))
    fifth, seventh = (turns.prompt_tokens[turns.turn == turn].mean() for turn in (4, 6))
    assert 3_500 < fifth < 5_000 < seventh < 6_500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chats", 10, 0, 1.0), "unknown workload 'chats'; known: mixed, chat"),
        (("chat", 0, 0, 1.0), "give at least 1"),
        (("chat", 10, 0, 0.0), "give a rate above 0"),
        (("chat", 10, 0, float("nan")), "give a rate above 0"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_workload(*arguments)


def test_a_share_beyond_one_is_refused():
    with pytest.raises(ConfigError, match="between 0 and 1"):
        draw_slo_classes(3, 30.0, np.random.default_rng(0))


def test_the_table_in_data_readme_is_that_of_the_code():
    text = (Path(__file__).resolve().parents[2] / "data" / "README.md").read_text()
    rows = {line.split("|")[1].strip().strip("`"): line for line in text.splitlines() if line.startswith("| `")}
    for name, workload in WORKLOADS.items():
        if workload.conversations is not None:
            spec = workload.conversations
            laws = (spec.message_tokens, spec.answer_tokens)
            assert f"{spec.turns_low} to {spec.turns_high} turns" in rows[name]
        elif len(workload.parts) == 1:
            laws = (workload.parts[0].prompt_tokens, workload.parts[0].output_tokens)
        else:
            laws = ()
            assert all(f"{part.share:.0%}".replace("%", " %") in rows[name] for part in workload.parts)
        for law in laws:
            assert f"{law.median:,}; {law.low:,} to {law.high:,}" in rows[name]
