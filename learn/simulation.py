"""Simulated runs: a trace, a topology and a policy in; each request's times and SLO outcome out."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from learn.core import new_core
from learn.decision_arrays import new_fleet, table_arrays
from learn.events import new_events
from learn.residents import new_bound
from learn.routing import FORCED
from learn.run_state import Floats, Ints, Load, Outcome, Routing, State, nothing_held
from learn.simulator import run
from learn.trace import Trace
from serve_table import decision
from serve_table.artifact import empty_table
from serve_table.errors import ConfigError, TraceError
from serve_table.policy import Policy
from serve_table.situation import REMOTE, WHOLE, Features
from serve_table.slo import SloTargets
from serve_table.step_time import HardwareProfile

N_FEATURES = len(Features._fields)


@dataclass(frozen=True)
class Topology:
    """A disaggregated cluster. overhead_s: time that each leg spends outside its engine (router and HTTP). elastic: its
    prefill engines may serve whole requests, which only the price makes use of.
    """

    prefill_engines: int
    decode_engines: int
    profile: HardwareProfile
    overhead_s: float = 0.0
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.prefill_engines < 0 or self.decode_engines < 1:
            raise ConfigError(f"a cluster of {self} serves nothing: at least one decode engine is needed")
        if not 0.0 <= self.overhead_s < float("inf"):
            raise ConfigError(f"overhead_s is {self.overhead_s}: must be finite and at least 0")

    def __str__(self) -> str:
        return f"{self.prefill_engines}P+{self.decode_engines}D"


@dataclass(frozen=True)
class Simulated:
    """Columns (n_requests,) of one run; tpot_s is NaN for answers of one token.

    held_s: in the router, until it was sent. features (n_requests, 7): what each decision saw, in the order of
    `situation.Features`; no rows where not wanted.
    """

    ttft_s: Floats
    tpot_s: Floats
    slo_met: npt.NDArray[np.bool_]
    action: Ints
    prefill: Ints
    decode: Ints
    held_s: Floats
    cached_tokens: Ints
    propensity: Floats
    features: Floats
    preemptions: int

    @property
    def goodput(self) -> float:
        """Share of requests that met both of their targets."""
        return float(np.mean(self.slo_met))

    def percentile(self, column: str, q: float) -> float:
        """Percentile of `ttft_s` or `tpot_s`, NaN left out."""
        return float(np.nanpercentile(getattr(self, column), q))


def simulate(
    trace: Trace,
    topology: Topology,
    policy: Policy,
    slo: SloTargets,
    predicted_tokens: npt.ArrayLike,
    seed: int = 0,
    explore: float = 0.0,
    macro_steps: bool = True,
    with_features: bool = False,
) -> Simulated:
    """Run a trace under a policy.

    predicted_tokens: (n_requests,) predicted output lengths, or one for all. seed: of the decision's draws.
    macro_steps: False takes every engine step singly; the result is the same, slower. with_features: keep what each
    decision saw. Raises TraceError for a trace without requests or with one that no engine can hold, ConfigError for
    other arguments out of range.
    """
    if not 0.0 <= explore <= 1.0:
        raise ConfigError(f"explore is {explore}: must be a share from 0 to 1")
    outcome = _new_outcome(len(trace), with_features)
    return _run(trace, topology, slo, predicted_tokens, seed, explore, policy, outcome, macro_steps)


def replay(
    trace: Trace,
    topology: Topology,
    slo: SloTargets,
    predicted_tokens: npt.ArrayLike,
    action: Ints,
    prefill: Ints,
    decode: Ints,
    held_s: npt.ArrayLike = 0.0,
) -> Simulated:
    """Run a trace with every choice given, as a journal has them; prefill is -1 unless remote, decode counts on from
    the decode engines where whole. held_s: in the router.

    Raises TraceError as `simulate` does, and where the choices name engines that the topology lacks.
    """
    _require_choices(trace, topology, action, prefill, decode)
    outcome = _new_outcome(len(trace))
    outcome.action[:] = action
    outcome.prefill[:] = prefill
    outcome.decode[:] = decode
    outcome.held_s[:] = held_s
    return _run(trace, topology, slo, predicted_tokens, 0, 0.0, None, outcome)


def _new_outcome(n: int, with_features: bool = False) -> Outcome:
    return Outcome(
        action=np.zeros(n, np.int64),
        prefill=np.zeros(n, np.int64),
        decode=np.zeros(n, np.int64),
        held_s=np.zeros(n),
        first_token_s=np.full(n, np.nan),
        finish_s=np.full(n, np.nan),
        cached_tokens=np.zeros(n, np.int64),
        propensity=np.ones(n),
        features=np.zeros((n if with_features else 0, N_FEATURES)),
    )


def _run(
    trace: Trace,
    topology: Topology,
    slo: SloTargets,
    predicted_tokens: npt.ArrayLike,
    seed: int,
    explore: float,
    policy: Policy | None,
    outcome: Outcome,
    macro_steps: bool = True,
) -> Simulated:
    _require_fits(trace, topology.profile)
    n = len(trace)
    n_engines = topology.prefill_engines + topology.decode_engines
    core = new_core(
        topology.profile,
        n_engines,
        2 * n,
        n_entries=int(trace.block_ids.max()) + 1 if len(trace.block_ids) else 0,
        entry_tokens=trace.hash_block_tokens if len(trace.block_ids) else 0,
        entry_ids=_column(trace.block_ids, np.int64) if len(trace.block_ids) else None,
        macro_steps=macro_steps,
    )
    load = Load(
        _column(trace.arrival_s, np.float64),
        _column(trace.prompt_tokens, np.int64),
        _column(trace.output_tokens, np.int64),
        _predicted_column(predicted_tokens, n),
        _column(trace.slo_class, np.int64),
        _column(trace.chain_start, np.int64),
        _column(trace.chain_length, np.int64),
        np.random.default_rng(seed).random((n, 4)),
    )
    number = FORCED if policy is None else policy.number
    elastic = topology.elastic and number in (FORCED, decision.PRICE)
    whole_engines = topology.prefill_engines if elastic else 0
    params = np.asarray(policy.params if policy is not None and policy.params else [0.0], np.float64)
    state = State(
        new_events(2 * n + 2),
        np.full(n_engines, np.inf),
        np.zeros(n),
        np.zeros(n),
        new_bound(
            n if number == decision.PRICE else 0,
            topology.prefill_engines,
            topology.decode_engines,
            params,
            whole_engines,
        ),
        nothing_held(n if number == decision.PRICE else 0),
    )
    routing = Routing(
        number,
        params,
        table_arrays(empty_table() if policy is None else policy.table),
        float(explore),
        float(topology.overhead_s),
        np.zeros(topology.prefill_engines),
        np.zeros(topology.decode_engines + whole_engines),
    )
    fleet = new_fleet(topology.prefill_engines, topology.decode_engines, elastic)
    handoff = np.asarray(topology.profile.handoff.as_list())
    answered = run(core, load, outcome, fleet, state, routing, handoff)
    if answered < n:
        raise TraceError(
            f"the simulator answered {answered} of {n} requests of {trace.name!r}: this is a defect, please report it"
        )
    return _measured(trace, slo, outcome, int(core.engines.preemptions.sum()))


def _measured(trace: Trace, slo: SloTargets, outcome: Outcome, preemptions: int) -> Simulated:
    ttft_s = outcome.first_token_s - trace.arrival_s
    later_tokens = trace.output_tokens - 1
    tpot_s = np.full(len(trace), np.nan)
    several = later_tokens > 0
    tpot_s[several] = (outcome.finish_s - outcome.first_token_s)[several] / later_tokens[several]
    base_s, slope_s, target_s = (
        np.where(trace.slo_class == 1, getattr(slo.tight, name), getattr(slo.loose, name))
        for name in ("ttft_base_s", "ttft_per_prompt_token_s", "tpot_s")
    )
    slo_met = (ttft_s <= base_s + slope_s * trace.prompt_tokens) & ~(tpot_s > target_s)
    return Simulated(
        ttft_s,
        tpot_s,
        slo_met,
        outcome.action,
        outcome.prefill,
        outcome.decode,
        outcome.held_s,
        outcome.cached_tokens,
        outcome.propensity,
        outcome.features,
        preemptions,
    )


def _column(values: npt.ArrayLike, dtype: npt.DTypeLike) -> Any:
    """The values as the one kind of array that the simulator is compiled for."""
    return np.require(values, dtype, ["C", "W"])


def _predicted_column(predicted_tokens: npt.ArrayLike, n: int) -> Any:
    predicted = np.asarray(predicted_tokens, np.float64)
    if predicted.shape not in ((), (n,)):
        raise ConfigError(f"predicted_tokens has shape {predicted.shape}: must be one number or {n}, one a request")
    if not np.all(np.isfinite(predicted)) or np.any(predicted < 0.0):
        raise ConfigError("predicted_tokens must be finite and at least 0")
    return np.broadcast_to(predicted, n).copy()


def _require_choices(trace: Trace, topology: Topology, action: Ints, prefill: Ints, decode: Ints) -> None:
    if not len(action) == len(prefill) == len(decode) == len(trace):
        raise TraceError(f"trace {trace.name!r} has {len(trace)} requests, its choices differ in number")
    remote, whole = np.asarray(action) == REMOTE, np.asarray(action) == WHOLE
    first = np.where(whole, topology.decode_engines, 0)
    n_engines = np.where(whole, topology.prefill_engines * topology.elastic, topology.decode_engines)
    known = (np.asarray(decode) >= first) & (np.asarray(decode) < first + n_engines)
    known &= ~remote | ((np.asarray(prefill) >= 0) & (np.asarray(prefill) < topology.prefill_engines))
    if not np.all(known):
        row = int(np.argmin(known))
        raise TraceError(
            f"trace {trace.name!r}: request {row} ran on prefill engine {prefill[row]} and decode engine "
            f"{decode[row]}, which {topology} lacks: replay with the topology of the journal"
        )


def _require_fits(trace: Trace, profile: HardwareProfile) -> None:
    if len(trace) == 0:
        raise TraceError(f"trace {trace.name!r} has no requests: nothing to simulate")
    total = trace.prompt_tokens + trace.output_tokens
    limit = min(profile.max_model_len_tokens, profile.kv_tokens // profile.block_tokens * profile.block_tokens)
    if int(total.max()) > limit:
        raise TraceError(
            f"trace {trace.name!r} has a request of {int(total.max())} tokens, the engines hold {limit}: "
            "drop such rows at import"
        )
