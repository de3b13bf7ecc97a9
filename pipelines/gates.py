"""Correctness gates: what must hold on a cluster before a live comparison may count.

Prompts are token ids and every request has a prefix-cache salt of its own, so that each text is really computed
where the gate says, and each hand-off really carries the prompt's KV.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import httpx

from pipelines.engine_probe import EngineProbe, Model
from pipelines.gate_report import Gate, GateReport
from pipelines.gate_requests import OUTPUT_TOKENS, GateRequests
from serve_table.errors import ClusterError, ConfigError, EngineError

PROMPT_LENGTHS_TOKENS = (100, 700, 1500, 3000)
WARM_UP_TOKENS = 100
CACHE_PROMPT_TOKENS = 600
TIMEOUT_S = 120.0
RESET_PATIENCE_S = 45.0
"""Longer than NixlConnector's lease of 30 s, for which a hand-off that nobody fetched keeps its blocks."""

DEV_MODE = "start the engines with VLLM_SERVER_DEV_MODE=1, which adds POST /reset_prefix_cache"
DETAILS = "start the engines with --enable-prompt-tokens-details"
SEE_LOG = "see the engine's log"
HITS = "vllm:prefix_cache_hits_total"

Say = Callable[[str], None]
Step = Callable[[], Awaitable[object]]


class ClusterUrls(Protocol):
    """Where a cluster's engines are."""

    @property
    def prefill_urls(self) -> Sequence[str]: ...

    @property
    def decode_urls(self) -> Sequence[str]: ...


