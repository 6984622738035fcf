"""The traits of a case, any two of which may meet: tags of its axes and its model, and what its program does.

Traits are the words of `judging/tags.py`, each once. A pair that no legal case can contain has a reason here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial
from math import prod

from fsdp_testing.cases.drawing import Choices, needs_of_case
from fsdp_testing.cases.drawing.low_precision import may_be_stored_low, stored_low
from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.models.tree import unit_names
from fsdp_testing.cases.models.tree_schema import parameters
from fsdp_testing.cases.operations import (
    AssignData,
    Batch,
    EditGradients,
    LocalMicroBatches,
    Operation,
    UnusualBackward,
)
from fsdp_testing.cases.operations.optimizing import EDITS
from fsdp_testing.cases.records import Case, MixedPrecisionSpec
from fsdp_testing.cases.records.axes.axis import planned
from fsdp_testing.cases.records.schedule import plan
from fsdp_testing.cases.records.specs import LOW_DTYPES, PREFETCH, STRATEGIES
from fsdp_testing.judging.tags import tags

ZOO = "zoo"
_SAID_OTHERWISE = frozenset(
    {
        *STRATEGIES.values(), "nested_wrapping", "policy_wrapping", "mixed_precision", "reduce_dtype", "buffer_dtype",
        "cpu_offload", "prefetch", "activation_checkpointing", "forward_edits", "forward_methods", "parameter_outputs",
        "unit_precisions",
    }
)  # fmt: skip
"""Capabilities that another trait states more precisely; the last four are one or two models of the zoo each."""
_FOLLOWS = frozenset({"whole_parameters", "gathered_until_backward"})
"""Tags that follow from strategy and mesh."""
_LARGE = 1000


def traits_of(case: Case) -> frozenset[str]:
    """Return the traits of a legal case; void operations do not count."""
    return frozenset(_traits(case))


def _traits(case: Case) -> Iterator[str]:
    yield from (tag for tag in tags(case) - _FOLLOWS if not tag.startswith(("needs:", "zoo:")))
    yield from needs_of_case(replace(case, program=())) - _SAID_OTHERWISE
    for step in plan(case):
        if not step.void:
            kind, _, variants = step.operation.token().rstrip("]").partition("[")
            yield from (f"{kind}:{variant}" if variant else kind for variant in variants.split(","))
    if case.wrapping.forward_prefetch:
        yield "forward_prefetch"
    if case.model.tree is None:
        yield ZOO
    elif any(prod(spec.shape) >= _LARGE for spec in parameters(case.model.tree)):
        yield "large_parameters"


# ----------------------------------------------------------------------------------------------- what is not drawn

_SETTINGS = (
    "gradient_views",
    "small_buckets",
    "batched_copies",
    "sum_reduction",
    "kept_after_backward",
    "last_dimension",
    "named_axes",
    "mesh_for_group",
    "grouped_units",
)
"""Settings that mean the same in every case. The others are a promise of the user (`static_graph`), change numbers
(`divide_factor`), communicate in `no_sync` (`late_all_reduce`), make groups of ranks that stay (`partial_reshard`,
`flattened_axes`), need a model that casts (`uncast_inputs`) or an optimizer that takes two dtypes (`low_gradients`), or say where
something is or whose methods are called: checks cover these."""
_SET_ONE_IN = 8

Setter = Callable[[Case, Choices], Case]


def _recomputed(case: Case, choices: Choices, *, outside: bool) -> Case:
    names = unit_names(case.model.tree) if case.model.tree is not None else ()
    zoo = MODELS.get(case.model.name)
    if zoo is not None and not {"forward_edits", "buffers"} & zoo.needs:
        names = zoo.units
    chosen = tuple(name for name in names if choices.chance(2)) or names[:1]
    return planned(case, checkpointed=chosen, checkpoint_outside=outside and bool(chosen))


def _compressed(case: Case, choices: Choices) -> Case:
    """Return the case with gradients that the implementation's own hook reduces, if nothing else reduces or casts them."""
    if case.low_precision or case.world.mesh or case.world.tensor_parallel > 1 or not may_be_stored_low(case):
        return case
    precision = MixedPrecisionSpec(reduce_dtype=choices.pick(LOW_DTYPES))
    case = replace(case, model=replace(case.model, dtype="float32"), mixed_precision=precision)
    return _with_setting(case, choices, name="compressing_hook")


def _with_setting(case: Case, choices: Choices, *, name: str) -> Case:
    return planned(case, settings=(*case.wrapping.settings, name))


def _with_operation(case: Case, choices: Choices, *, make: Callable[[Choices], Operation]) -> Case:
    at = choices.integer(0, len(case.program))
    return replace(case, program=(*case.program[:at], make(choices), *case.program[at:]))


def _some(choices: Choices) -> tuple[str, ...]:
    return (choices.pick(("*", "*.weight", "*.bias")),)


