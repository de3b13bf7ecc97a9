"""Journals as traces: what arrived and what was chosen, so that the simulator can replay a run."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from learn.trace import Trace
from serve_table.errors import TraceError
from serve_table.journal import Row
from serve_table.situation import ACTION_NAMES, NO_ENGINE, WHOLE

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DEFAULT_BLOCK_TOKENS = 64
RUN_GAP_S = 1.0
"""Rows whose routers seem to have started less than this apart are of one run: small clock corrections are, and no
router is started again so soon."""


@dataclass(frozen=True)
class JournalTrace:
    """A run as a trace, with what was executed: columns (n_requests,) in order of arrival.

    action: LOCAL, REMOTE or WHOLE as executed. prefill, decode: index into prefill_engines and decode_engines; prefill
    is -1 unless remote, decode of a whole request is n_decode + its prefill engine. predicted_tokens: as the decision
    saw them. held_s: in the router, before it was sent. ttft_s, tpot_s: as measured, NaN where not. left_out: reason to
    number of rows that put no or unknown load on the engines.
    """

    trace: Trace
    request_ids: tuple[str, ...]
    action: Ints
    prefill: Ints
    decode: Ints
    predicted_tokens: Floats
    held_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    prefill_engines: tuple[str, ...]
    decode_engines: tuple[str, ...]
    left_out: dict[str, int]

    @property
    def elastic(self) -> bool:
        """Whether prefill engines served whole requests."""
        return bool(np.any(self.action == WHOLE))


def journal_trace(rows: Iterable[Row], name: str = "journal") -> JournalTrace:
    """The rows of one run, whatever became of the requests: an aborted answer counts with the tokens it had.

    Prompt lengths are those of usage, else as the decision knew them. Raises TraceError where no row is usable and
    where rows are of several runs, cluster kinds or dilations.
    """
    left_out: Counter[str] = Counter()
    kept: dict[str, Row] = {}
    for row in rows:
        reason = "duplicate_request_id" if row.request_id in kept else left_out_reason(row)
        if reason is None:
            kept[row.request_id] = row
        else:
            left_out[reason] += 1
    used = sorted(kept.values(), key=lambda row: (row.arrival_s, row.request_id))
    require_one_run(used, name)
    prompts = np.array([prompt_tokens(row) for row in used], dtype=np.int64)
    block_tokens = block_size(used)
    chain_start, chain_length, block_ids = prefix_chains(used, prompts, block_tokens)
    prefill_engines = engine_names([row.executed_prefill_engine for row in used], [row.prefill_engines for row in used])
    decoded_on = [None if row.executed == "whole" else row.executed_decode_engine for row in used]
    decode_engines = engine_names(decoded_on, [row.decode_engines for row in used])
    # Behind the decode engines come the prefill engines, for whole requests.
    places = {name: i for i, name in enumerate((*decode_engines, *prefill_engines))}
    arrival_s = np.array([row.arrival_s for row in used])
    trace = Trace(
        name=name,
        arrival_s=arrival_s - arrival_s[0],
        prompt_tokens=prompts,
        output_tokens=np.array([row.output_tokens for row in used], dtype=np.int64),
        slo_class=np.array([row.slo_class for row in used], dtype=np.int64),
        chain_start=chain_start,
        chain_length=chain_length,
        block_ids=block_ids,
        hash_block_tokens=block_tokens,
        notes=_notes(used, left_out),
    )
    return JournalTrace(
        trace=trace,
        request_ids=tuple(row.request_id for row in used),
        action=np.array([ACTION_NAMES.index(str(row.executed)) for row in used], dtype=np.int64),
        prefill=_indices([row.executed_prefill_engine for row in used], prefill_engines),
        decode=np.array([places[str(row.executed_decode_engine)] for row in used], dtype=np.int64),
        predicted_tokens=np.array([row.predicted_output_tokens for row in used], dtype=np.float64),
        held_s=np.array([row.waited_s or 0.0 for row in used], dtype=np.float64),
        ttft_s=np.array([row.ttft_s for row in used], dtype=np.float64),
        tpot_s=np.array([row.tpot_s for row in used], dtype=np.float64),
        prefill_engines=prefill_engines,
        decode_engines=decode_engines,
        left_out=dict(left_out),
    )


def left_out_reason(row: Row) -> str | None:
    """Why a row cannot be replayed; None if it can."""
    if row.executed is None or row.executed_decode_engine is None:
        return "not_executed"
    if row.executed == "remote" and row.executed_prefill_engine is None:
        return "not_executed"
    if row.output_tokens is None or row.output_tokens < 1:
        return "no_output_tokens"
    if not np.isfinite(row.arrival_s) or not np.isfinite(row.predicted_output_tokens):
        return "not_finite"
    if row.usage_prompt_tokens is None and not np.isfinite(row.prompt_tokens):
        return "not_finite"
    return None if prompt_tokens(row) >= 1 else "no_prompt_tokens"


def prompt_tokens(row: Row) -> int:
    """Prompt tokens by usage, else rounded as the decision knew them."""
    return row.usage_prompt_tokens if row.usage_prompt_tokens is not None else round(row.prompt_tokens)


def runs(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows parted by the router start that they count their arrival from, earliest start first.

    Rows know their start only through the wall clock; a clock that was set during a run parts it in two. Routers
    that have no decode engine in common are two, however close their starts.
    """
    starts = sorted(((router_start_time(row), row) for row in rows), key=lambda start: start[0])
    found: list[list[Row]] = []
    last_start = -np.inf
    for start, row in starts:
        if start - last_start > RUN_GAP_S or _strangers(found[-1][-1], row):
            found.append([])
        found[-1].append(row)
        last_start = start
    return found


