"""Every operation says all that must be known of it, in one class."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from fsdp_testing.base.document import decode, encode
from fsdp_testing.cases.drawing import FEATURES, SeededChoices
from fsdp_testing.cases.drawing.features import Swarm
from fsdp_testing.cases.drawing.operation_drawer import OperationDrawer
from fsdp_testing.cases.operations import ALL, Operation, Step, by_kind
from fsdp_testing.cases.records import CAPABILITIES
from fsdp_testing.errors import InvalidRecord


def subclasses(operation: type[Operation]) -> set[type[Operation]]:
    """All records among the subclasses; what only shares code between some has no fields of its own."""
    below = {inner for cls in operation.__subclasses__() for inner in subclasses(cls)}
    return below | ({operation} if "__dataclass_fields__" in vars(operation) else set())


def test_every_operation_is_in_the_list():
    # A class with slots is made twice; the one that `dataclass` replaced may still be about.
    mine = [cls for cls in subclasses(Operation) if cls.__module__.startswith("fsdp_testing.")]
    assert {cls.kind for cls in mine} - {"operation"} == {cls.kind for cls in ALL}


def test_an_operation_that_lacks_facets_is_refused_with_their_names():
    @dataclass(frozen=True, slots=True)
    class Skip(Operation):
        kind: ClassVar[str] = "skip"
        unit: str

        def simpler(self):
            return iter(())

        def run(self, program):
            return None

    with pytest.raises(InvalidRecord, match="Skip lacks draw, weight, passes, replay"):
        by_kind((*ALL, Skip))


@pytest.mark.parametrize("operation", ALL, ids=lambda operation: operation.kind)
def test_what_is_drawn_survives_its_document_and_becomes_simpler(operation: type[Operation]):
    swarm = Swarm(frozenset(FEATURES))
    assert (operation.weight(swarm) > 0) == bool(operation.features)
    for seed in range(30):
        drawn = operation.draw(OperationDrawer(SeededChoices(seed), swarm, 2, ("*", "*bias"), 2, ("a", "b")))
        assert decode(Operation, encode(drawn)) == drawn
        assert drawn.token().startswith(drawn.kind)
        assert drawn.text(3).startswith(f"operation 3 {drawn.kind}(")
        assert drawn.words()
        assert drawn.required() <= set(CAPABILITIES)
        lines = drawn.script_lines("3 it")
        assert lines is None or compile("\n    ".join(["def program(one):", *lines, "pass"]), "script", "exec")
        smaller, steps = drawn, 0
        while (simpler := next((one for one in smaller.simpler() if one != smaller), None)) is not None:
            smaller, steps = simpler, steps + 1
            assert steps < 20, "it never becomes the simplest"


def test_two_operations_of_one_kind_are_refused():
    with pytest.raises(InvalidRecord, match="Twin has the kind 'step' of Step"):
        by_kind([Step, type("Twin", (Step,), {})])


def test_operations_and_records_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import fsdp_testing.cases.records, fsdp_testing.cases.operations"
    subprocess.run([sys.executable, "-c", code], check=True)
