"""What does a rank hold and compute at each optimizer step of a training that knows nothing of us?

Models are those whose forward is called outermost with gradients; each parameter is reported as the spans that the rank
has of it, read in place and without communication, whatever holds it: plain, DDP, FSDP1, FSDP2 and other DTensors, `fsdp_ref`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_testing.implementations.protocol import Piece
from fsdp_testing.implementations.shared import flat_pieces, naming, pieces

Span = tuple[tuple[int, ...], int, int, torch.Tensor]
"""Shape of the whole parameter, first and last element of this rank's part in row-major order, and these elements."""
Spans = dict[str, tuple[Span, ...]]

_MOST_ROWS = 4096
_STEPS_WITH_TERMS, _MOST_TERMS = 2, 2**20
"""Of how many steps the terms of gradients are kept, and how many numbers of each."""


@dataclass(frozen=True, slots=True)
class StepSeen:
    """One step of an optimizer on one rank.

    Attributes:
        losses: What each backward pass was called on (its sum, where that was no scalar).
        rows: Digest of each row that the outermost forwards were given, by forward.
        rates: Learning rate of each group of parameters.
        norms: What `clip_grad_norm_` returned.
        before: Parameters as the step found them; of the first step only.
        gradients: As the optimizer is given them; None counts as zeros.
        parameters: After the step.
        unreduced: Parameters whose sharded gradient had not been reduced.
        given: How many parameters have a gradient on this rank.
        strange: How many tensors the optimizer steps that belong to no model that was seen.
        stepped: How many it steps.
        unreadable: Why parameters could not be read; empty if they were.
        drew: Whether a forward drew random numbers from the default generator.
        batch_norm: Whether a model in training has batch norms that look at one rank's rows alone.
        terms: What each backward pass added to the gradients of parameters that are whole here; of the first steps only.
    """

    losses: tuple[float, ...]
    rows: tuple[tuple[str, ...], ...]
    rates: tuple[float, ...]
    norms: tuple[float, ...]
    before: Spans
    gradients: Spans
    parameters: Spans
    unreduced: tuple[str, ...]
    given: int
    strange: int
    stepped: int
    unreadable: str
    drew: bool
    batch_norm: bool
    terms: tuple[dict[str, torch.Tensor], ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """One outermost forward with gradients; `determines_loss` when a scalar that can be differentiated comes out of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    determines_loss: bool


class Observer:
    """Sees one training on one rank, step by step.

    Args:
        after_step: Called after each step with the number of steps so far; may raise to end the training.
        before_forward: Is given the arguments of each outermost forward and returns those to use.
    """

    def __init__(
        self,
        after_step: Callable[[int], None] = lambda _: None,
        before_forward: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]] = lambda a, k: (a, k),
    ) -> None:
        self.steps: list[StepSeen] = []
        self.models: list[nn.Module] = []
        self.calls: list[Call] = []
        self.keep_calls = False
        self._after_step, self._before_forward = after_step, before_forward
        self._depth = 0
        self._stepping = 0  # an optimizer may be made of others, whose steps are parts of its own
        self._start_step()

    def _start_step(self) -> None:
        self._losses: list[float] = []
        self._rows: list[tuple[str, ...]] = []
        self._norms: list[float] = []
        self._drew = False
        self._before: Spans = {}
        self._gradients: Spans = {}
        self._unreduced: tuple[str, ...] = ()
        self._given = 0
        self._unreadable = ""
        self._terms: list[dict[str, torch.Tensor]] = []
        self._numbers = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """See everything while the context lasts."""
        clip = torch.nn.utils.clip_grad_norm_
        with ExitStack() as stack:
            for owner, name, replacement in (
                (nn.Module, "__call__", self._seeing_calls(nn.Module.__call__)),
                (torch.autograd, "backward", self._seeing_losses(torch.autograd.backward)),
                (torch.nn.utils, "clip_grad_norm_", self._seeing_norms(clip)),
                (torch.nn.utils.clip_grad, "clip_grad_norm_", self._seeing_norms(clip)),
            ):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            for register, hook in (
                (register_optimizer_step_pre_hook, self._before_step),
                (register_optimizer_step_post_hook, self._end_step),
            ):
                stack.callback(register(hook).remove)
            yield

    def _seeing_calls(self, original: Any) -> Any:
        observer = self

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - takes its place
            outermost = observer._depth == 0 and torch.is_grad_enabled() and module.training
            if not outermost or next(module.parameters(), None) is None:
                return original(module, *args, **kwargs)
            args, kwargs = observer._before_forward(args, kwargs)
            observer._rows.append(row_digests([*args, *kwargs.values()]))
            state = torch.get_rng_state()
            observer._depth, observer._stepping = observer._depth + 1, 0
            try:
                output = original(module, *args, **kwargs)
            finally:
                observer._depth -= 1
            observer._drew |= not torch.equal(state, torch.get_rng_state())
            if not any(module is known for known in observer.models):
                observer.models.append(module)
                observer._hook(module)
            if observer.keep_calls:
                observer.calls.append(Call(on_cpu(args), on_cpu(kwargs), _holds_a_loss(output)))
            return output

        return __call__

    def _hook(self, model: nn.Module) -> None:
        """See what each backward pass adds to gradients, before anything is reduced."""
        if any(type(parameter) is not nn.Parameter for parameter in model.parameters()) or _is_sharded(model):
            return
        for name, parameter in _named(model):
            if parameter.requires_grad and parameter.is_leaf:
                parameter.register_hook(
                    partial(self._see_term, f"model {len(self.models) - 1}: " * (len(self.models) > 1) + name)
                )

    def _see_term(self, name: str, gradient: torch.Tensor) -> None:
        self._numbers += gradient.numel()
        if len(self.steps) >= _STEPS_WITH_TERMS or self._numbers > _MOST_TERMS:
            self._terms = []
            return
        while len(self._terms) <= len(self._losses):
            self._terms.append({})
        known = self._terms[-1].get(name)
        self._terms[-1][name] = gradient.detach().cpu().clone() if known is None else known + gradient.detach().cpu()

    def _seeing_losses(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            original(tensors, *args, **kwargs)
            self._losses.append(float(sum(float(tensor.detach().double().sum()) for tensor in found)))

        return backward

    def _seeing_norms(self, original: Any) -> Any:
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            # A DTensor's norm is a part of it on each rank; to ask for the whole would communicate.
            if type(norm) is torch.Tensor:
                self._norms.append(float(norm))
            return norm

        return clip_grad_norm_

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._stepping += 1
        if self._stepping > 1:
            return
        held = self._held(optimizer)
        self._gradients = {name: _spans(found, "grad") for name, found in held.items()}
        self._unreduced = tuple(name for name, found in held.items() if any(not piece.reduced for piece in found))
        self._given = sum(any(piece.grad is not None for piece in found) for found in held.values())
        if not self.steps:
            self._before = {name: _spans(found, "value") for name, found in held.items()}

    def _end_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._stepping -= 1
        if self._stepping:
            return
        parameters = {name: _spans(found, "value") for name, found in self._held(optimizer).items()}
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        known = {id(p) for model in self.models for p in model.parameters()}
        self.steps.append(
            StepSeen(
                losses=tuple(self._losses),
                rows=tuple(self._rows),
                rates=tuple(float(group.get("lr", 0.0)) for group in optimizer.param_groups),
                norms=tuple(self._norms),
                before=self._before,
                gradients=self._gradients,
                parameters=parameters,
                unreduced=self._unreduced,
                given=self._given,
                strange=sum(id(p) not in known for p in stepped) if self.models else 0,
                stepped=len(stepped),
                unreadable=self._unreadable,
                drew=self._drew,
                batch_norm=any(_is_batch_norm(module) for model in self.models for module in model.modules()),
                terms=tuple(self._terms) if self._numbers <= _MOST_TERMS else (),
            )
        )
        self._start_step()
        self._after_step(len(self.steps))

    def _held(self, optimizer: torch.optim.Optimizer) -> Mapping[str, tuple[Piece, ...]]:
        # An optimizer or tensor of a kind that nobody thought of must not end a training that is only watched.
        try:
            return self._pieces(optimizer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            self._unreadable = f"{type(error).__name__}: {error}"
            return {}

    def _pieces(self, optimizer: torch.optim.Optimizer) -> Mapping[str, tuple[Piece, ...]]:
        found: dict[str, tuple[Piece, ...]] = {}
        for number, model in enumerate(self.models):
            prefix = f"model {number}: " if number else ""
            found |= {prefix + name: held for name, held in held_by(model).items()}
        known = {id(p) for model in self.models for p in model.parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in known and not self.models:
                    found[f"parameter {place} of group {number}"] = pieces.of_parameter(parameter)
        return found


def held_by(model: nn.Module) -> dict[str, tuple[Piece, ...]]:
    """Return what this rank has of each parameter of a model, by original name; communicates nothing."""
    torch_fsdp, ours = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("fsdp_ref")
    if torch_fsdp is not None and any(isinstance(m, torch_fsdp.FullyShardedDataParallel) for m in model.modules()):
        from fsdp_testing.implementations.torch import fsdp1_flat

        found = dict(flat_pieces.local_pieces(model, fsdp1_flat.flat_units(model)))
    elif ours is not None:
        from fsdp_testing.implementations.ref import handle_pieces

        found = dict(flat_pieces.local_pieces(model, handle_pieces.flat_units(model)))
    else:
        found = pieces.of_parameters(naming.named_parameters(model))
    return {name: found[plain] for name, plain in zip(_outside(model, found), found)}


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a model that shards nothing, by original name."""
    found = dict(naming.named_parameters(model))
    return zip(_outside(model, found), found.values())


def _outside(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Names without what DDP puts into those of a part that it wraps."""
    inside = [f"{naming.original(n)}.module." for n, m in model.named_modules() if n and _is_replicated(m)]
    return [_without(inside, name) for name in names]


def _is_sharded(model: nn.Module) -> bool:
    """Whether a part of the model is of one of the packages that shard."""
    return any(type(module).__module__.startswith(("fsdp_ref", "torch.distributed.fsdp")) for module in model.modules())


def _is_replicated(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel)


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and module.training


def _without(wrappers: list[str], name: str) -> str:
    for prefix in wrappers:
        if name.startswith(prefix):
            return prefix.removesuffix("module.") + name.removeprefix(prefix)
    return name


def _spans(held: tuple[Piece, ...], which: str) -> tuple[Span, ...]:
    found = []
    for piece in held:
        tensor = getattr(piece, which)
        if tensor is None and which == "grad" and piece.value is not None:
            tensor = torch.zeros_like(piece.value)
        if tensor is not None:
            found.append((tuple(piece.shape), piece.start, piece.stop, tensor.detach().cpu().reshape(-1).clone()))
    return tuple(found)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested lists, tuples and mappings."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    return [found for part in tree for found in tensors_in(part)] if isinstance(tree, (list, tuple)) else []


def on_cpu(tree: Any) -> Any:
    """Return a copy of nested lists, tuples and mappings with detached tensors on the CPU."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, Mapping):
        return {key: on_cpu(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(on_cpu(part) for part in tree))
    return type(tree)(on_cpu(part) for part in tree) if isinstance(tree, (list, tuple)) else tree


def row_digests(tree: Any) -> tuple[str, ...]:
    """Return a digest of each row: of the first tensor with rows, and of all others with as many."""
    found = [tensor.detach().cpu() for tensor in tensors_in(tree) if tensor.ndim]
    rows = [tensor.contiguous() for tensor in found if len(tensor) == len(found[0])]
    if not rows:
        return ()
    raw = [tensor.reshape(len(tensor), -1).view(torch.uint8) if tensor.numel() else tensor for tensor in rows]
    return tuple(
        hashlib.blake2b(b"".join(part[row].numpy().tobytes() for part in raw), digest_size=8).hexdigest()
        for row in range(min(len(raw[0]), _MOST_ROWS))
    )


def _holds_a_loss(output: Any) -> bool:
    found = [getattr(output, "loss", None), *tensors_in(output)]
    return any(isinstance(one, torch.Tensor) and one.ndim == 0 and one.requires_grad for one in found)
