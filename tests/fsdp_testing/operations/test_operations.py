"""Every operation says all that must be known of it, in one class."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from fsdp_testing.errors import InvalidRecord
from fsdp_testing.operations import ALL, Operation, Step, by_kind


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


def test_two_operations_of_one_kind_are_refused():
    with pytest.raises(InvalidRecord, match="Twin has the kind 'step' of Step"):
        by_kind([Step, type("Twin", (Step,), {})])


def test_operations_and_records_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import fsdp_testing.records, fsdp_testing.operations"
    subprocess.run([sys.executable, "-c", code], check=True)
