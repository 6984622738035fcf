"""Finds the legal case nearest to one with deleted parts, and what an implementation must claim to run it.

One function decides for generator, mutator and shrinker. It adds only parts without which there is no case. An operation
decides itself whether it has a meaning in a case (`Operation.normalise`), from facts that are gathered here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from fsdp_testing.cases.drawing.layouts import legal_layouts
from fsdp_testing.cases.drawing.low_precision import may_be_stored_low, without_strides
from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.models.tree import has_alias, needs_of, unit_names, unit_of
from fsdp_testing.cases.models.tree_schema import Walk, every, get, legal_tree, parameters, walk
from fsdp_testing.cases.operations import Operation
from fsdp_testing.cases.operations.operation import matching
from fsdp_testing.cases.records import Case, OptimizerSpec, WorldSpec, WrappingPlan
from fsdp_testing.cases.records.specs import LOW_DTYPES

_KINDS = {"TreeGroup": "group", "TreeLinear": "linear"}
_WIDE = ("float32", "float64")


def legal_case(case: Case, capabilities: frozenset[str] | None = None) -> Case:
    """Return the case without its meaningless parts; a legal case is returned unchanged.

    Args:
        case: Case of the right form (`Case.from_json` checks that).
        capabilities: What the implementation claims, if that decides which comparison is fair; None for all.
    """
    if case.model.dtype in LOW_DTYPES and not may_be_stored_low(case):
        case = replace(case, model=replace(case.model, dtype="float32"))
    if case.model.tree is not None:
        tree = legal_tree(case.model.tree)
        if case.low_precision:
            # Low precision is compared bit by bit, and a product of a transposed matrix may be rounded differently.
            tree = without_strides(tree)
        if case.mixed_precision is not None:
            # Activations that pass through an uncast module have a dtype that the next module may refuse.
            case = replace(case, wrapping=replace(case.wrapping, ignored=()))
        case = replace(
            case,
            model=replace(case.model, tree=tree),
            wrapping=_legal_wrapping(case.wrapping, tree, case.world.tensor_parallel),
        )
    case = replace(case, program=tuple(ProgramContext(case).normalised()))
    if case.model.tree is not None and _changes_ignored(case):
        # Gradients of ignored modules are not averaged, and their numbers are not restored after an edit.
        case = replace(case, wrapping=replace(case.wrapping, ignored=()))
    trained = _trained_alike if case.model.tree is not None else _trained_at_all
    case = replace(case, program=tuple(trained(case)))
    case = replace(case, world=_legal_world(case))
    if case.mixed_precision is not None and case.mixed_precision.buffer_dtype:
        # Buffers may be cast while wrapping or in the first forward: implementations may differ in between.
        first = next((place for place, o in enumerate(case.program) if o.batches()), len(case.program))
        case = replace(case, program=case.program[first:])
    if capabilities is not None and "unused_gradient_is_none" not in capabilities and leaves_unused(case):
        case = replace(case, optimizer=_stateless(case.optimizer))
    return case


class ProgramContext:
    """The facts of a case that an operation may ask for when it is made legal.

    Attributes:
        case: The case, with a legal tree and plan.
        tree: The module tree, None for a model of the zoo.
        begins: No operation was kept so far.
        units: Units at this point of the program, the root included; units that a policy makes are left to the implementation.
        saved: Form of the last saved state that the model at this point can load; None if there is none.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tree = case.model.tree
        self.begins = True
        self.units = {"", *case.wrapping.units}
        self.saved: str | None = None

    def normalised(self) -> Iterator[Operation]:
        """Yield the operations of the program that have a meaning in the case, in their legal form."""
        for operation in self.case.program:
            legal = operation.normalise(self)
            if legal is None:
                continue
            units = legal.new_units()
            if units is not None:
                self.units = {"", *units}
            if legal.renews_model and self.saved != "full":
                self.saved = None  # shards are those of one model
            yield legal
            self.begins = False

    @property
    def mixed_precision(self) -> bool:
        return self.case.mixed_precision is not None

    @cached_property
    def has_empty(self) -> bool:
        if self.tree is None:
            model = MODELS.get(self.case.model.name)
            return model is not None and "empty" in model.traits
        return any(not spec.numel for spec in parameters(self.tree))

    @cached_property
    def counts_runs(self) -> bool:
        """Whether a buffer may count how often a rank ran a part."""
        if self.tree is None:
            return False  # models with buffers are not saved
        return any(p.node["kind"] == "buffer" and get(p.node, "style") == "counter" for p in every(walk(self.tree)))

    @cached_property
    def edits_in_forward(self) -> bool:
        """Whether the model changes its own parameters in forward: then no backward of an earlier forward can run."""
        model = MODELS.get(self.case.model.name)
        return self.tree is None and model is not None and "forward_edits" in model.needs

    @cached_property
    def has_buffers_of_ranks(self) -> bool:
        """Whether a buffer may differ between ranks, or be lost by saving and loading."""
        if self.tree is None:
            model = MODELS.get(self.case.model.name)
            return model is None or "buffers" in model.needs | model.traits
        buffers = [place.node for place in every(walk(self.tree)) if place.node["kind"] == "buffer"]
        return any(
            get(n, "style") == "running" or (get(n, "style") == "counter" and not get(n, "persistent")) for n in buffers
        )

    @cached_property
    def _names(self) -> list[str]:
        """Names of parameters, a tied one under its first name only."""
        seen: set[tuple[Any, ...]] = set()
        names = []
        for spec in parameters(self.tree):
            if not spec.tie or spec.tie not in seen:
                names.append(spec.fqn)
            seen.add(spec.tie)
        return names

    def used_patterns(self, patterns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the patterns that match a parameter; for a model of the zoo all."""
        if self.tree is None:
            return patterns
        return tuple(p for p in patterns if any(fnmatchcase(name, p) for name in self._names))

    def replaceable(self, patterns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of matching parameters that only one module has, and that the implementation shards.

        For a model of the zoo return the patterns, if no parameter can belong to several modules.
        """
        if self.tree is None:
            model = MODELS.get(self.case.model.name)
            shares = model is None or {"shared_parameters", "reused_modules"} & (model.needs | model.traits)
            return () if shares else patterns
        if has_alias(self.tree["nodes"]):
            return ()
        outside = tuple(f"{module}." for module in self.case.wrapping.ignored)
        alone = [s.fqn for s in parameters(self.tree) if not s.tie and not f"{s.fqn}.".startswith(outside)]
        return tuple(fqn for fqn in alone if any(fnmatchcase(fqn, pattern) for pattern in patterns))

    def units_of_plan(self, units: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the legal units of another plan; with a policy there is no plan by name to change."""
        if self.tree is None:
            return units
        if self.case.wrapping.policy is not None:
            return None
        return _legal_wrapping(replace(self.case.wrapping, units=units), self.tree).units

    def may_be_cast(self, dtype: str) -> bool:
        """Whether a cast of the whole model to `dtype`, as its first operation, means the same for every implementation."""
        program = self.case.program
        if self.case.low_precision or self.tree is None or dtype not in _WIDE:
            return False
        if any(spec.dtype for spec in parameters(self.tree)) or any(o.renews_model for o in program):
            return False
        # Objects built with the earlier parameters would keep them.
        built = next((place for place, o in enumerate(program) if o.builds_optimizer), None)
        return built is not None and not any(o.steps for o in program[:built])


def _legal_wrapping(plan: WrappingPlan, tree: Mapping[str, Any], tensor_parallel: int = 1) -> WrappingPlan:
    names = set(unit_names(tree))
    ignored = tuple(dict.fromkeys(name for name in plan.ignored if name in names and _all_frozen(tree, name)))
    inside = tuple(f"{name}." for name in ignored)
    units = tuple(
        dict.fromkeys(n for n in plan.units if n in names and n not in ignored and not n.startswith(inside or (" ",)))
    )
    policy = plan.policy
    if policy is not None:
        units = ()
        if policy.kind == "module_class":
            kinds = {place.node["kind"] for place in every(walk(tree))}
            classes = tuple(name for name in policy.classes if _KINDS.get(name) in kinds)
            policy = replace(policy, classes=classes) if classes else None
    layouts = legal_layouts(plan.layouts, tree, ignored, tensor_parallel)
    checkpointed = tuple(dict.fromkeys(n for n in plan.checkpointed if n in names and _may_run_again(tree, n)))
    return replace(plan, units=units, policy=policy, ignored=ignored, layouts=layouts, checkpointed=checkpointed)


def _may_run_again(tree: Mapping[str, Any], module: str) -> bool:
    """Whether running a module again in backward changes no number: a forward that writes to a buffer then writes twice."""
    inside = [place.node for place in every(walk(tree)) if f"{place.fqn}.".startswith(f"{module}.")]
    return not any(node["kind"] == "buffer" and get(node, "style") != "constant" for node in inside)


def _all_frozen(tree: Mapping[str, Any], module: str) -> bool:
    own = [s for s in parameters(tree) if s.module == module or s.module.startswith(f"{module}.")]
    return bool(own) and all(spec.frozen and not spec.tie for spec in own)


def _changes_ignored(case: Case) -> bool:
    """Whether an operation thaws a parameter that stays outside the implementation, or edits it for a while."""
    changing = [pattern for operation in case.program for pattern in operation.changes_ignored()]
    inside = tuple(f"{module}." for module in case.wrapping.ignored)
    if not changing or not inside:
        return False
    names = [spec.fqn for spec in parameters(case.model.tree) if f"{spec.fqn}.".startswith(inside)]
    return any(fnmatchcase(name, pattern) for name in names for pattern in changing)


def _trained_alike(case: Case) -> Iterator[Operation]:
    """Yield the operations; if the loss of some ranks would train nothing, every rank gets the branches of rank 0.

    A rank with such a loss calls no backward, and the other ranks would wait in theirs: a user's error on every implementation.
    If no rank's loss trains anything, pending gradients of a `no_sync` are not reduced either. Then every branch runs, and a
    micro-batch that still trains nothing is left out.
    """
    specs = parameters(case.model.tree)
    first = {spec.tie: spec.fqn for spec in reversed(specs) if spec.tie}
    flags = {spec.fqn: not spec.frozen for spec in specs}
    flags |= {name: False for name, _ in matching(flags.items(), case.model.freeze)}
    places = walk(case.model.tree)
    pending = False
    for operation in case.program:
        change = operation.requires_grad_change()
        if change is not None:
            changed = flags | {name: change[1] for name, _ in matching(flags.items(), change[0])}
            if pending and not any(changed.values()):
                continue  # no backward would ever reduce the pending gradients
            flags = changed
        awaiting, pending = pending, operation.pending_after(pending)
        trainable = {spec.module for spec in specs if flags[first.get(spec.tie, spec.fqn)]}

        def trains(mask: tuple[bool, ...], trainable: set[str] = trainable) -> bool:
            return any(fqn in trainable for fqn in _contributing(places, mask))

        if operation.runs_backward:
            if any(len({trains(mask) for mask in batch.usage}) > 1 for batch in operation.batches()):
                operation = operation.used_alike()
            reduces = awaiting and not pending
            if reduces and not all(trains(mask) for batch in operation.batches() for mask in batch.usage or ((),)):
                if not trains(()):
                    pending = awaiting
                    continue
                operation = operation.with_batches(lambda batch: replace(batch, usage=()))
        yield operation


def _trained_at_all(case: Case) -> Iterator[Operation]:
    """Yield the operations of a model of the zoo, without freezing everything while gradients await a reduction."""
    pending = False
    for operation in case.program:
        change = operation.requires_grad_change()
        if not (pending and change is not None and not change[1] and "*" in change[0]):
            pending = operation.pending_after(pending)
            yield operation


def _contributing(places: list[Walk], mask: tuple[bool, ...]) -> Iterator[str]:
    """Yield modules through which the loss certainly depends on parameters if these branches run."""
    for place in places:
        if place.node["kind"] != "group":
            yield place.fqn
            continue
        branch = get(place.node, "branch")
        taken = not 0 <= branch < len(mask) or mask[branch]
        if taken and not get(place.node, "dropped") and not get(place.node, "keeps"):
            yield from _contributing(place.inner, mask)


def _legal_world(case: Case) -> WorldSpec:
    world, size = case.world, case.world.replicas
    hybrid = case.strategy.startswith("hybrid")
    if hybrid and (len(world.mesh) != 2 or world.mesh[0] * world.mesh[1] != size):
        return replace(world, mesh=(size // 2, 2) if size % 2 == 0 else (1, size))
    return world if hybrid or not world.mesh else replace(world, mesh=())


def leaves_unused(case: Case) -> bool:
    """Whether some parameter may get no gradient while another of its unit does."""
    # A loss that bypasses a unit's output leaves the unit's last part without a gradient.
    leaving = {"unused_parameters", "loss_bypasses_output"}
    if case.model.tree is None:
        model = MODELS.get(case.model.name)
        return model is None or bool(leaving & model.needs) or bool(model.traits & {"frozen", "unused"})
    if any("unused_parameters" in operation.required() for operation in case.program):
        return True
    if any(operation.requires_grad_change() for operation in case.program):
        return True
    return bool(leaving & needs_of(case.model.tree, ()))


def _stateless(optimizer: OptimizerSpec) -> OptimizerSpec:
    """Plain SGD, for which a gradient of zeros and no gradient are the same."""
    if optimizer.name == "sgd" and set(optimizer.arguments) <= {"lr"}:
        return optimizer
    return OptimizerSpec("sgd", {"lr": optimizer.arguments.get("lr", 0.1)})


# ----------------------------------------------------------------------------------------------- needs


def needs_of_case(case: Case) -> frozenset[str]:
    """Return every capability that a legal case needs: its operations', its model's and its plan's."""
    needs = set(case.required())
    if case.model.tree is None:
        return frozenset(needs | _needs_of_zoo(case))
    units = () if case.strategy == "no_shard" and not case.wrapping.units else case.wrapping.units
    if case.wrapping.policy is not None:
        # The implementation decides which modules a policy takes: assume that everything possible is needed.
        needs |= needs_of(case.model.tree, unit_names(case.model.tree))
    needs |= needs_of(case.model.tree, units)
    if "grouped_units" in case.wrapping.settings:
        # The implementation then decides which modules form one unit.
        needs |= needs_of(case.model.tree, ()) & {"mixed_dtype_units", "frozen_mixed_unit"}
    for later in plans_of(case)[1:]:
        needs |= needs_of(case.model.tree, later)
    if case.wrapping.checkpointed and any(_recomputes_unseen(case, plan) for plan in plans_of(case)):
        needs.add("hidden_recomputation")
    if _mixes_frozen(case, units):
        needs.add("frozen_mixed_unit")
    return frozenset(needs)


def _recomputes_unseen(case: Case, units: tuple[str, ...]) -> bool:
    """Whether a module runs again inside a unit whose start of backward cannot be seen.

    The unit's outputs are in objects of the user's own classes, or a tensor that it kept is used instead. A unit that runs again
    as a whole is gathered by its own forward.
    """
    tree, plan = case.model.tree, case.wrapping
    groups = [place for place in every(walk(tree)) if place.node["kind"] == "group"]
    hidden = {g.fqn for g in groups if get(g.node, "returns") == "opaque" or get(g.node, "keeps")}
    hidden |= {""} if tree.get("output") == "opaque" else set()
    if plan.policy is not None or has_alias(tree["nodes"]):
        return bool(hidden)  # which unit a module is in is not known
    again = [name for name in plan.checkpointed if not (plan.checkpoint_outside and name in units)]
    return any(unit_of(name, units) in hidden for name in again)


def _needs_of_zoo(case: Case) -> set[str]:
    model = MODELS.get(case.model.name)
    if model is None:
        return set()
    needs = set(model.needs)
    if case.wrapping.checkpointed and needs & {"opaque_outputs", "loss_bypasses_output"}:
        needs.add("hidden_recomputation")
    is_grouped = "grouped_units" in case.wrapping.settings
    if all(set(model.units) <= set(units) for units in plans_of(case)) and not is_grouped:
        return needs
    # Parts that are separate units in the zoo's suggested plan may meet in one unit.
    needs |= {"mixed_dtype_units"} if "mixed_dtypes" in model.traits else set()
    return needs | ({"frozen_mixed_unit"} if "frozen" in model.traits else set())


def plans_of(case: Case) -> list[tuple[str, ...]]:
    """Return the inner units of the case's plan, and of every later one."""
    return [case.wrapping.units, *(units for operation in case.program for units in operation.other_plans())]


def _mixes_frozen(case: Case, units: tuple[str, ...]) -> bool:
    """Whether freezing while training goes on leaves a unit with both frozen and trainable parameters."""
    changes = [change for operation in case.program if (change := operation.requires_grad_change())]
    if not changes:
        return False
    specs = parameters(case.model.tree)
    flags = {spec.fqn: not spec.frozen for spec in specs}
    members: dict[str, list[str]] = {}
    for spec in specs:
        members.setdefault(unit_of(spec.module, units), []).append(spec.fqn)
    for patterns, flag in changes:
        flags |= {name: flag for name, _ in matching(flags.items(), patterns)}
        if any(len({flags[name] for name in names}) > 1 for names in members.values()):
            return True
    return False
