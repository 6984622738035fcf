"""What does a rank hold and compute at each optimizer step of a training that knows nothing of us?

Models are those whose forward is called outermost with gradients; each parameter is reported as the spans that the rank
has of it (`held`).
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_testing import compat
from fsdp_testing.implementations.protocol import Piece
from fsdp_testing.implementations.shared import pieces
from fsdp_testing.training_check.evidence import once_gradients_are_there
from fsdp_testing.training_check.held import (
    Held,
    Spans,
    block_in,
    buffers_of,
    held_by,
    moments_of,
    spans_of,
    unreduced_in,
    whole_parameters,
)
from fsdp_testing.training_check.spans import Span

_MOST_ROWS = 4096
_STEPS_WITH_TERMS, _MOST_TERMS = 2, 2**20
"""Of how many steps the terms of gradients are kept, and how many numbers of each."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StepSeen:
    """One step of an optimizer on one rank.

    Attributes:
        losses: What each backward pass was called on (its sum, where that was no scalar).
        loss_dtype: Their dtype.
        rows: Digest of each row that the outermost forwards were given, by forward.
        settings: Each number by which the optimizer is set ("lr", "weight_decay", ...), of every group of parameters.
        norms: What `clip_grad_norm_` returned.
        norm_dtype: Their dtype.
        before: Parameters as the step found them; of a later step those that were changed since the step before.
        moments_before: What the optimizer kept of parameters before it; of the first step only.
        unclipped: Gradients as the step's first clip was given them; empty without one.
        gradients: As the optimizer is given them; None counts as zeros.
        parameters: After the step.
        moments: What the optimizer keeps of each parameter after the step.
        buffers: Buffers of the models after the step, those that a checkpoint holds.
        unreduced: Parameters whose sharded gradient had not been reduced.
        given: How many parameters have a gradient on this rank.
        strange: How many tensors the optimizer steps that belong to no model that was seen.
        stepped: How many it steps.
        unreadable: Why parameters could not be read; empty if they were.
        drew: Whether a forward drew random numbers from the default generator.
        batch_norm: Whether a model in training has batch norms that look at one rank's rows alone.
        generators: Digest of the state of each random generator of this process after the step, by the package it belongs to.
        terms: What each backward pass added to the gradients of parameters that are whole here; of the first steps only.
    """

    losses: tuple[float, ...]
    loss_dtype: torch.dtype
    rows: tuple[tuple[str, ...], ...]
    settings: dict[str, tuple[float, ...]]
    norms: tuple[float, ...]
    norm_dtype: torch.dtype
    before: Spans
    moments_before: Spans
    unclipped: Spans
    gradients: Spans
    parameters: Spans
    moments: Spans
    buffers: Spans
    unreduced: tuple[str, ...]
    given: int
    strange: int
    stepped: int
    unreadable: str
    drew: bool
    batch_norm: bool
    generators: Mapping[str, str]
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
        before_step: Called before each step with the number of steps so far; may raise to end the training.

    Attributes:
        block: Elements to each sum that is kept of the models' larger tensors; 1 where all elements are; 0 before a step.
    """

    def __init__(
        self,
        after_step: Callable[[int], None] = lambda _: None,
        before_forward: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]] = lambda a, k: (a, k),
        before_step: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.steps: list[StepSeen] = []
        self.models: list[nn.Module] = []
        self.calls: list[Call] = []
        self.keep_calls = False
        self.block = 0
        self._after_step, self._before_forward, self._about_to_step = after_step, before_forward, before_step
        self._depth = 0
        self._stepping = 0  # an optimizer may be made of others, whose steps are parts of its own
        self._in_closure = False
        self._start_step()

    def _start_step(self) -> None:
        self._losses: list[float] = []
        self._loss_dtype = self._norm_dtype = torch.float64
        self._rows: list[tuple[str, ...]] = []
        self._norms: list[float] = []
        self._drew = False
        self._before: Spans = {}
        self._moments_before: Spans = {}
        self._unclipped: Spans = {}
        self._gradients: Spans = {}
        self._unreduced: tuple[str, ...] = ()
        self._given = 0
        self._unreadable = ""
        self._terms: list[dict[str, torch.Tensor]] = []
        self._numbers = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """See everything while the context lasts."""
        with ExitStack() as stack:
            for owner, name, replacement in (
                (nn.Module, "__call__", self._seeing_calls(nn.Module.__call__)),
                (torch.autograd, "backward", self._seeing_losses(torch.autograd.backward)),
            ):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
                replacement = self._seeing_clips(getattr(torch.nn.utils, name))
                for place in (torch.nn.utils, torch.nn.utils.clip_grad):
                    if hasattr(place, name):
                        stack.enter_context(mock.patch.object(place, name, replacement))
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._end_step).remove)
            yield

    def _seeing_calls(self, original: Any) -> Any:
        observer = self

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - takes its place
            outermost = observer._depth == 0 and torch.is_grad_enabled() and module.training
            if not outermost or next(module.parameters(), None) is None or compat.in_backward():
                return original(module, *args, **kwargs)
            args, kwargs = observer._before_forward(args, kwargs)
            observer._rows.append(row_digests([*args, *kwargs.values()]))
            state = torch.get_rng_state()
            observer._depth += 1
            if not observer._in_closure:
                observer._stepping = 0  # a step that raised has not ended
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
        prefix = f"model {len(self.models) - 1}: " if len(self.models) > 1 else ""
        for name, parameter in whole_parameters(model):
            if parameter.requires_grad and parameter.is_leaf:
                parameter.register_hook(partial(self._see_term, prefix + name))

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
            whole = not compat.in_backward()  # reentrant checkpoints run parts of a pass inside it
            original(tensors, *args, **kwargs)
            if whole:
                self._loss_dtype = found[0].dtype
                self._losses.append(float(sum(float(tensor.detach().double().sum()) for tensor in found)))

        return backward

    def _seeing_clips(self, original: Any) -> Any:
        def clip(*args: Any, **kwargs: Any) -> Any:
            if not self._unclipped:
                self._unclipped = self._kept(self._of_models(held_by), "grad")
            norm = original(*args, **kwargs)
            # A DTensor's norm is a part of it on each rank; to ask for the whole would communicate.
            if type(norm) is torch.Tensor:
                self._norms.append(float(norm))
                self._norm_dtype = norm.dtype
            return norm

        return clip

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._stepping += 1
        if self._stepping > 1:
            return None
        self._about_to_step(len(self.steps))
        given = once_gradients_are_there(lambda: self._see_given(optimizer), args, kwargs)
        self._in_closure = given is not None
        return given

    def _see_given(self, optimizer: torch.optim.Optimizer) -> None:
        held = self._held(optimizer)
        self._gradients = self._kept(held, "grad")
        waiting = self._of_models(lambda model: dict.fromkeys(unreduced_in(model), True))
        self._unreduced = (*(name for name, found in held.items() if any(not p.reduced for p in found)), *waiting)
        self._given = sum(any(piece.grad is not None for piece in found) for found in held.values())
        known = self.steps[-1].parameters if self.steps else {}
        self._before = {
            name: spans_of(found, "value", self.block)
            for name, found in held.items()
            if _is_changed(found, known.get(name))
        }
        if not self.steps:
            self._moments_before = self._of_models(lambda model: moments_of(model, optimizer, self.block))

    def _end_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._stepping -= 1
        if self._stepping:
            return
        self._in_closure = False
        parameters = self._kept(self._held(optimizer), "value")
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        known = {id(p) for model in self.models for p in model.parameters()}
        self.steps.append(
            StepSeen(
                losses=tuple(self._losses),
                loss_dtype=self._loss_dtype,
                rows=tuple(self._rows),
                settings=_settings(optimizer),
                norms=tuple(self._norms),
                norm_dtype=self._norm_dtype,
                before=self._before,
                moments_before=self._moments_before,
                unclipped=self._unclipped,
                gradients=self._gradients,
                parameters=parameters,
                moments=self._of_models(lambda model: moments_of(model, optimizer, self.block)),
                buffers=self._of_models(lambda model: buffers_of(model, self.block)),
                unreduced=self._unreduced,
                given=self._given,
                strange=sum(id(p) not in known for p in stepped) if self.models else 0,
                stepped=len(stepped),
                unreadable=self._unreadable,
                drew=self._drew,
                batch_norm=any(_is_batch_norm(module) for model in self.models for module in model.modules()),
                generators=_generators(),
                terms=tuple(self._terms) if self._numbers <= _MOST_TERMS else (),
            )
        )
        self._start_step()
        self._after_step(len(self.steps))

    def parameters(self) -> Spans:  # as they are now, of the models that were seen
        return self._kept(self._of_models(held_by), "value")

    def _kept(self, held: Held, which: str) -> Spans:
        # The first step decides, so that all steps keep the same sums.
        self.block = self.block or block_in(held.values())
        return {name: spans_of(found, which, self.block) for name, found in held.items()}

    def _held(self, optimizer: torch.optim.Optimizer) -> Held:
        if self.models:
            return self._of_models(held_by, needed=True)
        listed = [(place, at, p) for place, g in enumerate(optimizer.param_groups) for at, p in enumerate(g["params"])]
        return self._read(
            lambda: {f"parameter {at} of group {group}": pieces.of_parameter(p) for group, at, p in listed}, needed=True
        )

    def _of_models(self, read: Callable[[nn.Module], Mapping[str, _T]], *, needed: bool = False) -> dict[str, _T]:
        """Return what is read of each model by name; those of a second one have its number before them."""
        named = [(f"model {number}: " if number else "", model) for number, model in enumerate(self.models)]
        return self._read(
            lambda: {prefix + name: found for prefix, m in named for name, found in read(m).items()}, needed=needed
        )

    def _read(self, read: Callable[[], dict[str, _T]], *, needed: bool) -> dict[str, _T]:
        # An optimizer or tensor of a kind that nobody thought of must not end a training that is only watched.
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            if needed:
                self._unreadable = f"{type(error).__name__}: {error}"
            return {}


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, ...]]:
    """Return each number by which an optimizer is set, of every group: {"lr": (0.1,), "betas": (0.9, 0.999)}."""
    found: dict[str, tuple[float, ...]] = {}
    for group in optimizer.param_groups:
        for name, value in group.items():
            numbers = value if isinstance(value, tuple) else (value,)
            single = all(n.numel() == 1 if isinstance(n, torch.Tensor) else type(n) in (int, float) for n in numbers)
            if name != "params" and single:
                found[name] = found.get(name, ()) + tuple(float(number) for number in numbers)
    return found


def _is_changed(held: Sequence[Piece], known: Sequence[Span] | None) -> bool:
    """Whether values are others than they were known to be, or not known."""
    values = [piece.value for piece in held if piece.value is not None]
    return known is None or any(not span.equals(value) for span, value in zip(known, values))


def _generators() -> dict[str, str]:
    numpy = sys.modules.get("numpy")
    states = {"torch": torch.get_rng_state().numpy().tobytes(), "random": repr(random.getstate()).encode()}
    if numpy is not None:
        states["numpy"] = repr(
            [part.tobytes() if hasattr(part, "tobytes") else part for part in numpy.random.get_state()]
        ).encode()
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and module.training


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
