"""Reads this rank's part of a training's models, and finds the parameters of the tensors that an optimizer steps.

An optimizer may step copies of a model's parameters, in another dtype, which the training copies back (Apex O2). A copy is
recognised by its values at its first step: those of one parameter. It then stands in the place of that parameter.
A tensor that gets a gradient from autograd but belongs to no model (a temperature beside the model) is a parameter of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_testing.adapters.protocol import Piece
from fsdp_testing.adapters.shared import pieces
from fsdp_testing.train.batches import local_part
from fsdp_testing.train.conventions import is_batch_norm
from fsdp_testing.train.deepspeed_engine import is_engine, unread
from fsdp_testing.train.holdings import (
    Held,
    Spans,
    block_in,
    buffers_of,
    held_by,
    is_rounded,
    moments_of,
    moments_of_tensors,
    named_ids,
    shares_in,
    spans_of,
    unreduced_in,
)
from fsdp_testing.train.quantities import Kind, Quantity
from fsdp_testing.train.spans import Span

_T = TypeVar("_T")
_PLAIN = (torch.Tensor, nn.Parameter)


def has_batch_norm(models: Iterable[nn.Module]) -> bool:
    """Whether a model in training has batch norms that look at one rank's rows alone."""
    return any(is_batch_norm(module) for model in models for module in model.modules())


