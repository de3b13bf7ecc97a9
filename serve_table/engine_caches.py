"""What each engine's prefix cache holds: by its KV events where it publishes them, else by what it was sent."""

from collections.abc import Sequence
from typing import Literal

from serve_table.features import PromptFeatures
from serve_table.kv_view import KvView
from serve_table.prefix_index import PrefixIndex
from serve_table.token_chain import BlockKeys, TokenChain

CacheSource = Literal["events", "index", "mixed"]
"""mixed: the larger of both, where an engine's first events were missed; in a row also: not the same everywhere."""


class EngineCaches:
    """The prefix index of all engines, and the views of those whose events are followed, by URL."""

    def __init__(self, index: PrefixIndex, views: dict[str, KvView], salt: bytes) -> None:
        self.index = index
        self.views = views
        self._salt = salt

    def chain(self, prompt: PromptFeatures, model: str | None, cache_salt: str | None) -> TokenChain | None:
        """A prompt's blocks for `cached_tokens`; None where no events are followed or its tokens are not known."""
        if not self.views or prompt.token_ids is None:
            return None
        is_adapter = any(model in view.blocks.adapters for view in self.views.values())
        return TokenChain(self._salt, prompt.token_ids, BlockKeys(model if is_adapter else None, cache_salt))

    def cached_tokens(self, engine: str, prompt: PromptFeatures, chain: TokenChain | None) -> tuple[float, CacheSource]:
        """Tokens of the prompt's longest prefix that the engine holds, and where that is known from."""
        view = self.views.get(engine)
        if chain is None or view is None or not view.usable:
            return self._sent_tokens(engine, prompt), "index"
        held_tokens = float(view.blocks.cached_tokens(chain))
        if view.complete:
            return held_tokens, "events"
        return max(held_tokens, self._sent_tokens(engine, prompt)), "mixed"

    def _sent_tokens(self, engine: str, prompt: PromptFeatures) -> float:
        n_blocks = self.index.cached_blocks(engine, prompt.block_hashes)
        return float(min(n_blocks * prompt.block_tokens, int(prompt.tokens) - 1))

    def forget(self, engine: str) -> None:
        """The engine failed, and may come back with an empty cache."""
        self.index.clear(engine)
        view = self.views.get(engine)
        if view is not None:
            view.doubt()


def common_source(sources: Sequence[CacheSource]) -> CacheSource:
    """The one source of all engines; mixed where there are several."""
    return sources[0] if len(set(sources)) == 1 else "mixed"
