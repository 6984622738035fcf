"""How is a case made from cases that covered something new? By small changes to one, or by joining two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_testing.records import Case, Operation
from fsdp_testing.strategies import CaseDrawer, Choices
from fsdp_testing.strategies.drawing import drawn_tree
from fsdp_testing.strategies.operations import OperationDrawer

_LONGEST = 2


def _names_parts(operation: Operation) -> bool:
    patterns = getattr(operation, "patterns", ("*",))
    return patterns != ("*",) or bool(getattr(operation, "units", None))


class Mutator:
    """Changes cases of a corpus within a drawer's scope."""

    def __init__(self, drawer: CaseDrawer) -> None:
        self._drawer = drawer

    def mutate(self, choices: Choices, case: Case, corpus: Sequence[Case]) -> Case:
        """Returns a legal case near `case`.

        Args:
            choices: Source.
            case: Where to start.
            corpus: Cases to take parts from.
        """
        for _ in range(choices.integer(1, 3)):
            change = choices.pick((self._insert, self._insert, self._delete, self._swap, self._join, self._settings))
            case = change(choices, case, corpus)
        limit = _LONGEST * self._drawer.scope.max_operations
        return self._drawer.shape(replace(case, program=case.program[:limit]))

    def _insert(self, choices: Choices, case: Case, _corpus: Sequence[Case]) -> Case:
        swarm = self._drawer.swarm(choices)
        patterns: tuple[str, ...] = ("*",)
        units: tuple[str, ...] = ()
        branches = 0
        if case.model.tree is not None:
            model = drawn_tree(case.model.tree, case.model.dtype)
            patterns, branches, units = model.patterns, model.branches, model.units
        drawer = OperationDrawer(choices, swarm, case.world.size, patterns, branches, units)
        operation = drawer.operation()
        place = choices.integer(0, len(case.program))
        return replace(case, program=(*case.program[:place], operation, *case.program[place:]))

    def _delete(self, choices: Choices, case: Case, _corpus: Sequence[Case]) -> Case:
        if len(case.program) < 2:
            return case
        return case.without_operation(choices.integer(0, len(case.program) - 1))

    def _swap(self, choices: Choices, case: Case, _corpus: Sequence[Case]) -> Case:
        if len(case.program) < 2:
            return case
        place = choices.integer(0, len(case.program) - 2)
        one, other = case.program[place : place + 2]
        return replace(case, program=(*case.program[:place], other, one, *case.program[place + 2 :]))

    def _join(self, choices: Choices, case: Case, corpus: Sequence[Case]) -> Case:
        other = choices.pick(corpus).program
        if case.model.tree is None:
            # Names of another model's parts mean nothing here, and a model of the zoo is not looked into.
            other = tuple(operation for operation in other if not _names_parts(operation))
        cut, start = choices.integer(0, len(case.program)), choices.integer(0, len(other))
        return replace(case, program=case.program[:cut] + other[start:])

    def _settings(self, choices: Choices, case: Case, corpus: Sequence[Case]) -> Case:
        other = choices.pick(corpus)
        kind = choices.pick(("strategy", "optimizer", "seed", "wrapping"))
        if kind == "strategy":
            return replace(case, strategy=other.strategy)
        if kind == "optimizer":
            return replace(case, optimizer=other.optimizer)
        if kind == "seed":
            return replace(case, seed=choices.integer(0, 2**16 - 1))
        if case.model.tree is None:
            return case
        names = drawn_tree(case.model.tree, case.model.dtype).units
        return replace(case, wrapping=replace(case.wrapping, units=tuple(n for n in names if choices.chance(2))))
