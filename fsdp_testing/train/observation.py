"""Observes what a rank holds and computes at each optimizer step of an unmodified training.

Models are those whose forward is called outermost with gradients; each parameter is reported as the spans that the rank
has of it (`held`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_testing.base import compat
from fsdp_testing.ranks.ledger.recorder import Call as Collective
from fsdp_testing.ranks.ledger.recorder import GroupIdentity
from fsdp_testing.train.batches import Backpropagated, Call, Computed, holds_a_loss, on_cpu
from fsdp_testing.train.clips import Clips
from fsdp_testing.train.deepspeed_engine import is_engine, see_steps
from fsdp_testing.train.disturbance import is_drawing
from fsdp_testing.train.evidence import Clues
from fsdp_testing.train.generators import Generators, generators_of, states
from fsdp_testing.train.holdings import stale_in
from fsdp_testing.train.param_hooks import ParameterHooks
from fsdp_testing.train.quantities import Kind, QuantitySpans, spans_of_kind
from fsdp_testing.train.reading import (
    Reader,
    Receiver,
    closure_in,
    group_sizes_of,
    has_batch_norm,
    once_gradients_are_there,
    settings_of,
)
from fsdp_testing.train.steps import StepSeen, named
from fsdp_testing.train.terms import TermCollector


class Observer:
    """Sees one training on one rank, step by step.

    Args:
        after_step: Called with the number of steps so far before what follows a step: a forward, a backward, a message or a
            step; may raise to end the training. Steps of several optimizers without a forward or backward between them are one.
        before_forward: Receives the arguments of each outermost forward and returns those to use.
        before_step: Called before each step with the number of steps so far; may raise to end the training.
        forward: Makes an outermost forward: receives the model, its `__call__`, arguments, and step, number of the forward in it
            and digests of its rows.
        reader: Reads what this rank holds.
    """

    def __init__(
        self,
        after_step: Callable[[int], None] = lambda _: None,
        before_forward: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]] = lambda a, k: (a, k),
        before_step: Callable[[int], None] = lambda _: None,
        forward: Callable[..., Any] = lambda _model, call, given, _place: call(*given[0], **given[1]),
        reader: Reader | None = None,
    ) -> None:
        self.steps: list[StepSeen] = []
        self.reader = reader or Reader()
        self.calls: list[Call] = []
        self._after_step, self._before_forward, self._about_to_step = after_step, before_forward, before_step
        self._forward = forward
        self._depth, self._in_closure, self.keep_calls, self.loss_scale = 0, False, False, 1.0
        self.on_training: Callable[[], object] = lambda: None
        """Called before each backward pass and each step."""
        self._running: nn.Module | None = None
        self._stepping = 0  # an optimizer may consist of others, whose steps are parts of its own
        self._computed, self._backpropagated = Computed(), Backpropagated()
        self._collector, self._clips = TermCollector(self.reader), Clips(self.reader)
        self._made_rates: WeakKeyDictionary[torch.optim.Optimizer, list[float]] = WeakKeyDictionary()
        self._generators: WeakKeyDictionary[nn.Module, Generators] = WeakKeyDictionary()
        self._schedules: WeakKeyDictionary[LRScheduler, int] = WeakKeyDictionary()
        self.ran: WeakSet[nn.Module] = WeakSet()
        self._hooks = ParameterHooks()
        self._ended, self._ignoring = 0, False
        self._steps_itself = self._receives = False
        self._open = self._follows = False  # the last step may be followed by that of another optimizer
        self._start_step()

    def _start_step(self) -> None:
        for part in (self._computed, self._backpropagated, self._collector, self._clips):
            part.end_step()
        self._step, self._clues, self._passes = StepSeen(), Clues(), 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        # A compiled loss function calls models: what stands around a call here is run, and the model inside it is traced.
        compat.keep_compiler_out("fsdp_testing.train")
        with ExitStack() as stack:
            for owner, name, replacement in (
                (nn.Module, "__call__", self._seeing_calls(nn.Module.__call__)),
                (torch.autograd, "backward", self._seeing_losses(torch.autograd.backward)),
                (torch.optim.Optimizer, "add_param_group", self._seeing_groups(torch.optim.Optimizer.add_param_group)),
                (LRScheduler, "__init__", self._seeing_schedules(LRScheduler.__init__)),
                (torch, "compile", _compiling_parts(torch.compile)),
            ):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
                replacement = self._seeing_clips(getattr(torch.nn.utils, name))
                for place in (torch.nn.utils, torch.nn.utils.clip_grad):
                    if hasattr(place, name):
                        stack.enter_context(mock.patch.object(place, name, replacement))
            for name in ("send", "recv", "isend", "irecv", "batch_isend_irecv"):
                replacement = self._seeing_messages(getattr(dist, name))
                for place in (dist, dist.distributed_c10d):
                    stack.enter_context(mock.patch.object(place, name, replacement))
            hook = register_module_forward_pre_hook(lambda *call: self._clues.see_forward(*call))  # noqa: PLW0108 - new each step
            stack.enter_context(self._collector.watch())
            stack.enter_context(self._hooks.watch())
            stack.callback(hook.remove)
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._end_step).remove)
            yield

    def see_collective(self, group: GroupIdentity, call: Collective, site: str) -> None:
        if str(call.what[0]).startswith("broadcast"):
            self._before_broadcast()
        self._clues.see_collective(group, call, site)

    def see_operation(self, name: str, results: list[torch.Tensor]) -> None:
        """Note an operation of a forward or of backward: whether it draws random numbers, and in which dtype."""
        if self._depth:
            self._step.drew |= is_drawing(name)
        if self._depth or compat.in_backward():
            self._clues.see_results(results)

    def _seeing_calls(self, original: Any) -> Any:
        observer = self

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - takes its place
            outermost = observer._depth == 0 and torch.is_grad_enabled() and module.training
            if observer._depth == 0 and not compat.in_backward():
                # One rank alone may evaluate, and the others wait for it: a training is ended where all ranks train.
                observer._close(may_end=outermost)
            if observer._depth or next(module.parameters(), None) is None or compat.in_backward():
                return original(module, *args, **kwargs)
            observer.ran.add(module)
            if not outermost:
                return observer._computed.silently(partial(original, module, *args, **kwargs), [args, kwargs])
            args, kwargs = observer._before_forward(args, kwargs)
            rows = observer._computed.row_digests([*args, *kwargs.values()])
            observer._backpropagated.see_given([args, kwargs])
            observer._step.rows += (rows,)
            observer._depth += 1
            observer._running = module
            if not observer._in_closure:
                observer._stepping, observer._ignoring = 0, False  # a step that raised has not ended
            try:
                place = len(observer.steps), len(observer._step.rows) - 1, rows
                with observer._generators_of(module).watch() as noted:
                    output = observer._forward(module, partial(original, module), (args, kwargs), place)
            finally:
                observer._depth -= 1
                observer._running = None
            observer._step.drew |= bool(noted)
            observer._computed.add(output, rows)
            observer._backpropagated.watch(place[1], output)
            observer._meet(module)
            if observer.keep_calls:
                observer.calls.append(Call(on_cpu(args), on_cpu(kwargs), holds_a_loss(output)))
            return output

        return __call__

    def _generators_of(self, model: nn.Module) -> Generators:
        """Return the random generators of a model as it was when it was run first."""
        if model not in self._generators:
            self._generators[model] = generators_of(model.modules())
        return self._generators[model]

    def _meet(self, model: nn.Module | None) -> None:
        """Read a model from now on: after its first run, or inside its forward, which may make whole steps (Lightning)."""
        if model is not None and self.reader.add(model):
            self._hook(model)

    def _hook(self, model: nn.Module) -> None:
        """Watch what each backward pass adds to gradients, before anything is reduced; for an engine, watch its own steps."""
        if is_engine(model):
            see_steps(
                model, lambda inner: self._before_step(inner, (inner,), {}), lambda inner: self._end_step(inner, (), {})
            )
        number = len(self.reader.models) - 1
        self._collector.add(model, f"model {number}: " if number else "")

    def _seeing_losses(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if compat.in_backward():  # reentrant checkpoints run parts of a pass inside it
                original(tensors, *args, **kwargs)
                return
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            self._meet(self._running)
            self._close()
            self.on_training()
            self._clues.see_backward(compat.factors_of(roots[0]) if self.keep_calls else ())
            self._clips.begin_pass()
            self.reader.watch_outside([*self._made_rates] if not self.steps else ())
            self._collector.begin_pass()
            if self.loss_scale != 1.0:
                with torch.enable_grad():
                    tensors = roots = [root * self.loss_scale for root in roots]
            original(tensors, *args, **kwargs)
            self._passes += 1
            # A tensor that is given a gradient is no loss: a pipeline stage gets it from the next one.
            given = kwargs.get("grad_tensors", args[0] if args else None)
            if given is None or all(tensor.numel() == 1 for tensor in roots):
                self._step.loss_dtype = roots[0].dtype
                self._step.losses += (float(sum(float(tensor.detach().double().sum()) for tensor in roots)),)

        return backward

    def _seeing_clips(self, original: Any) -> Any:
        def clip(*args: Any, **kwargs: Any) -> Any:
            self._clips.before()
            norm = original(*args, **kwargs)
            self._clips.after()
            # A DTensor's norm is a part of it on each rank; to ask for the whole would communicate.
            if type(norm) is torch.Tensor:
                self._step.norms += (float(norm),)
                self._step.norm_dtype = norm.dtype
                self._step.clip_limits += (float(kwargs.get("max_norm", args[1] if len(args) > 1 else torch.inf)),)
            return norm

        return clip

    def _seeing_groups(self, original: Any) -> Any:
        def add_param_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
            original(optimizer, group)
            rate = optimizer.param_groups[-1].get("lr", 0.0)
            self._made_rates.setdefault(optimizer, []).append(float(rate))

        return add_param_group

    def _seeing_schedules(self, original: Any) -> Any:
        def __init__(schedule: LRScheduler, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - takes its place
            original(schedule, *args, **kwargs)
            self._schedules[schedule] = schedule.last_epoch

        return __init__

    def _idle_schedules(self) -> tuple[str, ...]:
        parts = {id(part) for schedule in self._schedules for part in compat.schedules_in(schedule)}
        return tuple(
            type(schedule).__name__
            for schedule, begin in self._schedules.items()
            if schedule.last_epoch == begin and id(schedule) not in parts
        )

    def _seeing_messages(self, original: Any) -> Any:
        def pass_on(*args: Any, **kwargs: Any) -> Any:
            self._close()
            self._step.sent = True
            return original(*args, **kwargs)

        return pass_on

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._stepping += 1
        if self._stepping > 1:
            return None
        own = bool(self._step.rows or self._passes) or closure_in(args, kwargs) is not None
        self._ignoring = compat.makes_state_only() or not (own or self.steps)
        if self._ignoring:
            return None
        self._steps_itself, self._receives = True, False
        self._follows = self._open and not own
        if not self._follows:
            self._end_last()
            self._about_to_step(len(self.steps))
        given = once_gradients_are_there(lambda: self._see_given(optimizer), args, kwargs)
        self._in_closure = given is not None
        return given

    def _see_given(self, optimizer: torch.optim.Optimizer) -> None:
        reader, step = self.reader, self._step
        reader.unreadable, reader.left_out = "", {}
        step.evidence = self._clues.at_step(optimizer)
        step.terms = self._collector.at_step(optimizer)
        held = reader.held(optimizer)
        stepped = reader.stepped(optimizer, held)
        step.after = named(Kind.UNCLIPPED, self._clips.at_step())
        step.after |= named(Kind.GRADIENT, reader.kept(stepped, "grad"))
        step.unreduced = reader.unreduced(stepped)
        step.given = sum(any(piece.grad is not None for piece in pieces) for pieces in stepped.values())
        known = self.steps[-1].of(Kind.PARAMETER) if self.steps else {}
        step.before = named(Kind.PARAMETER, reader.changed(held, known))
        if len(self.steps) == self._follows:
            step.before |= reader.moments(optimizer)

    def _end_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._stepping -= 1
        if self._stepping:
            return
        self._in_closure = False
        if self._ignoring:
            self._ignoring = False
            return
        reader, step, held = self.reader, self._step, self.reader.held(optimizer, gradients=False)
        step.after |= named(Kind.PARAMETER, reader.kept(held, "value"))
        step.after |= reader.moments(optimizer) | named(Kind.BUFFER, reader.buffers())
        step.idle = self._backpropagated.idle()
        step.strange, step.stepped = reader.counts(optimizer)
        step.left_out = reader.left_out
        step.group_sizes = group_sizes_of(optimizer)
        step.settings, step.made_rates = settings_of(optimizer), tuple(self._made_rates.get(optimizer, ()))
        step.unreadable, step.batch_norm, step.share = reader.unreadable, has_batch_norm(reader.models), reader.share()
        step.generators, step.idle_schedules, step.idle_hooks = states(), self._idle_schedules(), self._hooks.idle()
        self.steps.append(self.steps.pop().followed_by(step) if self._follows else step)
        self._open = True
        self._start_step()

    def _before_broadcast(self) -> None:
        """Read gradients before this rank, which never steps, may receive weights that another rank has stepped for it."""
        inside = self._depth or self._stepping or compat.in_backward()
        if self._passes and not (inside or self._steps_itself or self._receives):
            self._receives = True
            self._see_given(self._receiver())

    def _receiver(self) -> Any:
        return Receiver(self.reader.models, [*self._made_rates])

    def _receive(self) -> None:
        """Count received weights as a step, if they changed."""
        self._receives, receiver = False, self._receiver()
        known = {
            **(self.steps[-1].of(Kind.PARAMETER) if self.steps else {}),
            **spans_of_kind(self._step.before, Kind.PARAMETER),
        }
        if self.reader.changed(self.reader.held(receiver, gradients=False), known):
            self._about_to_step(len(self.steps))
            self._stepping, self._follows = 1, False
            self._end_step(receiver, (), {})

    def _close(self, *, may_end: bool = True) -> None:
        """End the last step, if it is open: what follows it begins, and copies of weights have been copied back."""
        if not self._stepping:
            self._end_last(may_end=may_end)

    def _end_last(self, *, may_end: bool = True) -> None:
        self.finish(goes_on=True)
        if may_end and self._ended < len(self.steps):
            self._ended = len(self.steps)
            self._after_step(self._ended)

    def trains(self) -> bool:
        """Return whether a backward pass ran, or an optimizer made a step."""
        return bool(self.steps or self._passes)

    def idle_passes(self) -> int:
        """Return how many backward passes a training made if no optimizer steps and no weight moves."""
        return self._passes if not self.steps and self._collector.stands_still() else 0

    def settled(self) -> QuantitySpans:
        """Return the parameters that changed since the last step, as where weights are averaged after it."""
        # What an engine holds is read by collectives, and a rank may be the only one to end.
        if not self.steps or any(map(is_engine, self.reader.models)):
            return {}
        held = self.reader.held(self._receiver(), gradients=False)
        return named(Kind.PARAMETER, self.reader.changed(held, self.steps[-1].of(Kind.PARAMETER)))

    def finish(self, *, goes_on: bool = False) -> None:
        """Read the models after the last step, where the training goes on or has ended."""
        if self._receives:
            self._receive()
        if not self._open:
            return
        self._open = False
        last, reader = self.steps[-1], self.reader
        after = last.after | named(Kind.COPIED, reader.in_models(whole=False))
        # Tensors that are neither parameters nor copies have no known model: the models' count.
        if last.strange:
            after |= named(Kind.PARAMETER, reader.in_models(whole=True))
        stale = [name for model in reader.models for name in stale_in(model)] if goes_on else []
        self.steps[-1] = replace(last, after=after, stale=tuple(stale))


def _compiling_parts(original: Any) -> Any:
    """Return `torch.compile` that never asks for one whole graph: the observer of a call inside it breaks the graph."""

    def compile_parts(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "fullgraph": False})

    return compile_parts
