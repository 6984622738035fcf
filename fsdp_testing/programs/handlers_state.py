"""What do the operations of `records.operations_state` do, to a wrapped model and to the oracle?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp_testing.checkers.quantities import Quantity
from fsdp_testing.programs import execute, models, one_process, user_code
from fsdp_testing.programs import replay as replays
from fsdp_testing.programs.execute import RankProgram, Values
from fsdp_testing.programs.pending import LocalGradients
from fsdp_testing.programs.replay import Replay, Results
from fsdp_testing.records import Batch, Case, Forward, ForwardBackward
from fsdp_testing.records.operations_state import (
    AssignData,
    Interrupt,
    Move,
    Reload,
    ReplaceParameters,
    SeveralForwards,
    UnshardFirst,
)


class Interruption(Exception):
    """What the user's own code raises in an `Interrupt`."""


def _order(operation: SeveralForwards) -> list[int]:
    places = list(range(len(operation.micro_batches)))
    return places[::-1] if operation.reverse else places


def _numbered(place: int, forwarded: models.Forwarded) -> Values:
    return {f"{name}.{place}": value for name, value in forwarded.values().items()}


def _interrupt_at(model: nn.Module, operation: Interrupt) -> Any:
    """Makes one module of `model` raise; returns the handle that ends it. Wrappers have children: they never count."""

    def fail(*_: object) -> None:
        raise Interruption("the user's own code raises")

    def fail_in_backward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(fail)

    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    chosen = leaves[operation.place % len(leaves)]
    if operation.backward:
        return chosen.register_forward_hook(fail_in_backward)
    return chosen.register_forward_pre_hook(fail)


# ----------------------------------------------------------------------------------------------- on the ranks


def _several_forwards(program: RankProgram, operation: SeveralForwards) -> Values:
    done = [program.call(batch) for batch in operation.micro_batches]
    values = {name: value for place, one in enumerate(done) for name, value in _numbered(place, one).items()}
    for place in _order(operation):
        program.backward(done[place].loss)
    return values


def _reload(program: RankProgram, operation: Reload) -> Values:
    adapter, model, optimizer = program.adapter, program.model, program.optimizer
    save: Any = getattr(adapter, f"{operation.form}_state_dict")
    load: Any = getattr(adapter, f"load_{operation.form}_state_dict")
    state: Any = save(model)
    # Compared as well: a rank that loads only what it saved itself does not see that the rest of it is wrong.
    whole = state if operation.form == "full" else {}
    values = {
        f"state.{fqn}": tensor.detach().clone() for fqn, tensor in whole.items() if isinstance(tensor, torch.Tensor)
    }
    with_optimizer = operation.optimizer and optimizer is not None
    saved = adapter.full_optimizer_state(model, optimizer) if with_optimizer and optimizer is not None else None
    flags = {name: parameter.requires_grad for name, parameter in adapter.named_parameters(model)}
    if operation.through is not None:
        carried = one_process.Saved(state, saved)
        carried = one_process.train_on(program.case, operation.through, carried, flags, steps=optimizer is not None)
        state, saved = carried.model, carried.optimizer
    adapter.finish(model)
    if operation.units is not None:
        # It stays the plan: a later reload that names none keeps this one.
        program.case = replace(program.case, wrapping=replace(program.case.wrapping, units=operation.units))
    case = replace(program.case, seed=program.case.seed + 1)
    module = models.build_model(case)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(flags.get(name, parameter.requires_grad))
    program.model = adapter.wrap(module, program.make_setup(case, module))
    load(program.model, state)
    if optimizer is not None:
        program.build_optimizer()
    if saved is not None and program.optimizer is not None:
        adapter.load_full_optimizer_state(program.model, program.optimizer, saved)
    return values


def _interrupt(program: RankProgram, operation: Interrupt) -> None:
    with suppress(Interruption):
        if operation.where == "summon":
            with program.adapter.full_parameters(program.model, writeback=True):
                raise Interruption("the user's own code raises")
        with program.adapter.no_sync(program.model) if operation.where == "no_sync" else nullcontext():
            _interrupted_pass(program, operation)
    program.zero_grad(set_to_none=True)


def _interrupted_pass(program: RankProgram, operation: Interrupt) -> None:
    handle = _interrupt_at(program.model, operation)
    try:
        program.backward(program.call(operation.batch).loss)
    finally:
        handle.remove()


def _unshard_first(program: RankProgram, operation: UnshardFirst) -> Values | None:
    for unit in operation.units:
        program.adapter.unshard(program.model, unit)
    for unit in operation.units if operation.reshard else ():
        program.adapter.reshard(program.model, unit)
    return execute.HANDLERS[ForwardBackward](program, ForwardBackward(operation.batch))


def _assign_data(program: RankProgram, operation: AssignData) -> Values:
    found = models.matching(program.adapter.named_parameters(program.model), operation.patterns)
    user_code.give_storage([parameter for _, parameter in found], operation.factor)
    with torch.no_grad():
        return program.call(operation.batch).values()


def _replace_parameters(program: RankProgram, operation: ReplaceParameters) -> None:
    with program.adapter.full_parameters(program.model, writeback=True) as full:
        chosen = dict(models.matching(full.items(), operation.patterns))
        user_code.replace_parameters(program.model, chosen, operation.factor)


