"""Splits a gradient into its terms: one for each backward of each rank and each use of the parameter, in one process.

Each call of a module computes with its own view of each parameter, and the gradient of that view is the contribution of
that call. All other uses form the rest of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.records import Case
from fsdp_testing.oracle import models
from fsdp_testing.oracle.assemble import GatheredState
from fsdp_testing.oracle.reduction import LocalGradients
from fsdp_testing.oracle.replay import Replay

Use = tuple[str, int]
"""The module that used a parameter, and which of its calls in that forward it was; `("", -1)` for any other use."""

ELSEWHERE: Use = ("", -1)


@dataclass(frozen=True, slots=True)
class GradientTerm:
    """What one backward on one rank added to gradients.

    Attributes:
        operation: Index of the operation in the program.
        micro_batch: Index of the micro-batch in the operation.
        rank: The rank whose inputs were used.
        uses: By FQN and use, in float64, shaped as the parameter.
    """

    operation: int
    micro_batch: int
    rank: int
    uses: dict[str, dict[Use, torch.Tensor]]


def gradient_terms(
    case: Case, last: int, adopted: Mapping[int, GatheredState] | None = None
) -> tuple[GradientTerm, ...]:
    """Return the terms of every gradient that exists after operation `last`, in the order of their creation.

    Args:
        case: The case.
        last: Index of an operation.
        adopted: The implementation's state after every operation, for a replay in lockstep; None for a free one.
    """
    replay = _TermReplay(replace(case, program=case.program[: last + 1]), adopted)
    replay.run()
    return tuple(replay.terms)


class _TermReplay(Replay):
    """The oracle's run of a program, with the terms that it adds up."""

    def __init__(self, case: Case, adopted: Mapping[int, GatheredState] | None) -> None:
        super().__init__(case, adopted=adopted)
        self.terms: list[GradientTerm] = []
        self._uses: dict[int, dict[str, dict[Use, torch.Tensor]]] = {}

    def local_gradients(self, rank: int, batch: Any, **how: Any) -> tuple[models.Forwarded, LocalGradients]:
        watch = _Uses(self.replicas[rank], {id(p): fqn for fqn, p in self.compute.items()})
        with watch.watching():
            # Watched from forward to backward: a view reports its gradient when backward reaches it.
            forwarded, gradients = super().local_gradients(rank, batch, **how)
        # By identity, which lasts as long as the gradients: until `accumulate` or `interrupted` has noted them.
        self._uses[id(gradients)] = watch.divided(gradients)
        return forwarded, gradients

    def accumulate(self, rank: int, gradients: LocalGradients) -> None:
        super().accumulate(rank, gradients)
        self._note(rank, gradients)

    def interrupted(self, rank: int, batch: Any) -> None:
        self._note(rank, self.local_gradients(rank, batch)[1])

    def _note(self, rank: int, gradients: LocalGradients) -> None:
        before = sum(1 for term in self.terms if (term.operation, term.rank) == (self.index, rank))
        self.terms.append(GradientTerm(self.index, before, rank, self._uses[id(gradients)]))


@dataclass(slots=True)
class _Uses:
    """Watches which call of which module uses which parameter, in one forward and its backward."""

    replica: nn.Module
    names: dict[int, str]
    calls: dict[str, int] = field(default_factory=dict)
    seen: dict[str, dict[Use, torch.Tensor]] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let each call of a module compute with views of its own."""
        handles = []
        for path, module in self.replica.named_modules():
            own = {name: p for name, p in module._parameters.items() if p is not None and id(p) in self.names}
            if own:
                handles.append(module.register_forward_pre_hook(partial(self._enter, path, own), prepend=True))
                # Also after an exception: the replica runs again, with its own parameters.
                handles.append(module.register_forward_hook(partial(self._leave, own), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def divided(self, gradients: LocalGradients) -> dict[str, dict[Use, torch.Tensor]]:
        """Return each gradient by use; uses that no call of a module accounts for are one more, unless it is zero."""
        result: dict[str, dict[Use, torch.Tensor]] = {}
        for fqn, gradient in gradients.values.items():
            uses = self.seen.get(fqn, {})
            whole = gradient.double()
            rest = whole - sum(uses.values(), torch.zeros_like(whole))
            largest = max((float(use.abs().max()) for use in (whole, *uses.values()) if use.numel()), default=0.0)
            accounted = rest.numel() == 0 or float(rest.abs().max()) <= 1e-12 * largest
            result[fqn] = uses if accounted and uses else {**uses, ELSEWHERE: rest}
        return result

    def _enter(self, path: str, own: dict[str, nn.Parameter], module: nn.Module, args: Any) -> None:
        call = self.calls[path] = self.calls.get(path, -1) + 1
        for name, parameter in own.items():
            if parameter.requires_grad and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
                view = parameter.view_as(parameter)
                view.register_hook(partial(self._add, self.names[id(parameter)], (path, call)))
                module._parameters[name] = view  # type: ignore[assignment]  # for this call only

    def _leave(self, own: dict[str, nn.Parameter], module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(own)

    def _add(self, fqn: str, use: Use, gradient: torch.Tensor) -> None:
        uses = self.seen.setdefault(fqn, {})
        uses[use] = uses[use] + gradient.double() if use in uses else gradient.detach().double().clone()
