"""The requests that the gates send, and the exactness of every answer's counts."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.engine_probe import PREFILL_ONLY, Completion, EngineProbe
from serve_table.errors import EngineProtocolError

OUTPUT_TOKENS = 16
# Ids that every vocabulary has, above the special tokens that most begin with.
FIRST_ID, LAST_ID = 16, 240


@dataclass
class GateRequests:
    """One run's requests. counted: answers so far; miscounts: what was wrong with their token counts."""

    model: str
    counted: int = 0
    miscounts: list[str] = field(default_factory=list)
    _random: random.Random = field(default_factory=random.Random)
    _run: str = field(default_factory=lambda: f"{time.time_ns():x}")
    _salts: int = 0

    def prompt(self, n_tokens: int) -> list[int]:
        """Token ids that no earlier request had."""
        return [self._random.randint(FIRST_ID, LAST_ID) for _ in range(n_tokens)]

    def salt(self) -> str:
        """A prefix-cache salt that no earlier request had."""
        self._salts += 1
        return f"{self._run}-{self._salts}"

    async def local(self, decode: EngineProbe, prompt: Sequence[int]) -> Completion:
        """An answer by a decode engine alone; raises EngineError."""
        return await self.complete(decode, prompt, OUTPUT_TOKENS, self.salt())

    async def remote(self, prefill: EngineProbe, decode: EngineProbe, prompt: Sequence[int]) -> Completion:
        """An answer in two legs; raises EngineError."""
        salt = self.salt()
        first = await self.complete(prefill, prompt, 1, salt, PREFILL_ONLY)
        handle = first.kv_transfer_params
        if not handle or not handle.get("remote_block_ids"):
            raise EngineProtocolError(f"{prefill.url} answered a prefill without kv_transfer_params: no KV connector?")
        return await self.complete(decode, prompt, OUTPUT_TOKENS, salt, handle)

    async def complete(
        self,
        engine: EngineProbe,
        prompt: Sequence[int],
        n_tokens: int,
        salt: str,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> Completion:
        """One greedy answer, its counts noted; raises EngineError."""
        request_id = f"rutter-check-{salt}"
        answer = await engine.complete(
            self.model, prompt, n_tokens, salt=salt, kv_transfer_params=kv_transfer_params, request_id=request_id
        )
        self.counted += 1
        usage = answer.usage
        if usage.prompt_tokens != len(prompt):
            self.miscounts.append(f"{engine.url} counted {usage.prompt_tokens} prompt tokens of {len(prompt)}")
        if usage.completion_tokens != n_tokens:
            self.miscounts.append(f"{engine.url} gave {usage.completion_tokens} of {n_tokens} tokens asked")
        return answer