class Receiver:
    """Stands for the optimizer of a rank that steps none and receives the weights that another rank has stepped.

    Args:
        models: Models of the rank.
        optimizers: Its unused optimizers: their tensors count as stepped; without any, everything trained does.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        trained = [p for model in models for p in model.parameters() if p.requires_grad]
        made = [p for optimizer in optimizers for p in _stepped(optimizer)]
        self.param_groups = [{"params": made or trained}]
        self.state: dict[torch.Tensor, dict[str, Any]] = {}


class Reader:
    """Reads the models of one rank, in place.

    Args:
        held_by: Returns the pieces of a model by name, given whether gradients are wanted; for a model of a known implementation
            its adapter reads more than the generic way.

    Attributes:
        models: In the order of their first forward.
        block: Number of elements per sum, for larger tensors; 1 if all elements are kept; 0 before a step.
        unreadable: Why parameters could not be read at the current step; empty if they were.
    """

    def __init__(self, held_by: Callable[..., Held] = held_by) -> None:
        self.models: list[nn.Module] = []
        self._met: list[nn.Module] = []
        self._held_by = held_by
        self.block = 0
        self.unreadable = ""
        self.left_out: dict[str, str] = {}
        self._copies: dict[str, torch.Tensor] = {}
        self._hooked = WeakIdKeyDictionary()
        self._outside: dict[int, torch.Tensor] = {}

    def add(self, model: nn.Module) -> bool:
        """Note a model; return whether it is new. A part of a known one, such as the module that DDP wraps, is not."""
        new = not any(model is part for known in self._met for part in known.modules())
        if new:
            self._met.append(model)
            self.models.append(model)
        return new

    def held(self, optimizer: torch.optim.Optimizer, *, gradients: bool = True) -> Held:
        """Return this rank's part of each parameter, or of its copy if the optimizer steps a copy."""
        held = dict(self._of_models(partial(self._held_by, gradients=gradients)))
        if self.models:
            self._find_copies(optimizer, held)
            return held | self._held_copies()
        listed = [(place, at, p) for place, g in enumerate(optimizer.param_groups) for at, p in enumerate(g["params"])]
        return self._read(
            lambda: {f"parameter {at} of group {group}": pieces.of_parameter(p) for group, at, p in listed}
        )

    def watch_outside(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Have autograd report which of the stepped tensors outside all models get gradients."""
        for tensor in [tensor for optimizer in optimizers for tensor in self._strange(optimizer)]:
            # Gradients of shards and flat copies are made by hand, and each rank may have its own.
            if tensor.is_leaf and tensor.requires_grad and type(tensor) in _PLAIN and tensor not in self._hooked:
                self._hooked[tensor] = len(self._hooked)
                tensor.register_hook(partial(self._see_outside, tensor))

    def _see_outside(self, tensor: torch.Tensor, _gradient: torch.Tensor) -> None:
        self._outside[self._hooked[tensor]] = tensor

    def _find_copies(self, optimizer: torch.optim.Optimizer, held: Held) -> None:
        # A tensor without a gradient is not stepped: it may be what a wrapper has replaced.
        for tensor in self._strange(optimizer):
            if tensor.grad is not None:
                free = (name for name in held if name not in self._copies and _same_values(held[name], tensor))
                name = next(free, None)
                if name is None and id(tensor) in map(id, self._outside.values()):
                    name = f"number {self._hooked[tensor]} outside of the model, of shape {list(tensor.shape)}"
                if name is not None:
                    self._copies[name] = tensor

    def _strange(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        if any(map(is_engine, self.models)):
            return []  # whose are the flat tensors that DeepSpeed steps it says itself
        known = {id(p) for model in self.models for p in model.parameters()} | {*map(id, self._copies.values())}
        return [p for p in _stepped(optimizer) if id(p) not in known]

    def counts(self, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """Return how many tensors the optimizer steps that are neither parameters nor copies of some, and how many in all."""
        stepped = _stepped(optimizer)
        masters = sum(len(unread(model, stepped)) for model in self.models if is_engine(model))
        return masters + len(self._strange(optimizer)) if self.models else 0, len(stepped)

    def stepped(self, optimizer: torch.optim.Optimizer, names: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the `names` that this optimizer steps; all of them where it steps anything else too."""
        ids = {id(p) for p in _stepped(optimizer)}
        known = self._of_models(named_ids) | {name: id(copy) for name, copy in self._copies.items()}
        own = {name for name, number in known.items() if number in ids}
        if any(map(is_engine, self.models)) or ids - {*known.values()} or not own <= {*names}:
            return names
        return {name: value for name, value in names.items() if name in own}

    def kept(self, held: Held, which: str) -> Spans:
        """Return what is kept of values or gradients."""
        # The first step decides, so that all steps keep the same sums.
        self.block = self.block or block_in(held.values())
        return {name: spans_of(parts, which, self.block) for name, parts in held.items()}

    def changed(self, held: Held, known: Spans) -> Spans:
        """Return the values that changed since they were last read, or were unknown."""
        return self.kept(
            {name: pieces for name, pieces in held.items() if is_changed(pieces, known.get(name))}, "value"
        )

    def present(self) -> Held:
        """Return this rank's part of the models now, with gradients."""
        return self._of_models(self._held_by)

    def waiting(self) -> Mapping[str, object]:
        """Return the parameters with a gradient that FSDP2 keeps on this rank, for a later backward to reduce."""
        return self._of_models(lambda model: dict.fromkeys(unreduced_in(model)), "gradients that wait to be reduced")

    def gradients(self) -> Spans:
        """Return the gradients of the models, as they are."""
        return self.kept({**self.present(), **self._held_copies()}, "grad")

    def in_models(self, *, whole: bool) -> Spans:
        """Return the parameters as the models themselves have them now; only those that are stepped as copies unless `whole`."""
        if not whole and not self._copies:
            return {}
        held = self._of_models(partial(self._held_by, gradients=False))
        return self.kept(held if whole else {name: held[name] for name in self._copies if name in held}, "value")

    def unreduced(self, held: Held) -> tuple[str, ...]:
        """Return the parameters whose gradient waits on this rank to be reduced."""
        # Tensor parallelism may lay a gradient out otherwise than its parameter.
        apart = [name for name, parts in held.items() if any(not part.reduced for part in parts) and not self.share()]
        return (*apart, *self.waiting())

    def share(self) -> str:
        """Return this rank's place along mesh axes by which parameters are sharded and that no FSDP gathers; empty without."""
        shares: dict[str, None] = {}
        for model in self.models:
            shares |= self._read(partial(shares_in, model), "how a mesh shares parameters")
        return ", ".join(shares)

    def moments(self, optimizer: torch.optim.Optimizer) -> dict[Quantity, tuple[Span, ...]]:
        """Return the optimizer's state of each parameter."""
        what = "the optimizer's state"
        copies = self._read(lambda: moments_of_tensors(self._copies, optimizer, self.block), what)
        states = self._of_models(lambda model: moments_of(model, optimizer, self.block), what) | copies
        return {
            Quantity(Kind.MOMENT, name, what): spans for name, state in states.items() for what, spans in state.items()
        }

    def buffers(self) -> Spans:
        """Return the buffers of the models that a checkpoint holds."""
        return self._of_models(lambda model: buffers_of(model, self.block), "buffers")

    def _held_copies(self) -> dict[str, tuple[Piece, ...]]:
        return {name: pieces.of_parameter(copy) for name, copy in self._copies.items()}

    def _of_models(self, read: Callable[[nn.Module], Mapping[str, _T]], what: str = "") -> dict[str, _T]:
        """Return what is read of each model, by name; names of a second model begin with its number."""
        # One on the meta device was called with weights that are held elsewhere (`torch.func.functional_call`).
        self.models = [model for model in self.models if not any(parameter.is_meta for parameter in model.parameters())]
        named = [(f"model {number}: " if number else "", model) for number, model in enumerate(self.models)]
        return self._read(
            lambda: {prefix + name: value for prefix, m in named for name, value in read(m).items()}, what
        )

    def _read(self, read: Callable[[], dict[str, _T]], what: str = "") -> dict[str, _T]:
        """Return what is read; if that fails, return nothing and keep the reason, for parameters or for `what`."""
        # An unforeseen kind of optimizer or tensor must not end a training that is only watched.
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            why = f"{type(error).__name__}: {error}"
            if what:
                self.left_out[what] = why
            else:
                self.unreadable = why
            return {}


def _stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _same_values(held: Sequence[Piece], tensor: torch.Tensor) -> bool:
    """Whether a tensor has the values of a parameter, in the parameter's dtype."""
    try:
        own = pieces.of_tensor(tensor)
    except Exception:  # noqa: BLE001 - of an unknown kind: then it is no copy
        return False
    pairs = [(one.value, two.value) for one, two in zip(held, own)]
    placed = [(p.start, p.stop, p.shape) for p in held] == [(p.start, p.stop, p.shape) for p in own]
    return placed and all(one is not None and two is not None and is_rounded(one, two) for one, two in pairs)


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, ...]]:
    """Return each number by which an optimizer is set, of every group: {"lr": (0.1,), "betas": (0.9, 0.999)}."""
    settings: dict[str, tuple[float, ...]] = {}
    for group in optimizer.param_groups:
        for name, value in group.items():
            numbers = value if isinstance(value, tuple) else (value,)
            single = all(n.numel() == 1 if isinstance(n, torch.Tensor) else type(n) in (int, float) for n in numbers)
            if name != "params" and single:
                settings[name] = settings.get(name, ()) + tuple(float(number) for number in numbers)
    return settings


def group_sizes_of(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Return how many elements each group of parameters has on this rank."""
    return tuple(
        sum(local_part(p).numel() for p in group["params"] if isinstance(p, torch.Tensor))
        for group in optimizer.param_groups
    )


def is_changed(held: Sequence[Piece], known: Sequence[Span] | None) -> bool:
    """Whether values have changed, or were unknown."""
    values = [piece.value for piece in held if piece.value is not None]
    return known is None or any(not span.equals(value) for span, value in zip(known, values))


def once_gradients_are_there(read: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `read` for an optimizer's step: now, or once the closure that the step was given has made the gradients.

    Args:
        read: Looks at what the step is given; called once.
        args: Positional arguments of the step, with the optimizer.
        kwargs: Keyword arguments of the step.

    Returns:
        Arguments for the step in place of these; None to leave them.
    """
    closure = closure_in(args, kwargs)
    if closure is None:
        read()
        return None
    waiting = [read]

    def evaluate() -> Any:
        value = closure()
        while waiting:
            waiting.pop()()
        return value

    return (args, {**kwargs, "closure": evaluate}) if "closure" in kwargs else ((args[0], evaluate, *args[2:]), kwargs)


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure that an optimizer's step was given, if any."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None