def gates(
    cluster: ClusterUrls,
    model: str | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    say: Say = lambda _: None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> GateReport:
    """Run every gate on a cluster and leave its prefix caches empty. A gate that fails is reported, not raised.

    model: the served name to ask for; None: the one that the first engine serves. timeout_s: for one request.
    """
    return asyncio.run(run_gates(cluster, model, timeout_s=timeout_s, say=say, transport=transport))


async def run_gates(
    cluster: ClusterUrls,
    model: str | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    say: Say = lambda _: None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> GateReport:
    """`gates` inside a running loop."""
    began_s = time.monotonic()
    if not cluster.decode_urls:
        raise ConfigError("a cluster without decode engines has nothing to check")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=timeout_s, limits=limits, trust_env=False, transport=transport) as client:
        prefill = [EngineProbe(url.rstrip("/"), "prefill", client) for url in cluster.prefill_urls]
        decode = [EngineProbe(url.rstrip("/"), "decode", client) for url in cluster.decode_urls]
        engines = [*prefill, *decode]
        found = [await _health(engines)]
        served, gate = await _models(engines, model)
        found.append(gate)
        version, gate = await _versions(engines)
        found.append(gate)
        # Without engines that answer and serve one model the others would only say so again.
        if served is not None and found[0].passed and found[1].passed:
            found += await _request_gates(prefill, decode, served, say)
    return GateReport(
        prefill_urls=list(cluster.prefill_urls),
        decode_urls=list(cluster.decode_urls),
        model=None if served is None else served.id,
        engine_version=version,
        gates=found,
        duration_s=time.monotonic() - began_s,
    )


def reset_caches(cluster: ClusterUrls, patience_s: float = RESET_PATIENCE_S) -> None:
    """Empty every engine's prefix cache, as between two runs; ClusterError where one cannot."""
    asyncio.run(_reset_all([*cluster.prefill_urls, *cluster.decode_urls], patience_s))


async def _reset_all(urls: Sequence[str], patience_s: float) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        for url in urls:
            try:
                there = await EngineProbe(url.rstrip("/"), "decode", client).reset_prefix_cache(patience_s)
            except EngineError as error:
                raise ClusterError(str(error)) from error
            if not there:
                raise ClusterError(f"{url} has no /reset_prefix_cache: {DEV_MODE}")


async def _request_gates(
    prefill: Sequence[EngineProbe], decode: Sequence[EngineProbe], served: Model, say: Say
) -> list[Gate]:
    """The gates that send prompts."""
    requests = GateRequests(served.id)
    say(f"a request through each of {len(prefill)} x {len(decode)} prefill-decode pairs")
    pairs = await _pairs(prefill, decode, requests)
    say("greedy texts, local and remote")
    texts = await _texts(prefill, decode, requests, served.max_model_len)
    say("prefix caches")
    caches = await _caches([*prefill, *decode], requests)
    advice = "the engines must take token ids as they are and honour max_tokens with ignore_eos"
    counts = _gate("token counts", requests.miscounts, f"exact in {requests.counted} answers", advice)
    return [pairs, counts, texts, caches]


async def _health(engines: Sequence[EngineProbe]) -> Gate:
    problems = await _problems(engine.health for engine in engines)
    return _gate("health", problems, f"{len(engines)} engines answer", "start the engines that do not answer")


async def _models(engines: Sequence[EngineProbe], name: str | None) -> tuple[Model | None, Gate]:
    """The model that all engines serve alike, None where there is none."""
    try:
        cards = await asyncio.gather(*(engine.models() for engine in engines))
    except EngineError as error:
        return None, _gate("models", [str(error)], "", SEE_LOG)
    if name is None and cards[0]:
        name = cards[0][0].id
    problems = []
    found = []
    for engine, models in zip(engines, cards, strict=True):
        own = next((model for model in models if model.id == name), None)
        if own is None:
            names = ", ".join(model.id for model in models) or "nothing"
            problems.append(f"{engine.url} serves {names}, not {name}")
        else:
            found.append(own)
    lengths = {model.max_model_len for model in found}
    if not problems and len(lengths) > 1:
        problems.append(f"the engines take contexts of different lengths: {sorted(lengths, key=str)} tokens")
    advice = "start all engines with the same model, --served-model-name and --max-model-len"
    return None if problems else found[0], _gate("models", problems, f"all serve {name}", advice)


async def _versions(engines: Sequence[EngineProbe]) -> tuple[str | None, Gate]:
    try:
        versions = await asyncio.gather(*(engine.version() for engine in engines))
    except EngineError as error:
        return None, _gate("versions", [str(error)], "", SEE_LOG)
    different = sorted({version or "not told" for version in versions})
    problems = [f"the engines are of different versions: {', '.join(different)}"] if len(different) > 1 else []
    gate = _gate("versions", problems, f"all are {different[0]}", "run one version on all engines")
    return versions[0] if gate.passed else None, gate


async def _pairs(prefill: Sequence[EngineProbe], decode: Sequence[EngineProbe], requests: GateRequests) -> Gate:
    """A two-leg request through each pair, so that no later one pays for the first contact."""
    prompt = requests.prompt(WARM_UP_TOKENS)
    problems = await _on_each(decode, lambda d: [partial(requests.remote, p, d, prompt) for p in prefill])
    n_pairs = len(prefill) * len(decode)
    good = f"{n_pairs} of {n_pairs} prefill-decode pairs hand over" if prefill else "no prefill engine: no hand-over"
    advice = "see both engines' logs: their KV connectors must reach each other (VLLM_NIXL_SIDE_CHANNEL_HOST)"
    return _gate("pairs", problems, good, advice)


async def _texts(
    prefill: Sequence[EngineProbe], decode: Sequence[EngineProbe], requests: GateRequests, limit: int | None
) -> Gate:
    """Greedy text of each prompt, computed locally by each decode engine and through each pair. limit: of the
    context, in tokens.
    """
    lengths = [n for n in PROMPT_LENGTHS_TOKENS if limit is None or n + OUTPUT_TOKENS <= limit]
    prompts = [requests.prompt(n) for n in lengths]
    texts: dict[int, dict[str, str]] = {n: {} for n in lengths}

    async def local(engine: EngineProbe, prompt: list[int]) -> None:
        texts[len(prompt)][f"{engine.url} alone"] = (await requests.local(engine, prompt)).text

    async def remote(first: EngineProbe, second: EngineProbe, prompt: list[int]) -> None:
        texts[len(prompt)][f"{first.url} with {second.url}"] = (await requests.remote(first, second, prompt)).text

    def steps(engine: EngineProbe) -> list[Step]:
        alone: list[Step] = [partial(local, engine, prompt) for prompt in prompts]
        return alone + [partial(remote, p, engine, prompt) for prompt in prompts for p in prefill]

    problems = await _on_each(decode, steps)
    for n, by_way in texts.items():
        problems += _different(n, by_way)
    if not lengths:
        problems.append(f"the engines take {limit} tokens: too few for the shortest prompt")
    good = f"identical in {len(decode) * (1 + len(prefill))} ways for prompts of {', '.join(map(str, lengths))} tokens"
    return _gate("greedy text", problems, good, "all engines must hold the same weights, dtype and attention backend")


async def _caches(engines: Sequence[EngineProbe], requests: GateRequests) -> Gate:
    try:
        results = await asyncio.gather(*(_cache(engine, requests) for engine in engines))
    except EngineError as error:
        return _gate("prefix caches", [str(error)], "", SEE_LOG)
    problems = [problem for problem, _ in filter(None, results)]
    advice = next((advice for _, advice in filter(None, results)), None)
    return _gate("prefix caches", problems, f"{len(engines)} engines emptied, a repeat finds nothing", advice)


async def _cache(engine: EngineProbe, requests: GateRequests) -> tuple[str, str] | None:
    """Problem and advice of one engine's reset; None where a repeat after it finds nothing."""
    prompt, salt = requests.prompt(CACHE_PROMPT_TOKENS), requests.salt()

    async def cached_tokens() -> int | None:
        before = await engine.metric(HITS)
        usage = (await requests.complete(engine, prompt, 1, salt)).usage
        after = await engine.metric(HITS)
        if usage.cached_tokens is not None or before is None or after is None:
            return usage.cached_tokens
        return round(after - before)

    await cached_tokens()
    if not await engine.reset_prefix_cache(RESET_PATIENCE_S):
        return f"{engine.url} has no /reset_prefix_cache", DEV_MODE
    left = await cached_tokens()
    await engine.reset_prefix_cache(RESET_PATIENCE_S)
    if left is None:
        return f"{engine.url} tells neither cached tokens nor {HITS}", DETAILS
    if left:
        return f"{engine.url} found {left} of {len(prompt)} tokens cached right after its reset", SEE_LOG
    return None


async def _on_each(decode: Sequence[EngineProbe], steps: Callable[[EngineProbe], Sequence[Step]]) -> list[str]:
    """Run each decode engine's steps one after another, the engines beside each other; what went wrong."""

    async def one(engine: EngineProbe) -> list[str]:
        found = [await _problem(step) for step in steps(engine)]
        return [f"with {engine.url}: {problem}" for problem in found if problem is not None]

    return [problem for problems in await asyncio.gather(*map(one, decode)) for problem in problems]


async def _problems(steps: Iterable[Step]) -> list[str]:
    return [problem for problem in await asyncio.gather(*map(_problem, steps)) if problem is not None]


async def _problem(step: Step) -> str | None:
    try:
        await step()
    except EngineError as error:
        return str(error)
    return None


def _different(n_tokens: int, by_way: dict[str, str]) -> list[str]:
    """The ways whose text is not that of most."""
    texts = list(by_way.values())
    most = max(texts, key=texts.count, default="")
    problems = []
    for way, text in by_way.items():
        if text != most:
            same = next((i for i, (a, b) in enumerate(zip(text, most, strict=False)) if a != b), None)
            place = f"from character {same if same is not None else min(len(text), len(most))} on"
            problems.append(f"{way} gives another text for a prompt of {n_tokens} tokens, {place}")
    return problems


def _gate(name: str, problems: Sequence[str], good: str, advice: str | None) -> Gate:
    if not problems:
        return Gate(name=name, passed=True, detail=good)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Gate(name=name, passed=False, detail=problems[0] + more, advice=advice, problems=list(problems))
