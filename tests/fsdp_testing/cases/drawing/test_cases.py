"""Drawn cases are legal, ask for what is claimed only, and come from either source."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import FEATURES, CaseDrawer, Scope, SeededChoices, cases, legal_case, needs_of_case
from fsdp_testing.cases.operations import OPERATIONS
from fsdp_testing.cases.records import (
    CAPABILITIES,
    Batch,
    Case,
    Clip,
    ForwardBackward,
    Freeze,
    ModelSpec,
    SeveralForwards,
    Thaw,
    WorldSpec,
    WrappingPlan,
)
from fsdp_testing.errors import InvalidArgument, InvalidImplementation

BUILT_IN = ("torch-ddp", "torch-fsdp1", "torch-fsdp1-flat", "torch-fsdp2", "single-process")


def drawn(count: int, scope: Scope = Scope()) -> list[Case]:
    drawer = CaseDrawer(scope)
    return [drawer.draw(SeededChoices(seed)) for seed in range(count)]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_case_asks_for_claimed_capabilities_only_and_is_legal(name: str):
    claimed = registry.load(name).capabilities
    for case in drawn(400, Scope(claimed)):
        assert needs_of_case(case) <= claimed
        assert legal_case(case, claimed) == case
        assert case.program


@pytest.mark.parametrize(("model", "dtype"), [("two_dtypes", "float32"), ("mlp", "bfloat16")])
def test_a_model_of_the_zoo_with_two_dtypes_is_not_stored_in_16_bits(model: str, dtype: str):
    """Pairs combine the model of one case with the dtype of another."""
    case = Case(ModelSpec(model, dtype="bfloat16"), WorldSpec(2), (ForwardBackward(Batch(0)),))
    assert legal_case(case).model.dtype == dtype


def test_a_model_that_changes_its_weights_in_forward_is_drawn_only_where_that_is_claimed():
    """A campaign on FSDP1, which claims no such thing, called its refusal a finding."""
    case = Case(ModelSpec("self_clipping"), WorldSpec(2), (ForwardBackward(Batch(1)),))
    assert "forward_edits" in needs_of_case(case)
    assert "forward_edits" not in registry.load("torch-fsdp1").capabilities


def test_a_case_survives_its_document():
    for case in drawn(200):
        assert Case.from_json(case.to_json()) == case


def test_the_same_seed_gives_the_same_case_and_another_one_another():
    first, again = drawn(50), drawn(50)
    assert first == again
    assert len({case.identity for case in first}) > 45


def test_deleting_any_operation_or_unit_leaves_a_legal_case():
    for case in drawn(120):
        for index in range(len(case.program)):
            smaller = legal_case(case.without_operation(index))
            assert legal_case(smaller) == smaller


def test_every_kind_of_operation_and_every_feature_is_drawn():
    found = drawn(1500)
    kinds = {operation.kind for case in found for operation in case.program}
    # What has no feature the pairs of traits put in: campaigns draw the case of a seed that they drew before.
    assert kinds == {kind for kind, operation in OPERATIONS.items() if operation.features}
    assert set(OPERATIONS) - kinds == {"edit_gradients"}
    needs = {need for case in found for need in needs_of_case(case)}
    asked = {need for tags in FEATURES.values() for need in tags}
    assert asked <= needs | {"buffer_dtype", "cpu_offload"}


def test_an_excluded_feature_is_not_drawn():
    for case in drawn(300, Scope(excluded=frozenset({"op.clip", "op.freeze"}))):
        assert not any(isinstance(operation, (Clip, Freeze, Thaw)) for operation in case.program)


def test_world_sizes_are_those_of_the_scope_the_first_one_most():
    sizes = [case.world.size for case in drawn(300, Scope(world_sizes=(2, 3, 4)))]
    assert set(sizes) == {2, 3, 4}
    assert sizes.count(2) > 150


def test_without_claiming_none_for_unused_an_unused_parameter_meets_plain_sgd_only():
    claimed = registry.load("torch-fsdp1").capabilities
    assert "unused_gradient_is_none" not in claimed
    for case in drawn(600, Scope(claimed)):
        unused = any(
            need.startswith("unused_parameters") for operation in case.program for need in operation.required()
        )
        if unused:
            assert (case.optimizer.name, set(case.optimizer.arguments)) == ("sgd", {"lr"})


def test_bad_scopes_are_refused():
    with pytest.raises(InvalidArgument, match="tree.what"):
        Scope(excluded=frozenset({"tree.what"}))
    with pytest.raises(InvalidArgument, match="world sizes of at least 1"):
        Scope(world_sizes=())
    with pytest.raises(InvalidImplementation, match="flying"):
        cases(capabilities={"flying"})


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases(world_sizes=(2, 3)))
def test_hypothesis_draws_legal_cases(case: Case):
    assert legal_case(case) == case
    assert case.world.size in (2, 3)


def test_hypothesis_shrinks_to_what_a_failure_needs():
    """Where it begins decides where a shrinker ends now and then, and Hypothesis draws by what is imported, too."""
    asked = settings(max_examples=2000, deadline=None, database=None, phases=(Phase.generate, Phase.shrink))
    ends = []
    for seed in range(3):
        smallest = find(
            cases(),
            lambda case: any(isinstance(operation, Clip) for operation in case.program),
            random=random.Random(seed),
            settings=asked,
        )
        nodes = len(smallest.model.tree["nodes"]) if smallest.model.tree is not None else 0
        ends.append((len(smallest.program) <= 2, smallest.strategy, nodes))
        if ends[-1] == (True, "full_shard", 1):
            return
    pytest.fail(f"none of three beginnings led to the smallest case: {ends}")


@pytest.mark.parametrize(("model", "kept"), [("self_clipping", ForwardBackward), ("mlp", SeveralForwards)])
def test_a_model_that_edits_its_weights_in_forward_runs_no_two_forwards_before_a_backward(model, kept):
    several = SeveralForwards((Batch(1, (2,)), Batch(2, (2,))))
    case = Case(model=ModelSpec(model), world=WorldSpec(2), program=(several,))
    assert [type(operation) for operation in legal_case(case).program] == [kept]


def test_modules_that_are_one_unit_together_need_what_their_parameters_together_need():
    nodes = [{"kind": "linear", "name": "a"}, {"kind": "linear", "name": "b", "dtype": "float32"}]
    model = ModelSpec("tree", tree={"width": 2, "nodes": nodes})
    for options, is_mixed in (((), False), (("grouped_units",), True)):
        case = Case(model, WorldSpec(2), (), wrapping=WrappingPlan(("a", "b"), settings=options))
        assert ("mixed_dtype_units" in needs_of_case(case)) is is_mixed


def test_no_tree_is_drawn_without_uneven_sizes_and_all_features_of_trees_are_told():
    lacking = Scope(frozenset(CAPABILITIES) - {"uneven_parameters"}).not_claimed()
    assert {name for name in FEATURES if name.startswith("tree.")} == {*lacking}
    assert lacking["tree.conv"] == {"uneven_parameters"}
    assert Scope(frozenset(CAPABILITIES)).not_claimed() == {}
