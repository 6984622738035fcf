"""Computes what one process would compute, given all ranks' inputs: the oracle's own run of a program.

One plain module, no sharding, no communication. Every rank has a replica with buffers of its own that computes on that
rank's inputs; the replicas share one set of parameters, whose gradient is the mean of the ranks'. In low precision the
same casts are done at the same places: parameters to `param_dtype` before each forward, each rank's gradient to
`reduce_dtype`, division, sum over ranks in rank order, division, cast to the stored dtype.

A replay is *free* (it never reads the implementation's state) or in *lockstep*: after each operation it adopts that state, so
that each operation is judged alone and bounds do not grow along the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_testing.adapters.protocol import Division
from fsdp_testing.cases.operations import Batch
from fsdp_testing.cases.operations.operation import matching
from fsdp_testing.cases.records import UNDERFLOW, UNIT_ROUNDOFF, Case, plan
from fsdp_testing.cases.records.schedule import builds_late
from fsdp_testing.oracle import models, optimizers, stepping
from fsdp_testing.oracle.assemble import GatheredState
from fsdp_testing.oracle.disturbance import NO_DISTURBANCE, Disturbance
from fsdp_testing.oracle.models import replica_of
from fsdp_testing.oracle.quantities import Quantity
from fsdp_testing.oracle.reduction import (
    LocalGradients,
    PendingGradients,
    Reduced,
    gradients_of,
    mean_size,
    reduce,
    require_backward,
    roundings,
)
from fsdp_testing.oracle.setup import precision_of, unit_precisions_of
from fsdp_testing.oracle.tensor_axis import compute_in_parts, summands_of_products

Results = dict[Quantity, torch.Tensor | None]
Slack = tuple[torch.Tensor | float, str]


@dataclass(slots=True)
class ReplayPoint:
    """What the replay holds at one point: values of quantities, and for each the slack of that one operation."""

    index: int
    values: Results
    slack: dict[Quantity, Slack] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    snapshot: bool = False
    pending: bool = False


class Replay:
    """One run of a case's program by the oracle."""

    def __init__(
        self,
        case: Case,
        division: Division | None = None,
        disturbance: Disturbance = NO_DISTURBANCE,
        adopted: Mapping[int, GatheredState] | None = None,
        sums: torch.dtype | None = None,
    ) -> None:
        self.case = case
        self.size = case.world.size
        self.division = division
        self.disturbance = disturbance
        self.adopted = adopted
        self.master = models.build_model(case)
        self.precision, self.unit_precisions = precision_of(case), unit_precisions_of(case, self.master)
        self.sums = sums or self.precision.on_the_wire
        self.parameters = dict(self.master.named_parameters())
        self.summands = summands_of_products(self.master, case)
        self.compute = {fqn: self._compute_parameter(fqn, p) for fqn, p in self.parameters.items()}
        # One for each rank; ranks without buffers of their own share one.
        self.has_buffers = next(self.master.buffers(), None) is not None
        self.replicas = (
            [self._replica() for _ in range(self.size)] if self.has_buffers else [self._replica()] * self.size
        )
        self._nothing_pending()
        self.unreduced = False
        self.optimizer: torch.optim.Optimizer | None = None
        self.save_point: tuple[list[dict[str, torch.Tensor]], Any] | None = None
        self.slack: dict[Quantity, Slack] = {}
        self.points: list[ReplayPoint] = []
        self.index = -1

    def run(self, *, observe_all: bool = False) -> list[ReplayPoint]:
        """Run the program, and return what it holds at every point that is compared."""
        if not builds_late(self.case):
            self.build_optimizer()
        for planned in plan(self.case):
            if planned.void:
                continue
            # Bounds in lockstep belong to one operation, and restart with each.
            self.slack = {}
            self.index = planned.index
            values = planned.operation.replay(self)
            if values:
                self.points.append(ReplayPoint(planned.index, dict(values), dict(self.slack)))
            if observe_all or planned.operation.observes:
                self.points.append(self._observed(planned.index, pending=planned.pending))
            # The oracle's state has been compared; the next operation begins with the implementation's state.
            if self.adopted is not None and not self._adopt(planned.index, pending=planned.pending):
                return self.points
        # The end is a point of its own, at which no operation widens a bound.
        self.slack = {}
        self.points.append(self._observed(len(self.case.program), pending=any(self.pending)))
        return self.points

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {fqn: tuple(parameter.shape) for fqn, parameter in self.parameters.items()}

    # ------------------------------------------------------------------------------------------- construction

    def _compute_parameter(self, fqn: str, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that replicas compute with: the stored one, or a copy in `param_dtype` of the unit."""
        # Detached, it shares the stored numbers: where nothing casts or displaces them, a step shows without `refresh`.
        around = [name for name in self.unit_precisions if fqn.startswith(f"{name}.")]
        precision = self.unit_precisions[max(around, key=len)] if around else self.precision
        stored, dtype = parameter.detach(), precision.param_dtype
        values = stored if dtype is None else models.cast_floats(stored, dtype)
        # Placed first: what is moved has numbers of its own, which `refresh` moves again.
        placed = self.disturbance.factors(self.disturbance.place(values), self.summands.get(fqn, 0))
        return nn.Parameter(placed, requires_grad=parameter.requires_grad)

    def _replica(self) -> nn.Module:
        replica = replica_of(self.master, {id(p): self.compute[fqn] for fqn, p in self.parameters.items()})
        for name, precision in self.unit_precisions.items():
            if precision.param_dtype is not None:
                models.cast_inputs(replica.get_submodule(name), precision.param_dtype)
            if precision.casts_back:
                models.cast_outputs_back(replica.get_submodule(name))
        if self.precision.buffer_dtype is not None:
            kept = [name for name, precision in self.unit_precisions.items() if precision.buffer_dtype is None]
            models.cast_buffers(replica, (*self.case.wrapping.ignored, *kept), self.precision.buffer_dtype)
        if self.disturbance.displaced:
            # Only in the displaced replay: its distance from the other one shows the effect of the order of such sums.
            compute_in_parts(replica, self.case)
        return self.disturbance.divided(replica, self.case.wrapping)

    def build_optimizer(self) -> None:
        """Build the case's optimizer over the stored parameters."""
        self.optimizer = optimizers.build_optimizer(self.case, self.parameters.values())

    # ------------------------------------------------------------------------------------------- computation

    def forward(
        self, rank: int, batch: Any, *, penalised: bool = False, leaves: list[torch.Tensor] | None = None
    ) -> models.Forwarded:
        """Run the replica of `rank` on its inputs; `penalised` and `leaves` as `models.penalised` and `models.forward` do."""
        inputs = models.make_inputs(self.case, batch, rank)
        if self.precision.param_dtype is not None and self.precision.cast_root_inputs:
            inputs = models.Inputs(*models.cast_floats((inputs.args, dict(inputs.kwargs)), self.precision.param_dtype))
        run = models.penalised if penalised else partial(models.forward, leaves=leaves)
        # By versions: they show an edit without comparing numbers, even if no number changed.
        counted = {fqn: parameter._version for fqn, parameter in self.compute.items()}
        forwarded = run(self._casting(self.replicas[rank]), self.case, batch, rank, inputs)
        self._keep_edits({fqn for fqn, parameter in self.compute.items() if parameter._version != counted[fqn]})
        return forwarded

    def _casting(self, replica: nn.Module) -> Callable[..., Any]:
        dtype = self.precision.output_dtype
        return replica if dtype is None else lambda *args, **kwargs: models.cast_floats(replica(*args, **kwargs), dtype)

    def _keep_edits(self, edited: set[str]) -> None:
        """Store what a forward changed of its own parameters, where they do not share the stored ones' numbers."""
        with torch.no_grad():
            for fqn in edited:
                stored, computed = self.parameters[fqn], self.compute[fqn]
                if computed.data_ptr() != stored.data_ptr():
                    # An element that was not changed keeps the digits that the lower precision of the forward lacks.
                    stored.copy_(torch.where(stored.to(computed.dtype) == computed, stored, computed.to(stored.dtype)))

    def interrupted(self, rank: int, batch: Any) -> None:
        """Run the forward of a micro-batch whose backward raises: neither gives gradients."""
        self.forward(rank, batch)

    def refresh(self) -> None:
        """Cast the stored parameters into the compute parameters; nothing to do where they share their numbers."""
        with torch.no_grad():
            for fqn, parameter in self.parameters.items():
                if self.compute[fqn].data_ptr() != parameter.data_ptr():
                    self.compute[fqn].copy_(self.disturbance.factors(parameter, self.summands.get(fqn, 0)))

    def local_gradients(
        self, rank: int, batch: Any, *, penalised: bool = False, leaves: list[torch.Tensor] | None = None
    ) -> tuple[models.Forwarded, LocalGradients]:
        """Run forward and backward of one rank, and return its own gradients."""
        # Replicas share the parameters: clear the last rank's gradients.
        for parameter in self.compute.values():
            parameter.grad = None
        self.disturbance.contributions.clear()
        forwarded = self.forward(rank, batch, penalised=penalised, leaves=leaves)
        if forwarded.loss.requires_grad:
            forwarded.loss.backward()
        return forwarded, gradients_of(self.compute, self.disturbance.contributions)

    def begin_micro_batch(self) -> None:
        """Count unreduced accumulations, for the rounding bound: one for each use of a part."""
        self.unreduced = any(self.pending)
        self.pending_roundings += models.most_uses(self.case) if self.unreduced else 0

    def accumulate(self, rank: int, gradients: LocalGradients) -> None:
        """Add gradients of `rank` to those that await reduction."""
        # If the backward of any rank gives a gradient, all ranks reduce.
        self.unreduced = self.unreduced and not gradients.values
        self.pending[rank].add(gradients)

    def reduce_pending(self) -> None:
        """Turn the ranks' pending gradients into the stored gradient: the mean, added to what is there."""
        require_backward(unreduced=self.unreduced)
        reduced: dict[str, tuple[Reduced, torch.dtype]] = {}
        for fqn, parameter in self.parameters.items():
            # Ranks that share one model have the same gradient: one of each such group counts.
            gradients = [pending.values.get(fqn) for pending in self.pending[:: self.case.world.tensor_parallel]]
            if any(gradient is not None for gradient in gradients):
                # A rank without a gradient adds zeros to the sum, and counts in its divisor.
                parts = [
                    torch.zeros_like(self.compute[fqn]) if gradient is None else gradient for gradient in gradients
                ]
                summed = next(gradient.dtype for gradient in gradients if gradient is not None)
                wire = self.precision.on_the_wire or summed
                reduced[fqn] = reduce(parts, wire, parameter.dtype, self.division), summed
        # The largest of all parameters, before any is moved: a gradient may be the small difference of much larger numbers.
        largest = max((float(r.magnitude.max()) for r, _ in reduced.values() if r.magnitude.numel()), default=0.0)
        for fqn, (reduction, summed) in reduced.items():
            reduction = replace(reduction, mean=self.disturbance.gradient(reduction.mean, reduction.magnitude, largest))
            self._add_mean(fqn, self.parameters[fqn], reduction, summed)
        self._nothing_pending()

    def _nothing_pending(self) -> None:
        self.pending = [PendingGradients(self.sums) for _ in range(self.size)]
        self.pending_roundings = 0

    def _add_mean(self, fqn: str, parameter: nn.Parameter, reduced: Reduced, summed: torch.dtype) -> None:
        error, why, size = reduced.error, reduced.derivation, reduced.magnitude
        wire, later = self.precision.on_the_wire or summed, self.pending_roundings
        if later:
            # Each rank's sum may be reduced as a whole, or part by part and added up where it is stored.
            size = mean_size(self.pending, fqn, size)
            error = error + roundings(2 * (later + self.case.world.replicas - 1), (summed, wire), size)
            if models.most_uses(self.case) > 1 and summed != self.compute[fqn].dtype:
                # Autograd adds up the uses of one backward, in the dtype of computation, and in which order is its own.
                error = error + roundings(2 * later, (self.compute[fqn].dtype,), size)
            why += f"; {later} additions before or after those of {self.case.world.replicas} ranks"
        uses, computed = models.uses_of(self.case, fqn), self.compute[fqn].dtype
        if uses > 2 and (self.case.wrapping.units or self.case.wrapping.policy is not None):
            # Each call of a unit has views of its own, and what is added to what then is autograd's affair; two commute.
            error = error + roundings(2 * (uses - 1), (computed,), mean_size(self.pending, fqn, size))
            why += f"; {uses} uses of one backward added up in any order"
        if parameter.grad is None:
            parameter.grad = reduced.mean.clone()
        else:
            # Replicated gradients (a shard group of one is that too) may be reduced with what was accumulated before, in
            # the dtype on the wire; and each use of a part may be added there on its own, zeros or not.
            replicated = self.case.strategy == "no_shard" or self.case.world.mesh_shape[-1] == 1
            if replicated and uses > 1 and computed != parameter.dtype:
                error = error + roundings(uses, (computed,), size)
                why += f"; {uses} uses added up in {computed} or where the gradient is stored"
            if bool(parameter.grad.any()):
                dtypes = (parameter.dtype, wire) if replicated else (parameter.dtype,)
                error = error + roundings(3 + 2 * later, dtypes, parameter.grad.abs() + size)
                why += "; added to an earlier gradient, in either order"
            parameter.grad = parameter.grad + reduced.mean
        quantity = Quantity("gradient", fqn)
        # An operation of several micro-batches reduces several times.
        before, _ = self.slack.get(quantity, (0.0, ""))
        self.slack[quantity] = (error + before, why)

    # ------------------------------------------------------------------------------------------- what operations do

    def results(self, rank: int, forwarded: models.Forwarded, suffix: str = "") -> Results:
        """Return what a forward gives on `rank`, each name with a suffix."""
        return {Quantity("result", name + suffix, "", rank): value for name, value in forwarded.values().items()}

    def result(self, rank: int, name: str, value: torch.Tensor) -> Results:
        """Return a copy of one result of `rank`."""
        return {Quantity("result", name, "", rank): value.detach().clone()}

    def saved_state(self, rank: int, fqn: str, part: str, value: torch.Tensor) -> Results:
        """Return a copy of one state of a parameter's optimizer that `rank` has saved."""
        return {Quantity.saved(fqn, part, rank): value.detach().clone()}

    def allow(
        self, kind: str, fqn: str, slack: torch.Tensor | float, why: str, name: str = "", *, rank: int = -1
    ) -> None:
        """Note how far off a quantity may be after this operation, in lockstep, and why."""
        self.slack[Quantity(kind, fqn, name, rank)] = (slack, why)

    def unit_roundoff(self, tensor: torch.Tensor) -> float:
        return UNIT_ROUNDOFF[models.dtype_name(tensor.dtype)]

    def rounded(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        """Return how far a factor with `count` roundings, and the product's own, may move each number of a tensor."""
        return (
            tensor.detach().abs().double() * (count * self.unit_roundoff(tensor))
            + 2 * UNDERFLOW[models.dtype_name(tensor.dtype)]
        )

    def step(self) -> None:
        """Step the optimizer, if there is one."""
        stepping.step(self)

    def train_among(self, ranks: int, batch: Batch, max_norm: float | None = None) -> None:
        """Make a step on the mean gradient of the first `ranks` ranks, clipped to a norm if that is given."""
        stepping.train_among(self, ranks, batch, max_norm)

    def scale(self, patterns: tuple[str, ...], factor: float) -> None:
        with torch.no_grad():
            for _, parameter in matching(self.parameters.items(), patterns):
                parameter.mul_(factor)

    def clear_gradients(self) -> None:
        """Clear all gradients, including pending ones."""
        self._nothing_pending()
        for parameter in self.parameters.values():
            parameter.grad = None

    def cast(self) -> None:
        dtype = models.dtype_of(self.case.model.dtype)
        for fqn, parameter in self.parameters.items():
            parameter.data = parameter.data.to(dtype)
            self.compute[fqn].data = self.disturbance.place(parameter.detach())
        for module in (self.master, *self.replicas):
            for owner in module.modules():
                for name, buffer in owner.named_buffers(recurse=False):
                    if buffer.is_floating_point():
                        setattr(owner, name, buffer.to(dtype))

    # ------------------------------------------------------------------------------------------- observation

    def _observed(self, index: int, *, pending: bool) -> ReplayPoint:
        """Return copies of parameters, gradients, optimizer state and buffers."""
        values: dict[Quantity, torch.Tensor | None] = {}
        for fqn, parameter in self.parameters.items():
            if not pending:
                gradient = parameter.grad
                values[Quantity("gradient", fqn)] = None if gradient is None else gradient.detach().clone()
        for fqn, parameter in self.parameters.items():
            values[Quantity("value", fqn)] = parameter.detach().clone()
            for name, entry in self.optimizer_state(parameter).items():
                entry = entry if isinstance(entry, torch.Tensor) else torch.tensor(float(entry))
                values[Quantity("optimizer", fqn, name)] = entry.detach().clone()
        for rank, replica in enumerate(self.replicas if self.has_buffers else ()):
            for fqn, buffer in replica.named_buffers():
                values[Quantity("buffer", fqn, "", rank)] = buffer.detach().clone()
        flags = {fqn: parameter.requires_grad for fqn, parameter in self.parameters.items()}
        dtypes = {fqn: models.dtype_name(parameter.dtype) for fqn, parameter in self.parameters.items()}
        return ReplayPoint(index, values, dict(self.slack), flags, dtypes, snapshot=True, pending=pending)

    def optimizer_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return what the optimizer holds for `parameter`, by name."""
        if self.optimizer is None:
            return {}
        state = self.optimizer.state.get(parameter, {})
        return {name: entry for name, entry in state.items() if entry is not None}

    # ------------------------------------------------------------------------------------------- lockstep

    def _adopt(self, index: int, *, pending: bool) -> bool:
        """Take over the implementation's state after operation `index`; False if it never got there."""
        state = (self.adopted or {}).get(index)
        if state is None:
            return False
        with torch.no_grad():
            for fqn, parameter in self.parameters.items():
                if fqn in state.values:
                    parameter.copy_(state.values[fqn])
                # Pending gradients were not compared: the oracle keeps its own.
                if not pending and fqn in state.gradients:
                    gradient = state.gradients[fqn]
                    parameter.grad = None if gradient is None else gradient.to(parameter.dtype).clone()
                own = self.optimizer_state(parameter)
                for name, entry in (state.optimizer or {}).get(fqn, {}).items():
                    if isinstance(own.get(name), torch.Tensor):
                        own[name].copy_(torch.as_tensor(entry))
            for replica, buffers in zip(self.replicas if self.has_buffers else (), state.buffers):
                for fqn, buffer in replica.named_buffers():
                    if fqn in buffers:
                        buffer.copy_(buffers[fqn])
        return True
