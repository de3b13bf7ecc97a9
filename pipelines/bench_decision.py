"""How long the router's look-up and its whole table decision take, in plain Python as the router calls them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.bench_timing import collector_off
from pipelines.workloads import HASH_BLOCK_TOKENS, make_workload
from serve_table.harm import NO_RESIDENTS, Residents
from serve_table.lookup import Table, action_of, cluster_of, regime_of
from serve_table.policy import Policy
from serve_table.predictor import LengthPredictor
from serve_table.residents import ResidentBook
from serve_table.situation import REMOTE, Draws, Features, Fleet, Request

CACHED_REQUESTS_SHARE = 0.5
"""Of the requests that are decided: as many have part of their prompt in some engines' caches."""

MAX_DECODE_REQUESTS = 30
MAX_PREFILL_REQUESTS = 6
MEAN_PROMPT_TOKENS = 1000
STREAMING_SHARE = 0.9
STREAMED_TOKEN_S = 0.015
NO_DRAWS = Draws(1.0, 0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Case:
    """One decision to be made."""

    request: Request
    fleet: Fleet


def decision_cases(
    n_cases: int, prefill_engines: int, decode_engines: int, predictor: LengthPredictor, seed: int
) -> list[Case]:
    """Requests of the mixed workload, each with a busy fleet of lists as the router holds it."""
    rng = np.random.default_rng(seed)
    trace = make_workload("mixed", n_cases, seed, 10.0)
    cases = []
    for prompt, slo_class in zip(trace.prompt_tokens.tolist(), trace.slo_class.tolist(), strict=True):
        cached = rng.random() < CACHED_REQUESTS_SHARE
        request = Request(
            float(prompt),
            predictor.predict(float(prompt), None),
            slo_class,
            _cached_tokens(prompt if cached else 0, prefill_engines, rng),
            _cached_tokens(prompt if cached else 0, decode_engines, rng),
            True,
        )
        cases.append(Case(request, _busy_fleet(prefill_engines, decode_engines, rng)))
    return cases


def _cached_tokens(prompt_tokens: int, n_engines: int, rng: np.random.Generator) -> list[float]:
    """Whole blocks that each engine holds; most hold none."""
    shares = np.where(rng.random(n_engines) < 0.3, rng.random(n_engines), 0.0)
    blocks = (shares * prompt_tokens).astype(np.int64) // HASH_BLOCK_TOKENS
    return [float(n) * HASH_BLOCK_TOKENS for n in blocks.tolist()]


def _busy_fleet(prefill_engines: int, decode_engines: int, rng: np.random.Generator) -> Fleet:
    prefill_requests = rng.integers(0, MAX_PREFILL_REQUESTS, prefill_engines)
    decode_requests = rng.integers(0, MAX_DECODE_REQUESTS, decode_engines)
    local = rng.random(decode_engines) < 0.2
    return Fleet(
        prefill_requests=prefill_requests.astype(float).tolist(),
        prefill_tokens=(prefill_requests * MEAN_PROMPT_TOKENS * rng.random(prefill_engines)).tolist(),
        prefill_up=[1.0] * prefill_engines,
        decode_requests=decode_requests.astype(float).tolist(),
        decode_tokens=(decode_requests * MEAN_PROMPT_TOKENS * rng.random(decode_engines)).tolist(),
        decode_prefill_tokens=np.where(local, MEAN_PROMPT_TOKENS * rng.random(decode_engines), 0.0).tolist(),
        decode_up=[1.0] * decode_engines,
    )


def lookup_us(table: Table, features: Sequence[Features], blocks: int) -> list[float]:
    """Mean time of one look-up of cluster, regime and action, in microseconds, of each of `blocks` passes."""
    times_us = []
    with collector_off():
        for _ in range(blocks):
            start_ns = time.perf_counter_ns()
            for given in features:
                action_of(table, cluster_of(table, given), regime_of(table, given))
            times_us.append((time.perf_counter_ns() - start_ns) / len(features) / 1000.0)
    return times_us


def decision_us(
    policy: Policy, cases: Sequence[Case], blocks: int, seen: Callable[[], Residents] = lambda: NO_RESIDENTS
) -> list[float]:
    """Mean time of one whole decision, in microseconds, of each of `blocks` passes. seen: what a price sees."""
    times_us = []
    with collector_off():
        for _ in range(blocks):
            start_ns = time.perf_counter_ns()
            for rotation, case in enumerate(cases):
                policy.decide(case.request, case.fleet, rotation, 0.0, NO_DRAWS, seen())
            times_us.append((time.perf_counter_ns() - start_ns) / len(cases) / 1000.0)
    return times_us


def resident_book(
    policy: Policy, prefill_engines: int, decode_engines: int, n_residents: int, seed: int
) -> ResidentBook:
    """Requests of the mixed workload spread over the decode engines, most of them somewhere in their answer."""
    rng = np.random.default_rng(seed)
    now_s = 0.0
    book = ResidentBook(policy.params, prefill_engines, decode_engines, lambda: now_s)
    trace = make_workload("mixed", n_residents, seed, 10.0)
    columns = (trace.slo_class, trace.prompt_tokens, trace.output_tokens)
    for k, (slo_class, prompt, output) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        now_s = 0.0
        bound = book.bind(k % decode_engines, None, slo_class, float(prompt), float(output))
        if rng.random() < STREAMING_SHARE:
            bound.streamed(1)
            tokens = int(rng.integers(1, output + 1))
            now_s = tokens * STREAMED_TOKEN_S
            bound.streamed(tokens)
    return book


def with_residents(cases: Sequence[Case], book: ResidentBook) -> list[Case]:
    """The same cases with the book's requests on the decode engines."""
    return [Case(case.request, case.fleet._replace(decode_requests=list(book.requests))) for case in cases]


def remote_share(policy: Policy, cases: Sequence[Case], seen: Callable[[], Residents] = lambda: NO_RESIDENTS) -> float:
    """Share of the decisions that go remote: those place a prefill engine too."""
    decided = (policy.decide(case.request, case.fleet, i, 0.0, NO_DRAWS, seen()) for i, case in enumerate(cases))
    return sum(decision.action == REMOTE for decision in decided) / len(cases)
