"""Users' hooks that see gradients: one that reduces them in place of the implementation, and hooks on parameters.

The hooks here are the user's: written with torch's public collectives, knowing nothing of any implementation. They average like
the built-in reduction, average after casting to 16 bits, or return something other than the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_testing.adapters.adapter import Adapter, Setup
from fsdp_testing.cases.records import UNIT_ROUNDOFF, Case, MixedPrecisionSpec, RankObservation
from fsdp_testing.checks.suites.programs import Remark, RemarkedObservation, review_remarks, scaled
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.oracle import models, optimizers, rank_jobs
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.kept_groups import data_group
from fsdp_testing.ranks.pool.world import current_world

# `reduce_scatter_tensor` before torch 2.13.
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Way:
    """How the hook reduces: in `wire` (None: the gradient's own dtype), and what it multiplies the mean by."""

    wire: str | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class HookCall:
    """One call of the hook on one rank.

    Attributes:
        operation: Index of the program's operation during which it came.
        numel: Elements of the gradient.
        dtype: Its dtype.
        squares: Sum of squares of its elements, in float64.
        output: Elements of the tensor that takes this rank's span; -1 if there is none.
    """

    operation: int
    numel: int
    dtype: str
    squares: float
    output: int


@dataclass(slots=True)
class HookState:
    """The hook's first argument on every call: one object for all units."""

    way: Way
    group: dist.ProcessGroup
    index: Callable[[], int]
    calls: list[HookCall]


def reduce_gradient(state: HookState, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Reduce as the user's hook. Collectives: one reduce-scatter or all-reduce over the group; every rank calls."""
    squares = float(gradient.detach().double().square().sum())
    given = -1 if output is None else output.numel()
    dtype = str(gradient.dtype).removeprefix("torch.")
    state.calls.append(HookCall(state.index(), gradient.numel(), dtype, squares, given))
    size = dist.get_world_size(state.group)
    wire = gradient if state.way.wire is None else gradient.to(models.dtype_of(state.way.wire))
    if output is None:
        total = wire.clone()
        dist.all_reduce(total, group=state.group)
        gradient.copy_(total / size * state.way.factor)
        return
    mine = torch.empty(output.numel(), dtype=wire.dtype, device=wire.device)
    _REDUCE_SCATTER(mine, wire.reshape(-1).contiguous(), group=state.group)
    output.copy_((mine / size * state.way.factor).view_as(output))


class HookedProgram(RankProgram):
    """A program that registers the hook after wrapping its model, and checks the hook's calls where it is told to."""

    way = Way()
    looks = False

    def __init__(self, case: Case, adapter: Adapter, rank: int) -> None:
        super().__init__(case, adapter, rank)
        self.calls: list[HookCall] = []

    def run(self, *, observe_all: bool = False) -> RankObservation:
        """Run the case. Collectives: those of the hook, too."""
        observation = super().run(observe_all=observe_all)
        if observation.error is not None or not self.looks:
            return observation
        return observation.extended(RemarkedObservation, remarks=tuple(wrong_calls(self.case, self.rank, self.calls)))

    def _model_of(self, case: Case, flags: Mapping[str, bool]) -> nn.Module:
        model = super()._model_of(case, flags)
        world = current_world()
        state = HookState(self.way, data_group(world, case.world), lambda: self.index, self.calls)
        with self._inside():
            self.adapter.register_comm_hook(model, state, reduce_gradient)
        return model


def _own_gradients(case: Case, rank: int) -> tuple[dict[int, float], int]:
    """Sum of squares of this rank's own gradient at each reduction, computed without other ranks; parameters never step."""
    model = models.build_model(case)
    squares: dict[int, float] = {}
    for index, operation in enumerate(case.program):
        for batch in operation.batches() if operation.runs_backward else ():
            inputs = models.make_inputs(case, batch, rank)
            models.forward(model, case, batch, rank, inputs).loss.backward()
            if not operation.pending_after(False):
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                squares[index] = sum(float(grad.double().square().sum()) for grad in grads)
                model.zero_grad()
    return squares, sum(parameter.numel() for parameter in model.parameters())


def wrong_calls(case: Case, rank: int, calls: Sequence[HookCall]) -> Iterator[Remark]:
    """Yield what is wrong with the calls of a rank.

    A hook is called exactly once for every unit with trainable parameters of its own, in every backward that reduces. It
    receives the unit's whole gradient on this rank: nothing lost, nothing doubled, not divided. The sum of squares over all
    calls of one backward shows this, however an implementation cuts and pads its units. Over tensor parallelism it is not
    compared: checks of what the hook returns show it there.
    """
    owners = set()
    for name, parameter in models.build_model(case).named_parameters():
        inside = [unit for unit in case.wrapping.units if name.startswith(f"{unit}.")]
        owners |= {max(inside, key=len, default="")} if parameter.requires_grad else set()
    due, elements = _own_gradients(case, rank)
    remark = partial(Remark, quantity="calls of the communication hook")
    # First missing and superfluous calls: wrong sums would only repeat the same fault.
    for index in range(len(case.program)):
        count = sum(call.operation == index for call in calls)
        expected = len(owners) if index in due else 0
        if count != expected:
            yield remark(index, statement=f"the hook was called {count} times, expected {expected}")
    size, dtype, sharded = case.world.replicas, case.model.dtype, case.strategy != "no_shard"
    for call in calls:
        if call.dtype != dtype:
            yield remark(call.operation, statement=f"the hook was given {call.dtype}, expected {dtype}")
        # On one rank the whole gradient is the shard, and an output may be given or not.
        if sharded and size > 1 and call.output * size != call.numel:
            given = f"{call.numel} elements and an output of {call.output} for {size} ranks"
            yield remark(call.operation, statement=f"the hook was given {given}")
        if not sharded and call.output >= 0:
            yield remark(call.operation, statement="the hook was given an output although nothing is sharded")
    # Over tensor parallelism a rank is given parts of gradients.
    for index, wanted in due.items() if case.world.tensor_parallel == 1 else ():
        got = sum(call.squares for call in calls if call.operation == index)
        # Two roundings for each square and sum, and as many as elements for each gradient's own inner products.
        bound = 4 * max(elements, 1) * UNIT_ROUNDOFF[dtype] * abs(wanted)
        if not abs(got - wanted) <= bound:
            statement = f"the hook was given gradients whose squares add up to {got:.6g}, expected {wanted:.6g}"
            how = "4 x elements x u x sum of squares"
            yield remark(index, statement=statement, error=abs(got - wanted), bound=bound, derivation=how)


def _as_reduced_in(wire: str, case: Case) -> Case:
    """Return the case as the oracle sees it: gradients are reduced in `wire`, by the implementation or the hook."""
    return replace(case, mixed_precision=MixedPrecisionSpec(reduce_dtype=wire))


def compressed_to(wire: str) -> RunMode:
    """Return a mode in which the hook reduces in the dtype `wire`."""
    how = (HookedProgram, {"way": Way(wire)})
    return RunMode(rank_jobs.run_as, how, seen_as=partial(_as_reduced_in, wire))


AVERAGING = RunMode(rank_jobs.run_as, (HookedProgram, {}))
REVIEWED = RunMode(rank_jobs.run_as, (HookedProgram, {"looks": True}), review=review_remarks)
QUARTERING = scaled(
    0.25,
    job=rank_jobs.run_as,
    arguments=(HookedProgram, {"way": Way(factor=0.25)}),
    besides="what the communication hook returns",
)

# -------------------------------------------------------------------------------------------- hooks on parameters

FACTOR = 2.0
"""What each of two hooks on a parameter multiplies the gradient by."""


class ParameterHooksProgram(RankProgram):
    """A program with a hook on every parameter; reports wrong arguments of the hooks.

    The last operation of its case reduces gradients, and no operation steps.
    """

    accumulated = False
    """Whether hooks run after accumulation and read `.grad`; else they receive the gradient."""

    def __init__(self, case: Case, adapter: Adapter, rank: int) -> None:
        super().__init__(case, adapter, rank)
        self.given: dict[tuple[int, str], list[torch.Tensor | None]] = {}

    def run(self, *, observe_all: bool = False) -> RankObservation:
        """Run the case, and check the hooks' arguments."""
        observation = super().run(observe_all=observe_all)
        if observation.error is not None:
            return observation
        noted = self._not_the_reduced() if self.accumulated else self._not_the_own()
        texts = tuple(Remark(index, "calls of parameter hooks", f"the hook on {text}") for index, text in noted)
        return observation.extended(RemarkedObservation, remarks=texts)

    def _model_of(self, case: Case, flags: Mapping[str, bool]) -> nn.Module:
        model = super()._model_of(case, flags)
        for fqn, parameter in self.adapter.named_parameters(model):
            if self.accumulated:
                parameter.register_post_accumulate_grad_hook(partial(self._after, fqn))
            else:
                parameter.register_hook(partial(self._multiplied, fqn))
                parameter.register_hook(lambda gradient: gradient * FACTOR)
        return model

    def _after(self, fqn: str, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        self.given.setdefault((self.index, fqn), []).append(None if grad is None else grad.detach().clone())

    def _multiplied(self, fqn: str, gradient: torch.Tensor) -> torch.Tensor:
        self.given.setdefault((self.index, fqn), []).append(gradient.detach().clone())
        return gradient * FACTOR

    def _not_the_reduced(self) -> Iterator[tuple[int, str]]:
        backwards = [index for index, operation in enumerate(self.case.program) if operation.runs_backward]
        for fqn, parameter in self.adapter.named_parameters(self.model):
            if not parameter.numel() or parameter.grad is None:
                continue
            for index in backwards:
                calls = self.given.get((index, fqn), [])
                if self.case.program[index].pending_after(False):
                    # Gradients stay local: an implementation shows them, or leaves the hook for the reduction.
                    if None in calls:
                        yield index, f"{fqn} was called without a gradient, in no_sync"
                elif len(calls) > 1:
                    yield index, f"{fqn} was called {len(calls)} times"
                elif not calls or calls[0] is None:
                    yield index, f"{fqn} {'found no gradient' if calls else 'was not called'}"
                elif index == backwards[-1] and not torch.equal(calls[0], parameter.grad):
                    yield index, f"{fqn} found a gradient that differs from the final one"

    def _not_the_own(self) -> Iterator[tuple[int, str]]:
        for index, operation in enumerate(self.case.program):
            for batch in operation.batches():
                grads, bound = models.gradients_of_rank(self.case, batch, self.rank)
                for fqn, grad in grads.items():
                    calls = self.given.get((index, fqn), [])
                    own = [call for call in calls if call is not None and call.shape == grad.shape]
                    in_parts = self.case.world.tensor_parallel > 1
                    if len(calls) != 1 or not (in_parts or (own and float((own[0].cpu() - grad).abs().max()) <= bound)):
                        yield index, f"{fqn} was not called once with this rank's own gradient ({len(calls)} calls)"


OWN_GRADIENT = scaled(
    FACTOR**2,
    job=rank_jobs.run_as,
    arguments=(ParameterHooksProgram, {}),
    review=review_remarks,
    besides="what the hooks on parameters return",
)


class AddingHooksProgram(ParameterHooksProgram):
    """A program whose hook on each parameter adds one, in the first backward, to the parameter whose hook ran before it.

    What is added runs after what was there, from the next backward on.
    """

    def __init__(self, case: Case, adapter: Adapter, rank: int) -> None:
        super().__init__(case, adapter, rank)
        self.order: dict[str, list[tuple[int, str]]] = {}
        self.added: dict[str, torch.Tensor] = {}
        self.last: dict[str, torch.Tensor] = {}

    def _model_of(self, case: Case, flags: Mapping[str, bool]) -> nn.Module:
        model = RankProgram._model_of(self, case, flags)
        for fqn, parameter in self.adapter.named_parameters(model):
            parameter.register_hook(partial(self._first, fqn, parameter))
        return model

    def _first(self, fqn: str, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if fqn not in self.order:
            for other, earlier in self.last.items():
                earlier.register_hook(partial(self._second, other))
            self.added |= self.last
            self.last = {fqn: parameter}
        self.order.setdefault(fqn, []).append((self.index, "first"))
        return gradient * FACTOR

    def _second(self, fqn: str, _gradient: torch.Tensor) -> None:
        self.order[fqn].append((self.index, "second"))

    def _not_the_own(self) -> Iterator[tuple[int, str]]:
        backwards = [index for index, operation in enumerate(self.case.program) if operation.runs_backward]
        due = [(backwards[0], "first"), *((index, name) for index in backwards[1:] for name in ("first", "second"))]
        if not self.added:
            yield backwards[0], "every parameter was not called"
        for fqn in self.added:
            if self.order[fqn] != due:
                yield (
                    due[-1][0],
                    f"{fqn}, and what was added, were called in the order {self.order[fqn]}, expected {due}",
                )


ADDED_IN_BACKWARD = scaled(
    FACTOR,
    job=rank_jobs.run_as,
    arguments=(AddingHooksProgram, {}),
    review=review_remarks,
    besides="what the hooks on parameters return",
)


class ZeroingProgram(RankProgram):
    """A program whose hooks make every gradient zero, of either sign, as multiplication by a mask of zeros does."""

    def _model_of(self, case: Case, flags: Mapping[str, bool]) -> nn.Module:
        model = super()._model_of(case, flags)
        for _, parameter in self.adapter.named_parameters(model):
            parameter.register_hook(lambda gradient: gradient.abs() * -0.0)
        return model


class StepsInBackward(RankProgram):
    """A program whose hooks step and clear each parameter as soon as its gradient is there, with an optimizer of its own.

    There is no other optimizer, and nothing else clears: where no hook runs, nothing is trained.
    """

    def build_optimizer(self) -> None:
        """Build none."""

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Leave gradients as the hooks left them."""

    def _model_of(self, case: Case, flags: Mapping[str, bool]) -> nn.Module:
        model = super()._model_of(case, flags)
        for _, parameter in self.adapter.named_parameters(model):
            optimizer = optimizers.build_optimizer(case, [parameter])
            parameter.register_post_accumulate_grad_hook(partial(_step, optimizer))
        return model


def _step(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    optimizer.step()
    parameter.grad = None


class EarlyHooksProgram(RankProgram):
    """A program whose parameters have hooks before they are wrapped, as those have that a module's `__init__` registers."""

    accumulated = False
    """Whether hooks run after accumulation and change `.grad`; else they return another gradient."""

    def _setup(self, case: Case, module: nn.Module) -> Setup:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                continue
            if self.accumulated:
                parameter.register_post_accumulate_grad_hook(_multiply_grad)
            else:
                parameter.register_hook(lambda gradient: gradient * FACTOR)
        return super()._setup(case, module)


def _multiply_grad(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(FACTOR)


EARLY, EARLY_AFTER_ACCUMULATION = (
    scaled(
        FACTOR,
        job=rank_jobs.run_as,
        arguments=(EarlyHooksProgram, {"accumulated": accumulated}),
        besides="a hook on each parameter",
    )
    for accumulated in (False, True)
)

ZEROED = scaled(0.0, job=rank_jobs.run_as, arguments=(ZeroingProgram, {}), besides="a hook on each parameter")
AFTER_ACCUMULATION = RunMode(rank_jobs.run_as, (ParameterHooksProgram, {"accumulated": True}), review=review_remarks)
STEPS_IN_BACKWARD = RunMode(rank_jobs.run_as, (StepsInBackward, {}))
