"""Draws a whole case: features first, then model, plan, strategy, numbers and program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_testing.cases.drawing.choices import Choices
from fsdp_testing.cases.drawing.features import LATE, Scope, Swarm, SwarmDrawer
from fsdp_testing.cases.drawing.layouts import Layouts, draw_layouts
from fsdp_testing.cases.drawing.low_precision import stored_low
from fsdp_testing.cases.drawing.normal_form import legal_case, needs_of_case
from fsdp_testing.cases.drawing.operation_drawer import OperationDrawer
from fsdp_testing.cases.drawing.trees import draw_tree
from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.models.model import ASKED_ALONE, LARGE
from fsdp_testing.cases.models.tree import unit_names
from fsdp_testing.cases.models.tree_schema import parameters
from fsdp_testing.cases.records import Case, ModelSpec, PolicySpec, WorldSpec, WrappingPlan
from fsdp_testing.cases.records.axes import AXES, NUMBERS, STRATEGY

_ATTEMPTS = 20
_STORED_LOW_ONE_IN = 10


@dataclass(frozen=True, slots=True)
class DrawnModel:
    """A model with the facts that the rest of a case must know."""

    spec: ModelSpec
    units: tuple[str, ...]
    patterns: tuple[str, ...]
    branches: int
    frozen: tuple[str, ...] = ()


class CaseDrawer:
    """Draws cases within a scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._swarms = SwarmDrawer(scope)
        self._draws_low = set(LATE) <= set(scope.available())
        # Batch statistics of one row are undefined, and without rows there is no gradient: neither is a useful case.
        drawn = [m for m in MODELS.values() if m.name != "batch_norm" and not m.traits & {LARGE, ASKED_ALONE}]
        self._zoo = [m for m in drawn if m.needs <= scope.capabilities]

    def draw(self, choices: Choices) -> Case:
        """Draw a legal case that needs only claimed capabilities."""
        for _ in range(_ATTEMPTS):
            case = self.shape(self.draw_raw(choices))
            if needs_of_case(case) <= self.scope.capabilities:
                is_low = self._draws_low and choices.chance(_STORED_LOW_ONE_IN)
                return self.shape(stored_low(case, choices)) if is_low else case
        return self._plain(choices)

    def shape(self, case: Case) -> Case:
        """Return the nearest legal case to `case` that can be compared fairly."""
        return legal_case(case, self.scope.capabilities)

    def swarm(self, choices: Choices) -> Swarm:
        """Draw the features of one case."""
        return self._swarms.draw(choices)

    def draw_raw(self, choices: Choices) -> Case:
        """Draw a case that may still need unclaimed capabilities."""
        swarm = self.swarm(choices)
        size = choices.pick(self.scope.world_sizes) if choices.chance(4) else self.scope.world_sizes[0]
        # Ranks that hold one model together have the same inputs.
        parts = self.scope.tensor_parallel
        case = Case(ModelSpec("tree"), WorldSpec(size, tensor_parallel=parts), ())
        case = NUMBERS.draw(case, choices, swarm)
        model = self._model(choices, swarm, case.model.dtype, low=case.mixed_precision is not None)
        operations = OperationDrawer(choices, swarm, size // parts, model.patterns, model.branches, model.units)
        case = replace(STRATEGY.draw(case, choices, swarm), model=model.spec)
        program, seed = operations.program(self.scope.max_operations), choices.integer(0, 2**16 - 1)
        plan = replace(_wrapping(choices, swarm, model), layouts=self._layouts(choices, model))
        case = replace(case, program=program, seed=seed, wrapping=plan)
        for axis in AXES:
            if axis not in (NUMBERS, STRATEGY):  # the model and the program depend on these
                case = axis.draw(case, choices, swarm)
        return case

    def _plain(self, choices: Choices) -> Case:
        """The fallback after twenty draws that needed too much: one layer, one micro-batch, one step."""
        swarm = Swarm(frozenset(), self.scope)
        spec = ModelSpec("tree", tree={"width": 4, "nodes": [{"kind": "linear", "name": "a"}]})
        program = OperationDrawer(choices, swarm, 1, ("*",), 0).program(3)
        world = WorldSpec(self.scope.world_sizes[0], tensor_parallel=self.scope.tensor_parallel)
        return self.shape(STRATEGY.draw(Case(spec, world, program), choices, swarm))

    def _layouts(self, choices: Choices, model: DrawnModel) -> Layouts:
        ranks = self.scope.tensor_parallel
        return draw_layouts(choices, model.spec.tree, ranks) if ranks > 1 else ()

    def _model(self, choices: Choices, swarm: Swarm, dtype: str, *, low: bool) -> DrawnModel:
        if "model.zoo" in swarm:
            unfit = {"mixed_dtypes", "strided"} if low else set()
            return _zoo_model(choices, [m for m in self._zoo if not m.traits & unfit], dtype)
        if low:
            # One low dtype at a time: implementations differ in the casts around a part of another dtype.
            swarm = replace(swarm, on=swarm.on - {"tree.mixed_dtype"})
        tree = draw_tree(choices, swarm)
        return drawn_tree(tree, dtype)


def drawn_tree(tree: Mapping[str, Any], dtype: str) -> DrawnModel:
    """Return the facts about a tree that the rest of a case depends on."""
    names = unit_names(tree)
    specs = parameters(tree)
    frozen = {s.module for s in specs if s.frozen and not s.tie} - {s.module for s in specs if not s.frozen or s.tie}
    firsts = tuple(dict.fromkeys(name.partition(".")[0] for name in names))
    patterns = ("*", *(f"{name}.*" for name in firsts), "*weight", "*bias")
    return DrawnModel(ModelSpec("tree", dtype=dtype, tree=dict(tree)), names, patterns, 3, tuple(sorted(frozen)))


def _zoo_model(choices: Choices, models: Sequence[Any], dtype: str) -> DrawnModel:
    model = choices.pick(models)
    arguments = {name: choices.pick(values) for name, values in model.arguments.items()}
    masks = model.input_options.get("use", ((),))
    spec = ModelSpec(model.name, arguments=arguments, dtype=dtype)
    return DrawnModel(spec, model.units, ("*",), len(masks[0]))


def _wrapping(choices: Choices, swarm: Swarm, model: DrawnModel) -> WrappingPlan:
    ignored: tuple[str, ...] = ()
    if "wrap.ignored" in swarm and model.frozen and choices.chance(2):
        ignored = (choices.pick(model.frozen),)
    if "wrap.policy" in swarm and model.spec.tree is not None and choices.chance(2):
        classes = choices.pick((("TreeLinear",), ("TreeGroup",), ("TreeGroup", "TreeLinear")))
        policies = (
            PolicySpec("module_class", classes),
            PolicySpec("size", min_numel=choices.pick((8, 1, 30))),
            PolicySpec("always"),
        )
        return WrappingPlan((), choices.pick(policies), ignored)
    if "wrap.nested" not in swarm:
        return WrappingPlan((), None, ignored)
    return WrappingPlan(tuple(name for name in model.units if choices.chance(2)), None, ignored)
