"""What does a rank see of a training loop that it does not know? Public hooks see it, step by step.

A step ends when an optimizer's `step` begins. Nothing of the loop is changed; what is seen explains a difference and
never decides whether there is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_testing.base import compat
from fsdp_testing.cases.records import AutogradEvent, CollectiveEvent, Event
from fsdp_testing.cases.records.tolerance import UNIT_ROUNDOFF
from fsdp_testing.explain.trace.recorder import TraceRecorder
from fsdp_testing.ranks.ledger import interception

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
DIGESTED = 65536
"""Elements of a tensor that are digested: weights that differ do so everywhere, and hashing all of them takes time."""

REDUCING = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """What happened until one optimizer step.

    Attributes:
        backwards: Backward passes.
        reduced: For each backward pass whether as many elements were reduced, from its beginning to the next one's (or
            to the step), as there are gradients.
        local: Forwards of a model that is not to synchronise.
        seed: `torch.initial_seed()` at the first forward.
        drew: Whether the default generator moved between the first forward and the step.
        dropout: Digest of its state at the first active dropout layer; empty without one.
        weights: Digest of the weights before the step.
        gradient_norm: Norm of the gradients that the optimizer is given on this rank.
        gathered: Whether parameters were gathered: then weights and gradients here are shards.
        roundoff: Unit roundoff of the narrowest dtype that gradients or parameters have, or autocast computes in.
        agreed: Whether all ranks are given the same gradients of what they share, so that none of them lacks a reduction.
    """

    backwards: int
    reduced: tuple[bool, ...]
    local: int
    seed: int
    drew: bool
    dropout: str
    weights: str
    gradient_norm: float
    gathered: bool
    roundoff: float = 0.0
    agreed: bool = False


class Witness:
    """Sees one run of the loop on one rank."""

    def __init__(self) -> None:
        self.steps: list[StepEvidence] = []
        self._events = TraceRecorder(lambda: len(self.steps))
        self._start_step()

    def _start_step(self) -> None:
        self._first_event = len(self._events)
        self._seed = torch.initial_seed()
        self._generator = ""
        self._dropout = ""
        self._local = 0
        self._roundoff = 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """See everything while the context lasts."""
        with ExitStack() as stack:
            stack.enter_context(interception.listen(self._events.collective))
            stack.enter_context(self._watch_backward())
            for handle in (
                register_module_forward_pre_hook(self._before_forward),
                register_optimizer_step_pre_hook(self._before_step),
            ):
                stack.callback(handle.remove)
            yield

    @contextmanager
    def _watch_backward(self) -> Iterator[None]:
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            if not compat.in_backward():
                self._events.autograd("", "pre_backward")
            original(*args, **kwargs)

        setattr(torch.autograd, "backward", backward)  # noqa: B010 - for the length of the run; every backward calls it
        try:
            yield
        finally:
            setattr(torch.autograd, "backward", original)  # noqa: B010 - as above

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        if compat.in_backward():
            return  # activations are computed again
        if not self._generator:
            self._seed, self._generator = torch.initial_seed(), _generator_digest()
        if isinstance(module, DROPOUTS) and module.training and module.p > 0 and not self._dropout:
            self._dropout = _generator_digest()
        if getattr(module, "require_backward_grad_sync", True) is False:
            self._local += 1
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self._roundoff = max(self._roundoff, _roundoff(torch.get_autocast_dtype(device)))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        def read() -> None:
            # An optimizer or tensor of a kind that nobody thought of must not end a loop that is only watched.
            with suppress(Exception):
                self._see_step(optimizer)
            self._start_step()

        return once_gradients_are_there(read, args, kwargs)

    def _see_step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [_local(p) for group in optimizer.param_groups for p in group["params"]]
        gradients = [_local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        events = self._events.events[self._first_event :]
        collectives = [event for event in events if isinstance(event, CollectiveEvent)]
        reduced = tuple(_reduced_after_each_backward(events, sum(gradient.numel() for gradient in gradients)))
        self.steps.append(
            StepEvidence(
                backwards=len(reduced),
                reduced=reduced,
                local=self._local,
                seed=self._seed,
                drew=bool(self._generator) and self._generator != _generator_digest(),
                dropout=self._dropout,
                weights=_digest(parameters),
                gradient_norm=float(sum(float(g.double().square().sum()) for g in gradients) ** 0.5),
                # Floating numbers: DDP gathers shapes when it is made.
                gathered=any("gather" in event.name and "float" in event.dtype for event in collectives),
                roundoff=max([self._roundoff, *(_roundoff(tensor.dtype) for tensor in [*parameters, *gradients])]),
            )
        )


def once_gradients_are_there(read: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `read` for an optimizer's step: now, or once the closure that the step was given has made the gradients.

    Args:
        read: Looks at what the step is given; called once.
        args: Of the step, with the optimizer.
        kwargs: Of the step.

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


def _reduced_after_each_backward(events: tuple[Event, ...], due: int) -> Iterator[bool]:
    begins = [index for index, event in enumerate(events) if isinstance(event, AutogradEvent)]
    for begin, end in zip(begins, [*begins[1:], len(events)]):
        between = [event for event in events[begin:end] if isinstance(event, CollectiveEvent)]
        yield sum(event.numel for event in between if event.name.startswith(REDUCING)) >= max(due, 1)


def _roundoff(dtype: torch.dtype) -> float:
    return UNIT_ROUNDOFF.get(str(dtype).removeprefix("torch."), 0.0)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; a DTensor says so itself."""
    shard = getattr(tensor, "to_local", None)
    return (shard() if callable(shard) else tensor).detach()


def _digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.reshape(-1)[:DIGESTED].cpu().double().numpy().tobytes())
    return found.hexdigest()[:12]


def _generator_digest() -> str:
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:12]