def _move(program: RankProgram, operation: Move) -> None:
    program.model.to(next(program.model.parameters()).device)
    if operation.dtype is not None:
        program.model.to(models.dtype_of(operation.dtype))
        program.case = _in_dtype(program.case, operation.dtype)


def _in_dtype(case: Case, dtype: str) -> Case:
    """The case with inputs of another dtype."""
    return replace(case, model=replace(case.model, dtype=dtype))


# ----------------------------------------------------------------------------------------------- in the oracle


def _replay_several_forwards(replay: Replay, operation: SeveralForwards) -> Results:
    replay.refresh()
    values: Results = {}
    gradients: list[list[LocalGradients]] = []
    for place, batch in enumerate(operation.micro_batches):
        gradients.append([])
        for rank in range(replay.size):
            forwarded, own = replay.local_gradients(rank, batch)
            gradients[place].append(own)
            values |= {Quantity("result", name, "", rank): v for name, v in _numbered(place, forwarded).items()}
    for place in _order(operation):
        replay.begin_micro_batch()
        for rank, own in enumerate(gradients[place]):
            replay.accumulate(rank, own)
        replay.reduce_pending()
    return values


def _replay_reload(replay: Replay, operation: Reload) -> Results:
    for parameter in replay.parameters.values():
        parameter.grad = None
    held = {fqn: parameter.detach().clone() for fqn, parameter in replay.parameters.items()}
    optimizer, renewed = replay.optimizer is not None, not operation.optimizer
    if optimizer and renewed:
        replay.build_optimizer()
    if operation.through is not None:
        _replay_one_process(replay, operation.through)
        if optimizer and renewed:
            replay.build_optimizer()
    if operation.units is not None:
        for replica in replay.replicas:
            replay.disturbance.divided(replica, replace(replay.case.wrapping, units=operation.units))
    if operation.form != "full":
        return {}
    return {Quantity("result", f"state.{fqn}", "", rank): t for rank in range(replay.size) for fqn, t in held.items()}


def _replay_one_process(replay: Replay, batch: Batch) -> None:
    """A step on the inputs of one rank alone: nothing is averaged."""
    replay.refresh()
    gradients = replay.local_gradients(0, batch)[1].values
    largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    if replay.optimizer is not None:
        for fqn, gradient in gradients.items():
            moved = replay.disturbance.gradient(gradient, gradient.abs(), largest)
            replay.parameters[fqn].grad = moved.to(replay.parameters[fqn].dtype).clone()
        replay.optimizer.step()
        replay.disturbance.step(replay.parameters)
    for parameter in replay.parameters.values():
        parameter.grad = None
    with torch.no_grad():
        for replica in replay.replicas[1:]:
            for buffer, first in zip(replica.buffers(), replay.replicas[0].buffers()):
                buffer.copy_(first)


def _replay_interrupt(replay: Replay, operation: Interrupt) -> None:
    replay.refresh()
    for rank, replica in enumerate(replay.replicas if operation.where != "summon" else ()):
        # A forward that is interrupted has computed up to there: buffers may have changed. The backward changes none.
        handle = None if operation.backward else _interrupt_at(replica, operation)
        try:
            replay.forward(rank, operation.batch)
        except Interruption:
            pass
        finally:
            if handle is not None:
                handle.remove()
    for parameter in replay.parameters.values():
        parameter.grad = None


def _replay_unshard_first(replay: Replay, operation: UnshardFirst) -> Results | None:
    return replays.HANDLERS[ForwardBackward](replay, ForwardBackward(operation.batch))


def _replay_assign_data(replay: Replay, operation: AssignData) -> Results | None:
    with torch.no_grad():
        for _, parameter in models.matching(replay.parameters.items(), operation.patterns):
            parameter.mul_(operation.factor)
    # In training mode, as on the ranks; the handler of a forward with gradients builds a graph that nobody uses.
    return replays.HANDLERS[Forward](replay, Forward(operation.batch))


def _replay_replace_parameters(replay: Replay, operation: ReplaceParameters) -> None:
    with torch.no_grad():
        for _, parameter in models.matching(replay.parameters.items(), operation.patterns):
            parameter.mul_(operation.factor)


def _replay_move(replay: Replay, operation: Move) -> None:
    """Changes nothing, unless there is a dtype."""
    if operation.dtype is None:
        return
    replay.case = _in_dtype(replay.case, operation.dtype)
    dtype = models.dtype_of(operation.dtype)
    for fqn, parameter in replay.parameters.items():
        parameter.data = parameter.data.to(dtype)
        replay.compute[fqn].data = replay.disturbance.place(parameter.detach())
    for module in (replay.master, *replay.replicas):
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(owner, name, buffer.to(dtype))


ENGINE: dict[Any, Callable[[RankProgram, Any], Values | None]] = {
    SeveralForwards: _several_forwards,
    Reload: _reload,
    Interrupt: _interrupt,
    UnshardFirst: _unshard_first,
    AssignData: _assign_data,
    ReplaceParameters: _replace_parameters,
    Move: _move,
}
ORACLE: dict[Any, Callable[[Replay, Any], Results | None]] = {
    SeveralForwards: _replay_several_forwards,
    Reload: _replay_reload,
    Interrupt: _replay_interrupt,
    UnshardFirst: _replay_unshard_first,
    AssignData: _replay_assign_data,
    ReplaceParameters: _replay_replace_parameters,
    Move: _replay_move,
}

execute.HANDLERS.update(ENGINE)
replays.HANDLERS.update(ORACLE)
