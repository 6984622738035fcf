"""Which restores have a meaning, and what one process holds after one."""

from __future__ import annotations

import pytest

from fsdp_testing.cases.drawing.normal_form import legal_case
from fsdp_testing.cases.operations import Batch, ForwardBackward, Reload, Restore, Save, Step
from fsdp_testing.cases.records import Case, ModelSpec, OptimizerSpec, WorldSpec
from fsdp_testing.oracle.replay import Replay

TREE = {"width": 2, "nodes": [{"kind": "linear", "name": "a", "out": 2}]}
TRAIN = (ForwardBackward(Batch(1)), Step())


def case(*program, optimizer=OptimizerSpec("adamw", {"lr": 0.1})):
    return Case(ModelSpec("tree", tree=TREE), WorldSpec(2), tuple(program), optimizer=optimizer)


@pytest.mark.parametrize(
    ("program", "kept"),
    [
        ((Restore(),), 0),
        ((Save(), Restore()), 1),
        ((Save(), *TRAIN, Restore(), Restore()), 2),
        # Shards are those of one model; a full state loads into any.
        ((Save("sharded"), Reload("sharded"), Restore()), 0),
        ((Save("sharded"), Reload("sharded"), Save("sharded"), Restore()), 1),
        ((Save(), Reload(), Restore()), 1),
    ],
)
def test_a_restore_needs_a_save_that_the_model_can_load(program, kept):
    legal = legal_case(case(*program))
    assert sum(isinstance(operation, Restore) for operation in legal.program) == kept


def test_one_process_goes_back_to_what_it_saved():
    def end(*program):
        points = Replay(case(*program)).run()
        return {str(quantity): value for quantity, value in points[-1].values.items()}

    saved = end(*TRAIN)
    back = end(*TRAIN, Save(optimizer=True), *TRAIN, Restore())
    moments_stay = end(*TRAIN, Save(), *TRAIN, Restore())
    for name, value in saved.items():
        if name.startswith("gradient"):
            assert back[name] is None, "a restore clears gradients"
        else:
            assert (back[name] == value).all(), name
        if name.startswith("parameter"):
            assert (moments_stay[name] == value).all(), name
    assert float(moments_stay["optimizer state step of a.weight"]) == 2


def test_a_save_holds_the_optimizer_of_every_rank():
    (point, *_) = [point for point in Replay(case(*TRAIN, Save(optimizer=True))).run() if point.index == 2]
    names = {quantity.name for quantity in point.values}
    assert {f"optimizer.{name}.a.weight" for name in ("step", "exp_avg", "exp_avg_sq")} <= names
    assert {quantity.rank for quantity in point.values} == {0, 1}


def test_the_optimizer_is_part_of_the_token():
    assert [Save().token(), Save(optimizer=True).token(), Restore().token()] == ["save", "save[optimizer]", "restore"]
