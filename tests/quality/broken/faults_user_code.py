"""Faults in unusual backwards, and where users replace, copy or call parts alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from fault import fault
from faults_access import IgnoringAdapter, IgnoringToy, Replacing, ReplacingAdapter
from faults_kinds import WrappingAdapter, kind
from torch import nn
from toy import Toy, ToyAdapter
from toy_more import MoreAdapter, MoreToy

from fsdp_testing.cases.models import tensors_in


class Counting(Toy):
    """Knows how many backwards came since the last forward."""

    backwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.backwards = 0
        self.synchronized_forward = self.synchronize
        return super().forward(*args, **kwargs)

    def finish_backward(self) -> None:
        self.backwards += 1
        super().finish_backward()


@fault("backward.twice")
class SecondIsLocal(Counting):
    """Only the first backward after a forward is reduced (B159)."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        return mean if self.backwards == 1 else contribution


@fault("backward.outdated")
class StepsUnnoticed(Toy):
    """A step between forward and backward is not noticed: gradients are those of no weights."""

    def watch_versions(self, output: Any) -> None:
        pass


@fault("backward.outdated")
class StepsNoticedByOne(Toy):
    """Only the first rank notices it."""

    def watch_versions(self, output: Any) -> None:
        if self.rank == 0:
            super().watch_versions(output)


@fault("training.changed_in_forward")
class EditsAreLost(Toy):
    """What a forward changes of its own parameters is gone with the gathered copy."""

    def keep_edits(self, edited: set[str]) -> None:
        pass


@fault("training.changed_in_forward")
class EditsOfOneRank(Toy):
    """Only the first rank keeps what a forward changed of its piece."""

    def keep_edits(self, edited: set[str]) -> None:
        if self.rank == 0:
            super().keep_edits(edited)


class _Named(torch.autograd.Function):
    """An output whose graph leads to the shards, which no computation reads: backward of what they name is run by hand."""

    @staticmethod
    def forward(ctx: Any, toy: Naming, output: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        ctx.toy, ctx.output = toy, output
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, *tuple[None, ...]]:
        (inside, _), *ends = ctx.next_functions
        if not torch._C._will_engine_execute_node(inside):
            chosen = [end is not None and torch._C._will_engine_execute_node(end) for end, _ in ends]
            ctx.toy.backward_of(ctx.output, gradient, chosen)
        return None, gradient, *[None] * len(ends)


class Naming(Toy):
    """Gives shards that a backward names their gradients."""

    def watch_versions(self, output: Any) -> None:
        """A backward of a graph that was left is none of an outdated one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        linked = isinstance(output, torch.Tensor) and output.requires_grad
        with torch.enable_grad():
            return _Named.apply(self, output, *self.reached()) if linked else output

    def reached(self) -> list[torch.Tensor]:
        """What the graph leads to."""
        return list(self.shards.values())

    def backward_of(self, output: torch.Tensor, gradient: torch.Tensor, chosen: list[bool]) -> None:
        """Backward for the parameters whose shards were chosen."""
        wanted = [full for full, one in zip(self.full.values(), chosen) if one]
        torch.autograd.backward([output], [gradient], inputs=wanted)


class NamingAdapter(ToyAdapter):
    """Claims that a backward may name its inputs."""

    def __init__(self, toy: type[Toy], name: str) -> None:
        super().__init__(toy, name)
        self.capabilities = (self.capabilities | {"backward_inputs"}) - {"outdated_backward", "second_order"}


NAMING = NamingAdapter(Naming, "NAMING")


@kind(NamingAdapter, "backward.inputs")
class ShardsAreNotReached(Naming):
    """The graph leads to no shard: a backward that names shards gives nothing, silently."""

    def reached(self) -> list[torch.Tensor]:
        return []


@kind(NamingAdapter, "backward.inputs")
class OneShardIsNotReached(Naming):
    """The graph leads to all shards but one."""

    def reached(self) -> list[torch.Tensor]:
        *most, last = super().reached()
        return [*most, last.detach()]


@kind(NamingAdapter, "backward.one_input")
class OthersAreServedToo(Naming):
    """A backward that names one parameter gives all of them gradients."""

    def backward_of(self, output: torch.Tensor, gradient: torch.Tensor, chosen: list[bool]) -> None:
        super().backward_of(output, gradient, [True] * len(chosen))


@kind(NamingAdapter, "backward.one_input")
class OnlyAWholeSetIsReduced(Naming):
    """Gradients are reduced when all of them are there."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        return mean if len(self.sums) == len(self.full) else contribution


