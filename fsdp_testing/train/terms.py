"""Records what each backward pass of a rank adds to gradients, before any reduction.

A parameter is whole where its module uses it, whoever shards it between uses: plain models, DDP, FSDP1, FSDP2, `fsdp_ref`,
engines of DeepSpeed. So the tensors that modules have right after their forward are hooked, leaves of autograd or views of
something larger. Only the first steps' gradients are recorded, as elements or, for a larger model, as sums (`spans`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_testing.adapters.shared import pieces
from fsdp_testing.base import compat
from fsdp_testing.oracle.models import roundoff
from fsdp_testing.train.deepspeed_engine import is_engine
from fsdp_testing.train.holdings import Held, Site, block_in, sites_in, spans_of
from fsdp_testing.train.reading import Reader

_STEPS, _MOST_NUMBERS = 4, 2**20
"""Of how many steps terms are kept, and how many numbers of each."""
_FIRST_NUMBERS = 64
_Weights = dict[tuple[str, int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Terms:
    """What the backward passes of one rank added to gradients until a step.

    Attributes:
        passes: For each pass, the additions by parameter, each in one row.
        cleared: For each pass, the parameters that had no gradient on this rank before the next pass, or the step.
        moved: Whether weights changed between each pass and the next.
        scale: The factor of a `GradScaler` for the losses; 1 without one, 0 if it was not the same for all.
        unscales: Whether the optimizer itself divides by it.
        engine: Whether an engine of DeepSpeed accumulates and reduces: no other code touches its gradients.
        block: Number of elements per sum; 1 if elements are kept.
        roundoff: Roundoff of the narrowest dtype that terms have.
    """

    passes: tuple[Mapping[str, torch.Tensor], ...] = ()
    cleared: tuple[frozenset[str], ...] = ()
    moved: tuple[bool, ...] = ()
    scale: float = 1.0
    unscales: bool = False
    engine: bool = False
    block: int = 1
    roundoff: float = 0.0


class TermCollector:
    """Collects the terms of one step after another on one rank; `reader` reads its models."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._sites: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of each hooked tensor
        self._names: dict[Site, set[str]] = {}
        self._views: set[str] = set()
        self._engine = False
        self._block = 1
        self._steps = 0
        self._reset()

    def _reset(self) -> None:
        self._passes: list[dict[str, torch.Tensor]] = []
        self._cleared: list[set[str]] = []
        self._weights: list[_Weights] = []
        self._scales: set[float] = set()
        self._numbers, self._roundoff = 0, 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """See parameters where modules use them, and what a `GradScaler` multiplies losses by, while the context lasts."""
        scale = torch.amp.GradScaler.scale

        def scale_seen(scaler: Any, outputs: Any) -> Any:
            if scaler.is_enabled():
                self._scales.add(float(scaler.get_scale()))
            return scale(scaler, outputs)

        handle = register_module_forward_hook(self._after_forward)
        try:
            with mock.patch.object(torch.amp.GradScaler, "scale", scale_seen):
                yield
        finally:
            handle.remove()

    def add(self, model: nn.Module, prefix: str) -> None:
        """Take note of the parameters of a model; their names begin with `prefix`."""
        self._engine |= is_engine(model)
        for site, name in sites_in(model).items():
            self._names.setdefault(site, set()).add(prefix + name)

    def _after_forward(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """Hook the parameters that a module and those below it use: a sharded module's own hooks come later."""
        if not self._wanted or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        for part in module.modules():
            for name, tensor in (*part._parameters.items(), *vars(part).items()):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not compat.is_transformed(tensor):
                    self._hook(tensor, (id(part), name))

    def _hook(self, tensor: torch.Tensor, site: Site) -> None:
        sites = self._sites.get(tensor)
        if sites is None:
            sites = self._sites[tensor] = []
            tensor.register_hook(partial(self._see, sites, tensor.is_leaf))
        if site not in sites:
            sites.append(site)

    @property
    def _wanted(self) -> bool:
        return self._steps < _STEPS and self._numbers <= _MOST_NUMBERS

    def begin_pass(self) -> None:
        if self._wanted:
            self._weights.append(self._look())
            self._passes.append({})
            self._cleared.append(set())

    def _see(self, sites: list[Site], is_leaf: bool, gradient: torch.Tensor) -> None:
        if not self._wanted or not self._passes or type(gradient) is not torch.Tensor:
            return
        names = {name for site in sites for name in self._names.get(site, ())}
        # A shard's own hooks may be run with the gradient of the whole, which the view of it was given already.
        names = names - self._views if is_leaf else names
        if not is_leaf:
            self._views |= names
        if not names:
            return
        (whole,) = spans_of(pieces.of_tensor(gradient), "value", self._block)
        term = whole.values
        self._roundoff = max(self._roundoff, roundoff(gradient.dtype))
        for name in names:
            known = self._passes[-1].get(name)
            self._numbers += term.numel()
            self._passes[-1][name] = term if known is None else known + term

    def _look(self) -> _Weights:
        """Take note of the gradients that are gone since the last pass; return some weights of each parameter.

        An engine takes gradients away to add them up, and to read what it holds communicates.
        """
        if self._engine:
            return {}
        held = self._reader.present()
        self._block = self._reader.block or block_in(held.values())
        waiting = self._reader.waiting() if self._passes else {}
        filled = {n for n, parts in held.items() if any(p.grad is not None and bool(p.grad.any()) for p in parts)}
        gone = {*held} - filled - {*waiting}
        for terms, cleared in zip(self._passes, self._cleared):
            cleared |= gone & {*terms}
        return _some_weights(held)

    def at_step(self, optimizer: torch.optim.Optimizer) -> Terms:
        """Return the terms, when an optimizer is about to step."""
        if not self._wanted or not self._passes:
            return Terms()
        weights = [*self._weights, self._look()]
        return Terms(
            tuple(self._passes),
            tuple(map(frozenset, self._cleared)),
            tuple(_is_moved(*pair) for pair in pairwise(weights)),
            self._scales.pop() if len(self._scales) == 1 else float(not self._scales),
            getattr(optimizer, "grad_scale", None) is not None,
            self._engine,
            self._block,
            self._roundoff,
        )

    def stands_still(self) -> bool:
        """Whether weights are still those that the first backward pass since the last step found, where these are known."""
        return bool(self._weights and self._weights[0]) and not _is_moved(
            self._weights[0], _some_weights(self._reader.present())
        )

    def end_step(self) -> None:
        self._steps += bool(self._passes)
        self._reset()


def summed_terms(passes: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the sum over all backward passes, by parameter."""
    summed: dict[str, torch.Tensor] = {}
    for terms in passes:
        for name, term in terms.items():
            summed[name] = summed[name] + term if name in summed else term
    return summed


def _some_weights(held: Held) -> _Weights:
    """Return the first numbers of each parameter by their place: a root of FSDP2 shows shards at one time only."""
    return {
        (name, piece.start, piece.stop): piece.value.detach().reshape(-1)[:_FIRST_NUMBERS].cpu().clone()
        for name, parts in held.items()
        for piece in parts
        if piece.value is not None
    }


def _is_moved(before: _Weights, after: _Weights) -> bool:
    return any(not torch.equal(values, after[place]) for place, values in before.items() if place in after)
