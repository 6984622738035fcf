"""The entries of an optimizer, by the original parameters and names that they belong to.

An optimizer keeps state per tensor that it steps: an original parameter (or this rank's piece of one), a whole flat
parameter, or a parameter that no unit holds. State dicts are keyed by names of the plain module. Nothing here
communicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref.annotations import units_under
from fsdp_ref.comm.groups import DataParallelGroups, default_group
from fsdp_ref.errors import FsdpRuntimeError, FsdpValueError, TrainingStateError, listing
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.naming import clean_tensor_name, join_fqn
from fsdp_ref.runtime.root import refuse_busy
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.storage.views import is_flattened

if TYPE_CHECKING:
    from fsdp_ref.storage.extension import ParameterExtension

_SIMPLE: Final = (bool, int, float, complex, str, type(None))

Key = int | str
"""What an optimizer's own state dict calls a parameter: its position, or a name."""


@dataclass(frozen=True, slots=True, eq=False)
class Original:
    """One parameter of the plain module.

    Attributes:
        names: its clean names below the model, that of state dicts first.
        param: the user's own parameter object.
        handle: the flat parameter that holds it; None outside of units.
        index: its place in the flat parameter.
    """

    names: tuple[str, ...]
    param: nn.Parameter
    handle: FlatHandle | None = None
    index: int = 0

    @property
    def name(self) -> str:
        """The name in state dicts."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the plain module."""
        if self.handle is None:
            return tuple(self.param.shape)
        extension = self.extension
        return self.handle.layout.params[self.index].shape if extension is None else tuple(extension.shape)

    @property
    def extension(self) -> ParameterExtension | None:
        """Its extension; None for a plain tensor."""
        return None if self.handle is None else self.handle.originals.extensions[self.index]

    @property
    def optimized(self) -> nn.Parameter:
        """The tensor that an optimizer steps for it."""
        handle = self.handle
        return self.param if handle is None or handle.config.use_orig_params else handle.flat_param


