"""Layout of a model on any number of ranks, by the same planning that wrapping uses: no process, no collective, no memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from fsdp_ref.build.attach import collection_paused
from fsdp_ref.build.ignored import Ignored
from fsdp_ref.build.plan import PlannedUnit, make_plan
from fsdp_ref.build.targets import choose_targets
from fsdp_ref.errors import ConfigError
from fsdp_ref.handle.flatten import build_layout
from fsdp_ref.layout import ShardMap
from fsdp_ref.wrap import CustomPolicy


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """One flat parameter on all ranks.

    Attributes:
        name: FQN of the unit's module; "" is the root.
        class_name: Class of the unit's module.
        dtype: Dtype of all its parameters.
        element_bytes: Bytes of one element.
        shards: Offsets of the parameters (`shards.layout`) and what each rank holds of them.
    """

    name: str
    class_name: str
    dtype: str
    element_bytes: int
    shards: ShardMap


def unit_layouts(
    model: nn.Module, *, world_size: int, units: Sequence[str] = (), aligned: bool = True
) -> tuple[UnitLayout, ...]:
    """Lay out every unit of `model` that has parameters, the root first.

    Args:
        model: Any module; the meta device is enough.
        world_size: Ranks in the shard group.
        units: Which submodules become units besides the root: FQN patterns (`blocks.*`) or class names (`Block`).
        aligned: Start each parameter at a multiple of 16 bytes, as for original parameters; else pack them.

    Raises:
        ConfigError: A pattern that matches no submodule, parameters of several dtypes in one unit.
    """
    names = {module: name for name, module in model.named_modules() if name}
    known = {*names.values(), *(type(module).__name__ for module in names)}
    globs = [pattern for pattern in units if pattern not in known]
    unused = [pattern for pattern in globs if not any(fnmatchcase(name, pattern) for name in names.values())]
    if unused:
        raise ConfigError(
            f"--unit: expected FQN patterns or class names of submodules of {type(model).__name__}, got {unused}. "
            f"Names are such as {', '.join(list(names.values())[:8]) or 'none: it has no submodules'}."
        )
    exact = {*units} & known

    def is_unit(module: nn.Module) -> bool:
        name = names.get(module)
        return name is not None and (
            bool(exact & {name, type(module).__name__}) or any(fnmatchcase(name, pattern) for pattern in globs)
        )

    policy = CustomPolicy(is_unit)
    ignored = Ignored()
    with collection_paused():
        plan = make_plan(model, choose_targets(model, policy, {}, ignored), {}, ignored)
        return tuple(_laid_out(unit, world_size, aligned=aligned) for unit in plan.units if unit.params)


def _laid_out(unit: PlannedUnit, world_size: int, *, aligned: bool) -> UnitLayout:
    dtypes = sorted({str(param.param.dtype) for param in unit.params})
    if len(dtypes) > 1:
        raise ConfigError(
            f"plan: expected parameters of one dtype in unit {unit.fqn or 'root'!r}, got {', '.join(dtypes)}. "
            "Wrap modules of different dtypes as separate units (--unit)."
        )
    dtype = unit.params[0].param.dtype
    layout = build_layout(unit.params, dtype if aligned else None, world_size)
    name = type(unit.module).__name__
    return UnitLayout(unit.fqn, name, dtypes[0].removeprefix("torch."), dtype.itemsize, ShardMap(layout, world_size))