_OPERATIONS: tuple[Callable[[Choices], Operation], ...] = (
    lambda choices: EditGradients(_some(choices), choices.pick(EDITS)),
    lambda choices: AssignData(_some(choices), 0.5, Batch(choices.integer(30, 39), (2,)), in_place=True),
    lambda choices: LocalMicroBatches((Batch(choices.integer(40, 49), (2,)), Batch(50, (2,))), nested=True),
    lambda choices: UnusualBackward(Batch(choices.integer(60, 69), (2,)), "of_inputs"),
)
"""Operations that campaigns do not draw, or not in this form."""

_SETTERS: tuple[Setter, ...] = (
    partial(_recomputed, outside=False),
    partial(_recomputed, outside=True),
    lambda case, choices: planned(case, forward_prefetch=True),
    lambda case, choices: planned(case, backward_prefetch=choices.pick(PREFETCH[1:])),
    *(partial(_with_setting, name=name) for name in _SETTINGS),
    *(partial(_with_operation, make=make) for make in _OPERATIONS),
    stored_low,
    _compressed,
)


def with_options(case: Case, choices: Choices) -> Case:
    """Return a drawn case with some of the options that campaigns do not draw.

    In a campaign a new option would change the case of every seed.
    """
    for setter in _SETTERS:
        if choices.chance(_SET_ONE_IN):
            case = setter(case, choices)
    return case


# ----------------------------------------------------------------------------------------------- what cannot meet

_ONE_VALUE = frozenset(
    {
        "strategy", "mesh", "world", "tensor_parallel", "dtype", "optimizer", "units", "param_dtype", "reduce_dtype",
        "buffer_dtype", "policy", "backward_prefetch", "recomputed",
    }
)  # fmt: skip
_CAST = "param_dtype:* reduce_dtype:* buffer_dtype:*"
_STORED_LOW = "dtype:bfloat16 dtype:float16"
_LOW = f"{_CAST} {_STORED_LOW}"
_ELSEWHERE = "reload:* train_elsewhere:*"

_OF_TREES = (
    "node:* group:* returns:* dtype_of_part:* policy:* ignored_parameters one_element_unit uneven_parameters "
    "large_parameters all_frozen move:* layout:* cut:*"
)
APART: tuple[tuple[str, str, str], ...] = (
    ("only hybrid sharding has a mesh", "mesh:*", "strategy:full_shard strategy:shard_grad_op strategy:no_shard"),
    ("the content of a zoo model is unknown until it is built", ZOO, _OF_TREES),
    ("each implementation decides which units a policy makes", "policy:*",
     "units:[123] reload:plan train_elsewhere:plan one_element_unit"),
    ("low precision is compared bit by bit, and a product with a transposed matrix may be rounded differently", _LOW,
     "strided_parameters"),
    ("activations in low precision may pass through an ignored module that is not cast", f"{_CAST} compressing_hook",
     "ignored_parameters"),
    ("nothing is freed where nothing is sharded", "strategy:no_shard", "unit_strategies"),
    ("no policy has an option for both", "buffer_dtype:*", "full_outputs"),
    ("every root, and every unit of a policy, would cast its outputs", "policy:* shared_streams", "full_outputs"),
    ("each implementation decides how it casts a part of another dtype", _LOW, "dtype_of_part:*"),
    ("one low dtype at a time: implementations cast in different places", _STORED_LOW, "param_dtype:*"),
    ("a hook compresses to 16 bits, over one axis", "compressing_hook",
     f"param_dtype:* buffer_dtype:* reduce_dtype:float32 {_STORED_LOW} dtype:float64 strategy:hybrid* mesh:*"),
    ("values saved in low precision may be rounded", _CAST, f"{_ELSEWHERE} save save:* restore"),
    ("second derivatives through casts are rounded where each implementation casts", _CAST, "unusual_backward:penalty"),
    ("gradients of inputs are rounded where each implementation casts inputs", _CAST, "unusual_backward:of_inputs"),
    ("casting the whole model is defined only for one dtype, and before a new model is made", "move:float*",
     f"{_LOW} dtype_of_part:* {_ELSEWHERE} move:float*"),
    ("the largest of no elements is not defined", "clip:inf", "empty_parameters"),
    ("a parameter under two names is replaced under one of them", "replace_parameters", "alias"),
)  # fmt: skip
"""Why traits cannot meet in one case: the reason, and patterns; traits of the first group cannot meet those of the second."""


@cache
def why_apart(first: str, second: str) -> str:
    """Return why no legal case has both traits; empty if there is no known reason."""
    kinds = first.partition(":")[0], second.partition(":")[0]
    if kinds[0] == kinds[1] and kinds[0] in _ONE_VALUE:
        return f"a case has one value of {kinds[0]}"
    for mesh, world in ((first, second), (second, first)):
        if mesh.startswith("mesh:") and world.startswith("world:"):
            ranks = prod(map(int, mesh[5:].split("x")))
            return "" if str(ranks) == world[6:] else f"the mesh has {ranks} ranks"
    for reason, left, right in APART:
        for one, other in ((first, second), (second, first)):
            if _matches(one, left) and _matches(other, right):
                return reason
    return ""


def _matches(trait: str, patterns: str) -> bool:
    return any(fnmatchcase(trait, pattern) for pattern in patterns.split())
