"""What each backward pass of a rank adds to gradients, seen before anything is reduced.

Seen of plain models, DDP, FSDP2 and engines of DeepSpeed. The gradients of the
first steps only, as elements, or as the sums that are kept of a larger model (`spans`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp_testing.adapters.shared import naming, pieces
from fsdp_testing.train.deepspeed_engine import is_engine
from fsdp_testing.train.holdings import unsharded_in, whole_parameters
from fsdp_testing.train.spans import block_of, span_of

_STEPS, _MOST_NUMBERS = 4, 2**20
"""Of how many steps terms are kept, and how many numbers of each."""
_FIRST_NUMBERS = 64


@dataclass(frozen=True, slots=True)
class Terms:
    """What the backward passes of one rank added to gradients until a step.

    Attributes:
        passes: By parameter, in one row, of each pass.
        cleared: Of each pass the parameters of which the gradient was gone before the next pass, or the step.
        moved: Of each pass whether weights changed before the next one.
        scale: By what a `GradScaler` multiplied the losses; 1 without, 0 where it was not the same of all.
        unscales: Whether the optimizer itself divides by it.
        engine: Whether an engine of DeepSpeed accumulates and reduces: nobody else touches its gradients.
        block: Elements to a sum; 1 where elements are kept.
    """

    passes: tuple[Mapping[str, torch.Tensor], ...] = ()
    cleared: tuple[frozenset[str], ...] = ()
    moved: tuple[bool, ...] = ()
    scale: float = 1.0
    unscales: bool = False
    engine: bool = False
    block: int = 1


def _has_no_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is None or not bool(parameter.grad.any())


class TermCollector:
    """Collects the terms of one step after another on one rank."""

    def __init__(self) -> None:
        self._weights_of: dict[str, torch.Tensor] = {}
        self._is_gone: dict[str, Callable[[], bool]] = {}
        self._engine = False
        self._block = 1
        self._steps = 0
        self._reset()

    def _reset(self) -> None:
        self._passes: list[dict[str, torch.Tensor]] = []
        self._cleared: list[set[str]] = []
        self._weights: list[list[torch.Tensor]] = []
        self._scales: set[float] = set()
        self._numbers = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """See what a `GradScaler` multiplies losses by, while the context lasts."""
        scale = torch.amp.GradScaler.scale

        def seen(scaler: Any, outputs: Any) -> Any:
            if scaler.is_enabled():
                self._scales.add(float(scaler.get_scale()))
            return scale(scaler, outputs)

        with mock.patch.object(torch.amp.GradScaler, "scale", seen):
            yield

    def add(self, model: nn.Module, prefix: str) -> None:
        """Hook the parameters of a model; their names begin with `prefix`."""
        self._engine |= is_engine(model)
        engine: Any = model
        named = naming.named_parameters(engine.module) if is_engine(model) else whole_parameters(model)
        leaves = [(name, p, p, partial(_has_no_gradient, p)) for name, p in named]
        for name, leaf, weights, is_gone in leaves or unsharded_in(model):
            if leaf.requires_grad and leaf.is_leaf:
                self._weights_of[prefix + name], self._is_gone[prefix + name] = weights, is_gone
                leaf.register_hook(partial(self._see, prefix + name))
        self._block = block_of(sum(parameter.numel() for parameter in model.parameters()))

    @property
    def _wanted(self) -> bool:
        return self._steps < _STEPS and self._numbers <= _MOST_NUMBERS

    def begin_pass(self) -> None:
        """Take note that a backward pass begins."""
        if self._wanted:
            self._look()
            self._passes.append({})
            self._cleared.append(set())
            self._weights.append(self._some_weights())

    def _see(self, name: str, gradient: torch.Tensor) -> None:
        if not self._wanted or not self._passes or type(gradient) is not torch.Tensor:
            return
        (piece,) = pieces.of_tensor(gradient)
        term, known = span_of(piece, gradient, self._block).values, self._passes[-1].get(name)
        self._numbers += term.numel()
        self._passes[-1][name] = term if known is None else known + term

    def _look(self) -> None:
        """Take note of the gradients that are gone since the last pass. An engine takes them away to add them up."""
        for name, is_gone in self._is_gone.items() if not self._engine else ():
            if is_gone():
                for terms, cleared in zip(self._passes, self._cleared):
                    if name in terms and bool(terms[name].any()):
                        cleared.add(name)

    def _some_weights(self) -> list[torch.Tensor]:
        return [p.detach().reshape(-1)[:_FIRST_NUMBERS].cpu().clone() for p in self._weights_of.values()]

    def at_step(self, optimizer: torch.optim.Optimizer) -> Terms:
        """Return the terms, when an optimizer is about to step."""
        if not self._wanted or not self._passes:
            return Terms()
        self._look()
        weights = [*self._weights, self._some_weights()]
        return Terms(
            tuple(self._passes),
            tuple(map(frozenset, self._cleared)),
            tuple(any(not torch.equal(one, two) for one, two in zip(*pair)) for pair in pairwise(weights)),
            self._scales.pop() if len(self._scales) == 1 else float(not self._scales),
            getattr(optimizer, "grad_scale", None) is not None,
            self._engine,
            self._block,
        )

    def end_step(self) -> None:
        """Begin the next step."""
        self._steps += bool(self._passes)
        self._reset()
