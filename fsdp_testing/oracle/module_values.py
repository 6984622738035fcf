"""Records the inputs, parameters and outputs of every module call, on a rank and in one process, in order.

Forward hooks on the very modules that are wrapped, so that names are those of the unwrapped model whatever an
implementation makes of it. Only the program's own forwards are recorded: a recomputation in backward is not another call.
Observation may change how an implementation runs, so callers must check that the failure still shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Division, Setup
from fsdp_testing.cases.models import tensors_in
from fsdp_testing.cases.operations import Batch
from fsdp_testing.cases.records import UNIT_ROUNDOFF, Case, RankObservation
from fsdp_testing.oracle import models, oracle
from fsdp_testing.oracle.assemble import GatheredState
from fsdp_testing.oracle.disturbance import NO_DISTURBANCE, Disturbance
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.quantities import Expected
from fsdp_testing.oracle.replay import Replay
from fsdp_testing.oracle.stepping import DIRECTIONS
from fsdp_testing.oracle.tensors import largest as largest_of

INPUT, PARAMETER, OUTPUT, GRADIENT = "input", "parameter", "output", "gradient"


class Seen(NamedTuple):
    """One tensor of one call of a module.

    Attributes:
        operation: Index of the operation in whose forward the call was.
        forward: Which forward of the operation: its batch, and how many with the same batch were before it.
        rank: The rank whose inputs were used.
        module: Name in the unwrapped model; empty for the model itself.
        call: Index of the module's call in that forward.
        what: `input`, `parameter` (with which it computes), `output`, or `gradient` (of an output).
        part: Name of the parameter in the module, or place among the tensors of inputs or outputs.
    """

    operation: int
    forward: tuple[Batch, int]
    rank: int
    module: str
    call: int
    what: str
    part: str


Values = dict[Seen, torch.Tensor]


Modules = tuple[tuple[str, nn.Module, tuple[str, ...]], ...]


def modules_of(model: nn.Module) -> Modules:
    """Return the modules of an unwrapped model: name, module, and names of its own parameters."""
    return tuple(
        (name, inner, tuple(key for key, _ in inner.named_parameters(recurse=False)))
        for name, inner in model.named_modules()
    )


class ModuleWatch:
    """Records the calls of modules during forwards.

    Attributes:
        values: Recorded values, in order.
    """

    def __init__(self) -> None:
        self.values: Values = {}
        self._forwards: Counter[tuple[int, int, Batch]] = Counter()
        self._calls: Counter[str] = Counter()
        self._now: tuple[int, tuple[Batch, int], int] | None = None

    def __deepcopy__(self, memo: Any) -> ModuleWatch:
        # Copies of a model have its hooks, and report to the same place.
        return self

    def attach(self, modules: Modules) -> None:
        for name, inner, own in modules:
            inner.register_forward_pre_hook(partial(self._enter, name, own), with_kwargs=True)
            inner.register_forward_hook(partial(self._leave, name))

    @contextmanager
    def forward(self, operation: int, batch: Batch, rank: int) -> Iterator[None]:
        """Record the calls inside, as those of one forward."""
        key = operation, rank, batch
        self._now = operation, (batch, self._forwards[key]), rank
        self._forwards[key] += 1
        # Calls are counted within one forward, so that the same call has the same name on a rank and in one process.
        self._calls.clear()
        try:
            yield
        finally:
            self._now = None

    def _enter(self, name: str, own: tuple[str, ...], module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._now is None:
            return
        self._calls[name] += 1
        call = Seen(*self._now, name, self._calls[name] - 1, INPUT, "")
        for index, tensor in enumerate(tensors_in((args, kwargs))):
            self._note(call._replace(part=str(index)), tensor)
        for key in own:
            self._note(call._replace(what=PARAMETER, part=key), getattr(module, key, None))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._now is None:
            return
        for index, tensor in enumerate(tensors_in(output)):
            tensor_of = Seen(*self._now, name, self._calls[name] - 1, OUTPUT, str(index))
            self._note(tensor_of, tensor)
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._note, tensor_of._replace(what=GRADIENT)))

    def _note(self, key: Seen, tensor: Any) -> None:
        # A piece of a parameter is not what the module computes with; of two backwards the first is kept.
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
            self.values.setdefault(key, tensor.detach().clone())


# ------------------------------------------------------------------------------------------------------- on ranks


@dataclass(frozen=True, slots=True)
class WatchedObservation(RankObservation):
    """What a rank reports whose modules were watched."""

    modules: Mapping[Seen, Any] | None = None


class WatchedProgram(RankProgram):
    """A program on one rank whose modules are watched."""

    def __init__(self, case: Case, adapter: Adapter, rank: int) -> None:
        super().__init__(case, adapter, rank)
        self.watch = ModuleWatch()
        self._unwatched: Modules = ()

    def _setup(self, case: Case, module: nn.Module) -> Setup:
        # Names of parameters as they are before wrapping, which may take them away.
        self._unwatched = modules_of(module)
        return super()._setup(case, module)

    def call(self, batch: Any, **how: Any) -> models.Forwarded:
        """Run the wrapped model forward, recording what its modules compute."""
        # After wrapping: the implementation's hooks, which show whole parameters and change outputs, must come first.
        self.watch.attach(self._unwatched)
        self._unwatched = ()
        with self.watch.forward(self.index, batch, self.rank):
            return super().call(batch, **how)


# ---------------------------------------------------------------------------------------------------- in one process


class WatchedReplay(Replay):
    """The oracle's run of a program, with what its modules compute."""

    def __init__(
        self,
        case: Case,
        division: Division | None = None,
        disturbance: Disturbance = NO_DISTURBANCE,
        adopted: Mapping[int, GatheredState] | None = None,
    ) -> None:
        # Before the replay makes its replicas, which are watched as they are made.
        self.watch = ModuleWatch()
        super().__init__(case, division, disturbance, adopted)

    def _replica(self) -> nn.Module:
        replica = super()._replica()
        self.watch.attach(modules_of(replica))
        return replica

    def forward(self, rank: int, batch: Any, **how: Any) -> models.Forwarded:
        """Run the replica of `rank`, recording what its modules compute."""
        with self.watch.forward(self.index, batch, rank):
            return super().forward(rank, batch, **how)