def _strangers(first: Row, second: Row) -> bool:
    """Whether both know decode engines, and none in common."""
    return bool(first.decode_engines and second.decode_engines) and set(first.decode_engines).isdisjoint(
        second.decode_engines
    )


def router_start_time(row: Row) -> float:
    """Unix time at which the row's router started; arrivals are in engine time, dilation times slower."""
    return row.time - row.arrival_s * row.dilation


def require_one_run(used: list[Row], name: str) -> None:
    """TraceError where rows cannot share one time axis and one cluster."""
    if not used:
        raise TraceError(f"{name}: no journal row has both an executed path and its tokens; collect more")
    kinds = {(row.cluster_kind, row.dilation) for row in used}
    if len(kinds) > 1:
        found = ", ".join(f"{kind} at dilation {dilation:g}" for kind, dilation in sorted(kinds))
        raise TraceError(f"{name}: rows of several clusters ({found}) are no trace; select one of them")
    n_runs = len(runs(used))
    if n_runs > 1:
        raise TraceError(f"{name}: rows of {n_runs} router runs, whose times do not compare; give one run's journal")


def block_size(used: list[Row]) -> int:
    """Tokens of a prefix block, the mean over all blocks of the rows, or the default where no row has any.

    Blocks of text are so many bytes, and stand for slightly different numbers of tokens in each row.
    """
    n_blocks = sum(len(row.prefix_hashes) for row in used)
    n_tokens = sum(len(row.prefix_hashes) * row.hash_block_tokens for row in used)
    return max(round(n_tokens / n_blocks), 1) if n_blocks else DEFAULT_BLOCK_TOKENS


def prefix_chains(used: list[Row], prompts: Ints, block_tokens: int) -> tuple[Ints, Ints, Ints]:
    """Chains of dense block ids: chain_start, chain_length (n_requests,) and block_ids (n_blocks,).

    A hash names a block and all before it, so the blocks that a request shares with others are the first of its
    chain. Ids are given in order of arrival. No chain is longer than its prompt, whose length may be more exact
    than the one that was hashed.
    """
    n_rows = Counter(block_hash for row in used for block_hash in set(row.prefix_hashes))
    ids: dict[int, int] = {}
    chain_start: list[int] = []
    chain_length: list[int] = []
    block_ids: list[int] = []
    for row, prompt in zip(used, prompts.tolist(), strict=True):
        chain_start.append(len(block_ids))
        for block_hash in row.prefix_hashes[: prompt // block_tokens]:
            if n_rows[block_hash] < 2:
                break
            block_ids.append(ids.setdefault(block_hash, len(ids)))
        chain_length.append(len(block_ids) - chain_start[-1])
    start, length, dense = (np.array(column, dtype=np.int64) for column in (chain_start, chain_length, block_ids))
    return start, length, dense


def engine_names(executed: list[str | None], known: list[list[str]]) -> tuple[str, ...]:
    """Every engine once, in the order that the rows list them, then such as only a fallback named."""
    names = dict.fromkeys(name for names in known for name in names)
    names.update(dict.fromkeys(name for name in executed if name is not None))
    return tuple(names)


def _indices(executed: list[str | None], names: tuple[str, ...]) -> Ints:
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([NO_ENGINE if name is None else numbers[name] for name in executed], dtype=np.int64)


def _notes(used: list[Row], left_out: Counter[str]) -> tuple[str, ...]:
    notes = [f"{count} journal rows left out: {reason}" for reason, count in left_out.items()]
    n_estimated = sum(row.usage_prompt_tokens is None and row.prompt_tokens_source == "bytes" for row in used)
    sizes = sorted({row.hash_block_tokens for row in used if row.prefix_hashes})
    if len(sizes) > 1:
        notes.append(f"prefix blocks of {sizes[0]} to {sizes[-1]} tokens, all taken as {block_size(used)}")
    if n_estimated:
        notes.append(f"{n_estimated} prompt lengths estimated from bytes")
    return tuple(notes)
