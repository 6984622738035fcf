"""One observed step of an optimizer on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from fsdp_testing.train.evidence import StepEvidence
from fsdp_testing.train.holdings import Spans
from fsdp_testing.train.quantities import Kind, Quantity, QuantitySpans, spans_of_kind
from fsdp_testing.train.terms import Terms

_OF_EACH_OPTIMIZER = (Kind.UNCLIPPED, Kind.GRADIENT, Kind.MOMENT)


@dataclass(slots=True)
class StepSeen:
    """One step of an optimizer on one rank; filled while it is made, and never changed afterwards.

    Attributes:
        losses: The loss of each backward pass (its sum, if it was no scalar).
        loss_dtype: Their dtype.
        rows: Digest of each row that the outermost forwards were given, by forward.
        idle: The forwards to which no gradient came back.
        settings: Each number by which the optimizer is set ("lr", "weight_decay", ...), of every group of parameters.
        group_sizes: This rank's elements of each group of parameters.
        norms: Norms that `clip_grad_norm_` returned.
        norm_dtype: Their dtype.
        clip_limits: The limits it was given.
        made_rates: Initial learning rate of each group of the optimizer.
        idle_schedules: Schedules of learning rates that were not stepped since they were made.
        idle_hooks: Where hooks on parameters were registered that have not run.
        before: Parameters before the step: in a later step only those that changed since the step before; in the first step also
            the optimizer's earlier state.
        after: What this rank has of each quantity: gradients as they are without clips, and as the optimizer is given them
            (None counts as zeros); after the step parameters, the optimizer's state and the buffers that a checkpoint holds;
            and what the models hold, when the next forward begins, of parameters that the optimizer steps as copies.
        unreduced: Parameters whose sharded gradient had not been reduced.
        stale: Parameters whose old values the next forward uses.
        given: How many parameters have a gradient on this rank.
        strange: How many tensors the optimizer steps that belong to no model that was seen.
        stepped: How many it steps.
        unreadable: Why parameters could not be read; empty if they were.
        left_out: What else could not be read (the optimizer's state, buffers), with the reason.
        drew: Whether a forward drew random numbers by a default generator of torch, numpy or Python, or by one that the model
            holds; in a disturbed run, by any of torch's.
        batch_norm: Whether a model in training has batch norms that look at one rank's rows alone.
        generators: Digest of the state of each random generator of this process after the step, by the package it belongs to.
        terms: What each backward pass added to gradients.
        share: Which part of each row's work is this rank's, as its place in a mesh of tensor parallelism; empty if all of it.
        sent: Whether this rank sent to, or received from, a single other one, as stages of a pipeline do.
        evidence: What explains a difference.
    """

    losses: tuple[float, ...] = ()
    loss_dtype: torch.dtype = torch.float64
    rows: tuple[tuple[str, ...], ...] = ()
    idle: frozenset[int] = frozenset()
    settings: dict[str, tuple[float, ...]] = field(default_factory=dict)
    group_sizes: tuple[int, ...] = ()
    norms: tuple[float, ...] = ()
    norm_dtype: torch.dtype = torch.float64
    clip_limits: tuple[float, ...] = ()
    made_rates: tuple[float, ...] = ()
    idle_schedules: tuple[str, ...] = ()
    idle_hooks: tuple[str, ...] = ()
    before: QuantitySpans = field(default_factory=dict)
    after: QuantitySpans = field(default_factory=dict)
    unreduced: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    given: int = 0
    strange: int = 0
    stepped: int = 0
    unreadable: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    drew: bool = False
    batch_norm: bool = False
    generators: Mapping[str, str] = field(default_factory=dict)
    terms: Terms = field(default_factory=Terms)
    share: str = ""
    sent: bool = False
    evidence: StepEvidence = field(default_factory=StepEvidence)

    def of(self, kind: Kind) -> Spans:
        """Return this rank's quantities of one kind, by name."""
        return spans_of_kind(self.after, kind)

    def followed_by(self, later: StepSeen) -> StepSeen:
        """Merge this step with another optimizer's step made before the next forward."""
        settings = {
            name: self.settings.get(name, ()) + later.settings.get(name, ())
            for name in {**self.settings, **later.settings}
        }
        earlier = {key: spans for key, spans in self.after.items() if key.kind in _OF_EACH_OPTIMIZER}
        return replace(
            self,
            settings=settings,
            group_sizes=self.group_sizes + later.group_sizes,
            norms=self.norms + later.norms,
            before=later.before | self.before,
            after=earlier | later.after | named(Kind.UNCLIPPED, self.of(Kind.UNCLIPPED)),
            unreduced=(*self.unreduced, *later.unreduced),
            given=self.given + later.given,
            strange=self.strange + later.strange,
            stepped=self.stepped + later.stepped,
            unreadable=self.unreadable or later.unreadable,
            left_out={**self.left_out, **later.left_out},
            generators=later.generators,
        )


def named(kind: Kind, spans: Spans) -> QuantitySpans:
    """Return spans by quantity, of parameters' names of one kind."""
    return {Quantity(kind, name): kept for name, kept in spans.items()}