def expect_modules(
    case: Case, division: Division | None, adopted: Mapping[int, GatheredState] | None
) -> dict[Seen, Expected]:
    """Return what every call of every module gives in one process, in order, with its bound.

    Bounds are those of the oracle: what a replay with displaced operands is apart, and where the oracle runs freely also
    its disturbance by the largest roundings, and the roundings of one element.

    Args:
        case: The case.
        division: How the implementation divides, if it tells.
        adopted: Its state after every operation, for a replay in lockstep; None for a free one.
    """
    roundings = 0 if adopted is not None else oracle.roundings_of(case)
    plain, disturbed = (
        WatchedReplay(case, division, disturbance, adopted)
        for disturbance in (NO_DISTURBANCE, Disturbance(case.seed, roundings, displaced=True))
    )
    for replay in (plain, disturbed):
        replay.run(observe_all=True)
    units = [models.roundoff(parameter.dtype) for parameter in plain.parameters.values()]
    largest: dict[str, float] = {}
    for key, value in plain.watch.values.items():
        largest[key.what] = max(largest.get(key.what, 0.0), largest_of(value))
    expected = {}
    for key, value in plain.watch.values.items():
        moved = disturbed.watch.values.get(key)
        apart = 0.0 if moved is None or moved.shape != value.shape else largest_of(moved.double() - value.double())
        unit = max([UNIT_ROUNDOFF.get(models.dtype_name(value.dtype), 0.0), *units])
        expected[key] = Expected(value, DIRECTIONS * apart + roundings * unit * largest[key.what])
    return expected