@fault("backward.after_no_sync")
class ForwardDecides(Counting):
    """Whether a backward is reduced was decided in forward (B160)."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        return mean if self.synchronized_forward else contribution


@fault("backward.penalty")
class GradientsAreConstants(Toy):
    """Parameters are gathered for the second time as constants: what gradients depend on is lost (B137)."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        super().accumulate(fqn, gradient if not gradient.requires_grad else gradient.detach())

    def queue(self, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("storage of size 0")
        super().queue(gradient)


@fault("backward.inner")
class InnerIsLocal(Toy):
    """A forward through the module inside finds the hooks gone (B161)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bypassed = False

    @property
    def module(self) -> Any:
        self.unshard()
        self.bypassed = True
        return self._inside

    def _inside(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        return contribution if self.bypassed else mean

    def reduce(self) -> None:
        super().reduce()
        self.bypassed = False


# ----------------------------------------------------------------------------------------------- parts


class PartsAdapter(WrappingAdapter):
    """Claims that parts may be replaced and called alone."""

    def __init__(self, toy: type[Toy], name: str) -> None:
        super().__init__(toy, name)
        self.capabilities |= {"modules_replaced", "parameters_replaced", "unit_alone"}

    def named_parameters(self, model: Any) -> list[tuple[str, nn.Parameter]]:
        model.adopt()
        return super().named_parameters(model)

    def build_optimizer(self, model: Any, make: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make([shard for _, shard in self.named_parameters(model)])
        return optimizer


class Parts(Toy):
    """Takes up parameters that it finds in the place of others, and gathers for a part that is called alone."""

    running = False

    def __init__(self, module: nn.Module, setup: Any) -> None:
        super().__init__(module, setup)
        for inner in module.modules():
            inner.register_forward_pre_hook(self.before)

    def before(self, module: nn.Module, inputs: Any) -> None:
        if not self.running:
            self.unshard()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.adopt()
        self.running = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.running = False

    def adopt(self) -> None:
        for fqn, parameter in self.inner.named_parameters():
            if parameter is not self.full[fqn]:
                self.full[fqn], self.shards[fqn] = parameter, self.make_shard(fqn, parameter)


PARTS = PartsAdapter(Parts, "PARTS")


@kind(PartsAdapter, "parts.module_replaced")
class KeepsToTheOldModule(Parts):
    """Trains a module that is no longer there; the new one stays each rank's own (B076)."""

    def adopt(self) -> None:
        pass


@kind(PartsAdapter, "parts.parameters_replaced")
class KeepsToTheOldParameter(Parts):
    """Gathers into the parameter that is there, from the shard of the one that was (B152)."""

    def adopt(self) -> None:
        self.full = dict(self.inner.named_parameters())


@kind(PartsAdapter, "parts.called_alone")
class AloneIsTheRoot(Parts):
    """A part that is called before the model is taken for the root: the model is not reduced any more."""

    rootless = False

    def before(self, module: nn.Module, inputs: Any) -> None:
        self.rootless = self.rootless or not self.running
        super().before(module, inputs)

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        return contribution if self.rootless else mean


class CopiesAdapter(MoreAdapter):
    """Claims that models can be copied."""

    def __init__(self, toy: type[Toy], name: str) -> None:
        assert issubclass(toy, MoreToy)
        super().__init__(toy, name)
        self.capabilities |= {"deep_copies"}


class Copies(MoreToy):
    """Is copied shard by shard."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self)(copy.deepcopy(self.inner, memo), self.setup)
        twin.load_shards(self.saved_shards())
        return twin


COPIES = CopiesAdapter(Copies, "COPIES")


@kind(CopiesAdapter, "conversion.copied")
class NeverCopied(MoreToy):
    """Refuses to be copied (B077)."""


@fault("conversion.dtype_later")
class CastTooLate(MoreToy):
    """`module.to(dtype)` after the first forward casts what is gathered alone (B078)."""

    ran = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.ran = True
        return super().forward(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = {fqn: shard.data for fqn, shard in self.shards.items()}
        super()._apply(fn, recurse)
        for fqn, shard in self.shards.items() if self.ran else ():
            shard.data = kept[fqn]
        return self


@kind(ReplacingAdapter, "summon.storage_replaced")
class StorageIsForgotten(Replacing):
    """What was edited in place is written back, new storage is not (B087)."""

    @contextmanager
    def full_parameters(self, *, writeback: bool) -> Iterator[Mapping[str, torch.Tensor]]:
        with super().full_parameters(writeback=writeback) as whole:
            self.shown = whole
            yield whole

    def taken_back(self) -> dict[str, torch.Tensor]:
        return dict(self.shown)


@kind(IgnoringAdapter, "wrapping.ignored_stepped")
class IgnoredCountsTwice(IgnoringToy):
    """Gradients of what is ignored are doubled."""

    def finish_backward(self) -> None:
        super().finish_backward()
        for parameter in self.outside.values():
            if parameter.grad is not None:
                parameter.grad.mul_(2)


class _Lent(Toy):
    """Keeps the inputs of its last forward, and writes to them once a backward is over."""

    lent: tuple[torch.Tensor, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.lent = tuple(tensors_in((args, kwargs)))
        return super().forward(*args, **kwargs)

    def finish_backward(self) -> None:
        super().finish_backward()
        for tensor in self.lent:
            tensor.data.zero_()


@fault("inputs.kept")
class WritesInputs(_Lent):
    """The memory of inputs is used for something else once a backward is over."""


@fault("inputs.kept_in_low_precision")
class RoundsInputsInPlace(MoreToy):
    """Inputs are rounded to the lower precision where they are."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            for tensor in tensors_in((args, kwargs)):
                if tensor.is_floating_point():
                    tensor.copy_(tensor.to(torch.bfloat16))
        return super().forward(*args, **kwargs)


@fault("inputs.kept")
class WritesNamedInputs(_Lent):
    """Only the memory of inputs that are passed by name is used for something else."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        self.lent = tuple(tensors_in(kwargs))
        return output
