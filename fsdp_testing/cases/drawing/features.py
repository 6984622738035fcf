"""What a drawn case may contain, and which capabilities an implementation must claim for it.

A feature is a name that the generator asks about before it draws something. Each case is drawn with a random subset of
the features switched on (swarm testing: Groce et al., "Swarm Testing", ISSTA 2012), since two features that are always
on hide each other's defects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fsdp_testing.cases.drawing.choices import Choices
from fsdp_testing.cases.operations import ALL
from fsdp_testing.cases.records.axes import AXES, NUMBERS, OPTIMIZER, PLAN, STRATEGY, Axis
from fsdp_testing.cases.records.capabilities import CAPABILITIES
from fsdp_testing.errors import InvalidArgument


def _of(axes: Iterable[Axis]) -> dict[str, tuple[str, ...]]:
    return {name: needs for axis in axes for name, needs in axis.features.items()}


# The order decides which case a seed draws: add new features at the end.
_NEEDS: Mapping[str, tuple[str, ...]] = {
    **_of((STRATEGY, *PLAN)),
    # module trees
    "tree.group": (),
    "tree.residual": (),
    "tree.norm": (),
    "tree.conv": (),
    "tree.embed": (),
    "tree.offset": (),
    "tree.dropout": (),
    "tree.vector": (),
    "tree.one": (),
    "tree.large": (),
    "tree.scalar": ("zero_dim_parameters",),
    "tree.empty": ("empty_parameters",),
    "tree.strided": ("strided_parameters",),
    "tree.tied": ("shared_parameters",),
    "tree.alias": ("shared_parameters", "reused_modules"),
    "tree.calls": ("reused_modules",),
    "tree.branch": ("unused_parameters",),
    "tree.dropped": ("unused_parameters",),
    "tree.container": ("container_outputs",),
    "tree.opaque": ("container_outputs", "opaque_outputs"),
    "tree.view": ("inplace_on_output",),
    "tree.keeps": ("loss_bypasses_output",),
    "tree.buffer": ("buffers",),
    "tree.frozen": ("frozen_parameters",),
    "tree.mixed_dtype": (),
    "model.zoo": (),
    **_of((NUMBERS, OPTIMIZER, *AXES)),
    # micro-batches
    "batch.one_row": (),
    "batch.uneven": ("uneven_batches",),
    "batch.empty": ("uneven_batches",),
    "batch.scale": (),
    "batch.usage": ("unused_parameters",),
    "batch.usage_differs": ("unused_parameters", "unused_parameters_differ"),
    **{name: needs for operation in ALL for name, needs in operation.features.items()},
    "dtype.low": (),
}

FEATURES: dict[str, frozenset[str]] = {name: frozenset(needs) for name, needs in _NEEDS.items()}
"""Every feature with the capabilities that it needs."""

# Without several units little of an implementation runs at all.
_COMMON = ("wrap.nested", "tree.group", "op.step")

# Features that mean nothing without others; drawn together every second time.
_TOGETHER: Mapping[str, tuple[str, ...]] = {
    "batch.usage_differs": ("batch.usage", "tree.branch", "tree.group"),
    "batch.usage": ("tree.branch", "tree.group"),
    "tree.branch": ("batch.usage", "tree.group"),
    "tree.opaque": ("tree.container", "tree.group"),
    "tree.container": ("tree.group",),
    "tree.calls": ("tree.group",),
    "tree.view": ("tree.group",),
    "tree.keeps": ("tree.group",),
    "tree.dropped": ("tree.group",),
    "op.reload_optimizer": ("op.reload",),
    "op.reload_plan": ("op.reload",),
    "op.reload_world": ("op.reload", "op.reload_optimizer"),
    "op.restore": ("op.save", "op.step"),
    "op.restore_optimizer": ("op.restore", "op.save"),
    "op.restore_sharded": ("op.restore", "op.save"),
    "precision.param": ("precision.reduce",),
    "precision.reduce": ("precision.param",),
    "precision.buffer": ("tree.buffer",),
    "op.interrupt": ("op.no_sync", "op.edit"),
}

# Common patterns of known defects; every third case has all features of one theme. Independent draws meet a defect that
# needs five features about once in a thousand cases.
_THEMES: tuple[tuple[str, ...], ...] = (
    ("batch.usage", "tree.branch", "tree.group", "op.zero_grad", "op.step"),
    ("batch.usage", "tree.branch", "tree.group", "op.no_sync", "wrap.nested"),
    ("tree.calls", "tree.group", "wrap.nested", "op.several_forwards"),
    ("tree.tied", "tree.alias", "tree.group", "wrap.nested", "op.edit", "op.reload"),
    ("op.save", "op.restore", "op.restore_optimizer", "op.step", "op.forward", "tree.group"),
    ("tree.container", "tree.view", "tree.keeps", "tree.dropped", "tree.group", "wrap.nested"),
    ("op.freeze", "tree.frozen", "op.forward", "op.eval", "op.step"),
    ("batch.empty", "batch.uneven", "op.no_sync", "op.zero_grad_zeros", "op.several_forwards"),
    ("op.forward", "op.eval", "op.no_grad", "op.step", "op.clip", "strategy.shard_grad_op"),
)
_THEME_ONE_IN = 3

_LOW = ("precision.param", "precision.reduce", "precision.buffer")

LATE = ("dtype.low",)
"""Drawn after everything else and outside swarms, so that the other cases of a seed stay as they were."""

# Features that make most others unreachable or slow, and are therefore switched on less often.
_RARE = frozenset({"model.zoo", "tree.large", *_LOW, "op.cast", *_of(axis for axis in AXES if axis.rare)})
_RARELY = 12

_WITHOUT_TENSOR_PARALLEL = frozenset(
    {
        "model.zoo",  # layouts are drawn for trees
        *_of(axis for axis in AXES if axis.over_one_axis),
        # How far roundings of 16 bits carry in a cut tree is unknown operation by operation; the suites judge such computation.
        *set(_LOW) - {"precision.reduce"},
        *LATE,
    }
)
"""Features that are not drawn when several ranks share one model."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a generator may draw.

    Attributes:
        capabilities: Claimed by the implementation; features that need others are not drawn.
        world_sizes: Numbers of ranks, the usual one first.
        max_operations: Longest program.
        excluded: Features that are switched off.
        tensor_parallel: How many ranks share one model.
    """

    capabilities: frozenset[str] = frozenset(CAPABILITIES)
    world_sizes: tuple[int, ...] = (2,)
    max_operations: int = 12
    excluded: frozenset[str] = frozenset()
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        unknown = sorted(self.excluded - set(FEATURES))
        if unknown:
            raise InvalidArgument(
                f"Scope.excluded: expected features out of {', '.join(FEATURES)}, got {unknown}. Correct the names."
            )
        if not self.world_sizes or min(self.world_sizes) < 1 or self.max_operations < 1:
            raise InvalidArgument(
                f"Scope: expected world sizes of at least 1 and at least one operation, got {self.world_sizes} and "
                f"{self.max_operations}. Give world_sizes=(2,)."
            )
        odd = [size for size in self.world_sizes if self.tensor_parallel < 1 or size % self.tensor_parallel]
        if odd:
            raise InvalidArgument(
                f"tensor_parallel: expected a number that divides every world size, got {self.tensor_parallel} for {odd}. "
                "Give a multiple of it as world size."
            )
        if self.tensor_parallel > 1 and "tensor_parallel" not in self.capabilities:
            raise InvalidArgument(
                "tensor_parallel: expected an implementation that claims `tensor_parallel`, got one that does not. "
                "Leave the axis out."
            )

    def available(self) -> tuple[str, ...]:
        """Return the features that may be switched on."""
        off = self.excluded | (_WITHOUT_TENSOR_PARALLEL if self.tensor_parallel > 1 else frozenset())
        return tuple(name for name, needs in FEATURES.items() if needs <= self.capabilities and name not in off)

    def not_claimed(self) -> dict[str, frozenset[str]]:
        """Return the features that cannot be drawn, each with the capabilities that are not claimed."""
        # Any tree has parameters of sizes that the number of ranks may not divide.
        of_trees = {name: {"uneven_parameters"} if name.startswith("tree.") else set() for name in FEATURES}
        lacking = {name: (needs | of_trees[name]) - self.capabilities for name, needs in FEATURES.items()}
        return {name: needs for name, needs in lacking.items() if needs}


@dataclass(frozen=True, slots=True)
class Swarm:
    """The features that are switched on for one case."""

    on: frozenset[str]
    scope: Scope = field(default_factory=Scope)

    def __contains__(self, name: str) -> bool:
        return name in self.on

    def among(self, names: Iterable[str]) -> list[str]:
        """Return the `names` that are on."""
        return [name for name in names if name in self.on]


class SwarmDrawer:
    """Draws swarms; computes the available features once."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        available = tuple(name for name in scope.available() if name not in LATE)
        self._available = frozenset(available)
        self._base = [name for name in available if name in _COMMON]
        self._usual = [name for name in available if name not in _RARE and name not in _COMMON]
        self._rare = [name for name in available if name in _RARE]
        self._themes = [kept for theme in _THEMES if len(kept := [n for n in theme if n in self._available]) > 1]

    def draw(self, choices: Choices) -> Swarm:
        """Draw a subset: about a quarter or a half of the usual features, each rare one once in twelve times."""
        mask = choices.subset(len(self._usual), sparse=not choices.chance(2))
        on = [name for place, name in enumerate(self._usual) if mask >> place & 1]
        on += [name for name in self._base if not choices.chance(4)]
        on += [name for name in self._rare if choices.chance(_RARELY)]
        if self._themes and choices.chance(_THEME_ONE_IN):
            on += choices.pick(self._themes)
        for name in [name for name in on if name in _TOGETHER]:
            if choices.chance(2):
                on += [other for other in _TOGETHER[name] if other in self._available]
        return Swarm(frozenset(on), self.scope)
