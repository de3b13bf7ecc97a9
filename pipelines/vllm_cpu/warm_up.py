"""The first requests of a cluster: every prefill-decode pair shakes hands once, every engine computes a long step."""

import asyncio
from collections.abc import Sequence

import httpx

from pipelines.engine_probe import PREFILL_ONLY, EngineProbe
from serve_table.errors import ClusterError, EngineError

PAIR_PROMPT_TOKENS = 100
PAIR_OUTPUT_TOKENS = 2
TIMEOUT_S = 120.0
RESET_PATIENCE_S = 60.0
FIRST_ID = 32


def warm_up(prefill_urls: Sequence[str], decode_urls: Sequence[str], model: str, long_prompt_tokens: int) -> None:
    """Warm every engine and every pair up, and leave their prefix caches empty. Raises ClusterError.

    long_prompt_tokens: as many as the largest step computes.
    """
    try:
        asyncio.run(_warm_up(prefill_urls, decode_urls, model, long_prompt_tokens))
    except EngineError as error:
        raise ClusterError(f"warming the engines up failed: {error}") from error


async def _warm_up(
    prefill_urls: Sequence[str], decode_urls: Sequence[str], model: str, long_prompt_tokens: int
) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        prefill = [EngineProbe(url, "prefill", client) for url in prefill_urls]
        decode = [EngineProbe(url, "decode", client) for url in decode_urls]
        engines = [*prefill, *decode]
        prompt = [FIRST_ID] * long_prompt_tokens
        await asyncio.gather(*(engine.complete(model, prompt, 2, salt="long") for engine in engines))
        # By rounds in which no two prefill engines share a partner, where there are enough.
        for shift in range(len(decode)):
            partners = [(i, (i + shift) % len(decode)) for i in range(len(prefill))]
            await asyncio.gather(*(_warm_pair(prefill[i], decode[k], model, f"warm-up-{i}-{k}") for i, k in partners))
        await asyncio.gather(*(engine.reset_prefix_cache(RESET_PATIENCE_S) for engine in engines))


async def _warm_pair(prefill: EngineProbe, decode: EngineProbe, model: str, name: str) -> None:
    """One request in two legs. name: its salt too, or the decode engine might have the blocks already."""
    prompt = [FIRST_ID] * PAIR_PROMPT_TOKENS
    first = await prefill.complete(model, prompt, 1, salt=name, kv_transfer_params=PREFILL_ONLY, request_id=name)
    if not first.kv_transfer_params:
        raise EngineError(f"{prefill.url} gave no kv_transfer_params: it runs without NixlConnector")
    await decode.complete(
        model, prompt, PAIR_OUTPUT_TOKENS, salt=name, kv_transfer_params=first.kv_transfer_params, request_id=name
    )