@dataclass(frozen=True, slots=True, eq=False)
class ModelIndex:
    """The parameters of a model as its state dicts know them.

    Attributes:
        originals: all of them, in the order of the plain module's.
        groups: the ranks that load and save together.
        device: where they communicate.
        shown: what ``named_parameters()`` calls a tensor now, by its ``id``.
    """

    originals: tuple[Original, ...]
    groups: DataParallelGroups
    device: torch.device
    shown: Mapping[int, str]

    @classmethod
    def of(cls, model: nn.Module, group: dist.ProcessGroup | None = None) -> ModelIndex:
        """Look through a model; ``group`` is that of a model whose units do not say.

        Raises:
            TrainingStateError: a unit is in forward, in backward, or summoned.
            FsdpRuntimeError: parameters were added to modules, or modules replaced, after their unit was made.
        """
        units = [(clean_tensor_name(name), unit) for name, _, unit in units_under(model)]
        remedy = "Save and load outside of forward, backward and summon_full_params."
        refuse_busy((unit for _, unit in units), "optimizer state", remedy)
        place = {module: number for number, module in enumerate(model.modules())}
        found = [each for prefix, unit in units for each in _held(prefix, unit, place)]
        gone = [original.name for number, original in found if number < 0]
        if gone:
            raise FsdpRuntimeError(
                "optimizer state: expected a model that has the parameters that its units manage, got a model without "
                f"{listing(gone)}, whose modules were replaced after sharding. Replace modules before sharding."
            )
        found += _outside(model, [unit for _, unit in units], place)
        found.sort(key=lambda each: each[0])
        first = units[0][1].config.groups if units else None
        groups = DataParallelGroups(group) if group is not None else first or DataParallelGroups(default_group())
        axes = [unit.config.groups.tensor for _, unit in units if unit.config.groups.tensor is not None]
        groups = replace(groups, tensor=axes[0] if axes else None)
        shown = {id(param): name for name, param in model.named_parameters()}
        here = next((param.device for param in model.parameters()), torch.device("cpu"))
        return cls(
            tuple(original for _, original in found), groups, units[0][1].config.device if units else here, shown
        )

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the one that ``rank0_only`` means."""
        return self.groups.is_first and (self.groups.tensor is None or self.groups.tensor.rank() == 0)

    @property
    def exchanged(self) -> list[dist.ProcessGroup]:
        """The groups through which all ranks of the model reach one another, one after the other."""
        found = (self.groups.tensor, self.groups.shard, self.groups.replicate)
        return [group for group in found if group is not None and group.size() > 1]

    def handles(self) -> list[tuple[FlatHandle, list[Original]]]:
        """Return the flat parameters with their originals, in the same order on all ranks."""
        found: dict[FlatHandle, list[Original]] = {}
        for original in self.originals:
            if original.handle is not None:
                found.setdefault(original.handle, []).append(original)
        return list(found.items())

    def by_name(self) -> dict[str, Original]:
        """Return every name, further names of tied parameters included."""
        return {name: original for original in self.originals for name in original.names}

    def steps(self) -> dict[int, list[Original]]:
        """Return the originals by the ``id`` of the tensor that an optimizer steps for them."""
        found: dict[int, list[Original]] = {}
        for original in self.originals:
            found.setdefault(id(original.optimized), []).append(original)
        return found


def refuse_in_no_sync(model: nn.Module) -> None:
    """Refuse to load while gradients are accumulated: they belong to the state before.

    Raises:
        TrainingStateError: inside ``no_sync``; the units are listed.
    """
    accumulating = [repr(unit) for _, _, unit in units_under(model) if not unit.sync_gradients]
    if accumulating:
        raise TrainingStateError(
            "optim_state_dict_to_load inside no_sync: expected units whose gradients are all reduced, got units that accumulate "
            f"them: {listing(accumulating)}. Load before or after."
        )


def _held(prefix: str, unit: Unit, place: Mapping[nn.Module, int]) -> Iterator[tuple[int, Original]]:
    handle = unit.handle
    for index, (spec, managed) in enumerate(zip(handle.layout.params, handle.originals.managed)):
        names = tuple(clean_tensor_name(join_fqn(prefix, name)) for name in spec.names)
        yield place.get(managed.sites[0].module, -1), Original(names, managed.param, handle, index)


def _outside(model: nn.Module, units: Sequence[Unit], place: Mapping[nn.Module, int]) -> Iterator[tuple[int, Original]]:
    """Return the parameters outside all units: ignored, replicated, or of modules around the units."""
    nearest = {module: unit for unit in units for module in unit.modules}
    names: dict[nn.Parameter, list[str]] = {}
    first: dict[nn.Parameter, int] = {}
    added: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if is_flattened(param):
                continue
            called = clean_tensor_name(join_fqn(path, name))
            if module in nearest and param not in nearest[module].ignored.params:
                added.append(called)
            names.setdefault(param, []).append(called)
            first.setdefault(param, place[module])
    if added:
        raise FsdpRuntimeError(
            "optimizer state: expected parameters that units hold or ignore, got parameters that were added to modules "
            f"of units after sharding: {listing(added)}. Add them before sharding; their gradients are not averaged."
        )
    for param, found in names.items():
        yield first[param], Original(tuple(dict.fromkeys(found)), param)


@dataclass(frozen=True, slots=True, eq=False)
class Stepped:
    """One tensor that an optimizer steps.

    Attributes:
        key: what the optimizer's own state dict calls it.
        originals: the original parameters in it: several for a flat parameter.
    """

    key: Key
    originals: tuple[Original, ...]

    @property
    def flat(self) -> FlatHandle | None:
        """The handle when this is a whole flat parameter."""
        handle = self.originals[0].handle
        return None if handle is None or handle.config.use_orig_params else handle

    @property
    def present(self) -> bool:
        """Whether this rank has elements of it to step, or all of an empty one."""
        first = self.originals[0]
        return self.flat is not None or first.handle is None or first.handle.originals.present(first.index)


def stepped_groups(index: ModelIndex, groups: Sequence[Sequence[Tensor]], *, named: bool) -> list[list[Stepped]]:
    """Return what an optimizer steps, by its parameter groups.

    Args:
        index: the model.
        groups: the tensors of each group.
        named: keys are the names that ``named_parameters()`` gives now, not positions.

    Raises:
        FsdpValueError: the optimizer has tensors that are no parameters of the model.
    """
    known = index.steps()
    found: list[list[Stepped]] = []
    positions: dict[int, int] = {}
    strangers: list[str] = []
    for number, group in enumerate(groups):
        found.append([])
        for param in group:
            position = positions.setdefault(id(param), len(positions))
            originals = known.get(id(param))
            if originals is None:
                strangers.append(f"number {position} of shape {tuple(param.shape)} in group {number}")
            else:
                key = index.shown.get(id(param), originals[0].name) if named else position
                found[-1].append(Stepped(key, tuple(originals)))
    if strangers:
        raise FsdpValueError(
            "optimizer state: expected an optimizer of parameters at or below the model, got others: "
            f"{listing(strangers)}. Pass the model that the optimizer was made for, after sharding it."
        )
    return found


def is_named(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's own state dict is keyed by names."""
    keys = [*state.get("state", {}), *(key for group in state.get("param_groups", ()) for key in group["params"])]
    return bool(keys) and isinstance(keys[0], str)


def same_values(one: Any, other: Any, *, copies: bool = False) -> bool:
    """Return whether two values, or two containers of them, are equal; tensors by dtype, shape and values. NaN equals NaN.

    Args:
        one: a setting of an optimizer, or an entry of its state.
        other: another.
        copies: objects of classes that are not known here came from another rank, and count as equal if their type is.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.allclose(one.detach().cpu(), other.detach().cpu(), rtol=0, atol=0, equal_nan=True)
    if isinstance(one, _SIMPLE) and isinstance(other, _SIMPLE):
        return bool(one == other) or all(isinstance(each, float) and math.isnan(each) for each in (one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_values(one[key], other[key], copies=copies) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same_values(*pair, copies=copies) for pair in zip(one, other))
    return copies or bool(one == other)
