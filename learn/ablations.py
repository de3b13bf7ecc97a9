"""Ablations of the learned price: what it is worth without its parts, with wrong lengths and with wrong constants."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from learn.costs import scaled_step
from learn.evaluate import Bench, Floats
from learn.lengths import with_error
from learn.policy_space import Params
from learn.price_space import price_policy
from learn.trace import Trace
from serve_table.lookup import Table
from serve_table.policy import Policy
from serve_table.predictor import DEFAULT_OUTPUT_TOKENS
from serve_table.step_time import HardwareProfile

Lengths = Callable[[Trace, Floats, int], Floats]
"""What lengths (n_requests,) a trace's requests are taken to have, from it, the predictor's and the trace's number."""

FULL = "learned"
NEVER_LOCAL = 1000.0
"""Worth of the table's action by which the empty table, which has remote for all, leaves nothing to the price."""
ERRORS = (0.0, 0.5, 1.0, 1.5)
"""As arXiv 2609.16206 has them."""
STEP_FACTORS = (0.7, 1.3, 7.4, 1.0 / 7.4)
"""7.4: by so much a decode time was assumed too small there, before calibration."""


def predicted(trace: Trace, lengths: Floats, number: int) -> Floats:  # noqa: ARG001 - a way to have lengths
    return lengths


def constant(trace: Trace, lengths: Floats, number: int) -> Floats:  # noqa: ARG001
    """The length that a router without a predictor assumes."""
    return np.full(len(trace), DEFAULT_OUTPUT_TOKENS)


def wrong_by(relative_error: float) -> Lengths:
    """True lengths times lognormal factors of this mean error, seeded by the trace's number."""

    def lengths(trace: Trace, predicted: Floats, number: int) -> Floats:  # noqa: ARG001
        return with_error(trace.output_tokens.astype(np.float64), relative_error, np.random.default_rng(number))

    return lengths


@dataclass(frozen=True)
class Ablation:
    """A change of the learned price. changed: its parameters; lengths: the predictor's where nothing is said;
    step_factor: on the step times that it reckons with, while the engines stay as they are; no_table: with the empty
    table.
    """

    name: str
    changed: Mapping[str, float] = field(default_factory=dict)
    lengths: Lengths = predicted
    step_factor: float = 1.0
    no_table: bool = False

    def policy(self, params: Params, bench: Bench, table: Table) -> Policy:
        """The changed policy on a bench's engines. table: what the learned one may favour."""
        known = replace(bench.topology, profile=with_step_factor(bench.topology.profile, self.step_factor))
        return price_policy({**params, **self.changed}, known, bench.slo, None if self.no_table else table)

    def goodput(self, params: Params, bench: Bench, table: Table) -> Floats:
        """(n_traces,) goodput of the changed policy; draws as `Bench.runs` has them."""
        lengths = [self.lengths(trace, bench.predicted[k], k) for k, trace in enumerate(bench.traces)]
        return replace(bench, predicted=tuple(lengths)).goodput(self.policy(params, bench, table))


def with_step_factor(profile: HardwareProfile, factor: float) -> HardwareProfile:
    """The profile with its step times, but not the tokens at which they bend, times a factor."""
    return replace(profile, step=scaled_step(profile.step, factor, factor))


ABLATIONS = (
    Ablation(FULL),
    Ablation("no harm to residents", {"harm_weight": 0.0}),
    Ablation("no held queue", {"hold_s": 0.0}),
    Ablation("no table", {"table_weight": 0.0}),
    Ablation("remote only", {"table_weight": NEVER_LOCAL}, no_table=True),
    Ablation("one length for all", lengths=constant),
    *(Ablation(f"true lengths, error {error:.0%}", lengths=wrong_by(error)) for error in ERRORS),
    Ablation("no self-calibration", {"adapt": 0.0}),
    *(
        Ablation(f"step times {factor:.2g} times, {kept}", {"adapt": adapt}, step_factor=factor)
        for factor in STEP_FACTORS
        for kept, adapt in (("kept", 0.0), ("self-calibrated", 1.0))
    ),
)
