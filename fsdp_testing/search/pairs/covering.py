"""Legal cases that contain every pair of traits: chosen from many drawn cases, or combined from two if no draw has a pair.

A generator of covering arrays would need each rule of legality a second time, because only the normal form knows them. Drawing
a case costs half a millisecond, and the case is legal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from typing import Any, TypeVar

from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices, needs_of_case
from fsdp_testing.cases.drawing.normal_form import leaves_unused
from fsdp_testing.cases.models.tree import unit_names
from fsdp_testing.cases.records import Case
from fsdp_testing.search.pairs.traits import ZOO, traits_of, why_apart, with_options

DRAWN = 9000
"""Number of drawn cases to choose from; many more would add hardly any pair."""
DRAWN_OF_ALL = 3000
"""Number of cases, drawn as if everything were claimed, that show what a pair needs."""
TIMES = 3
"""Number of chosen cases per pair, if enough drawn cases have it: one case that fails for another reason decides nothing."""
_SEED = 7 << 40
_EXAMPLES = 3
_LONGEST = 14

T = TypeVar("T")
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Covering:
    """The cases to run, and the reasons why some pairs are not tested.

    Attributes:
        traits: Traits in alphabetical order.
        cases: Cases that contain every possible pair.
        not_claimed: Pairs that need unclaimed capabilities, with these capabilities.
        not_expressible: Pairs that no legal case can contain, with the reason.
        not_met: Pairs that no drawn case contains, and that lost a trait whenever a case was combined for them.
    """

    traits: tuple[str, ...]
    cases: tuple[Case, ...]
    not_claimed: dict[Pair, str]
    not_expressible: dict[Pair, str]
    not_met: dict[Pair, str]


def covering(scope: Scope) -> Covering:
    """Return cases of a scope that contain every pair of traits that its legal cases can have."""
    pool = _Pool(scope)
    pool.draw(DRAWN)
    needs = _Needs(scope)
    traits = tuple(sorted({*pool.numbers, *needs.of_trait}))
    not_claimed, not_expressible, not_met = {}, {}, {}
    for pair in combinations(traits, 2):
        if pool.has(pair):
            continue
        reason = why_apart(*pair)
        if reason:
            not_expressible[pair] = reason
        elif missing := needs.of(pair) - scope.capabilities:
            not_claimed[pair] = ", ".join(sorted(missing))
        elif pool.make(pair):
            continue
        elif missing := pool.missing.get(pair) or needs.least(pair, scope.capabilities):
            not_claimed[pair] = ", ".join(sorted(missing))
        else:
            not_met[pair] = "no drawn case has both, and making such a case legal drops one of them"
    # A case that was made for another pair may have one of these as well.
    not_claimed, not_met = ({p: why for p, why in each.items() if not pool.has(p)} for each in (not_claimed, not_met))
    return Covering(traits, tuple(pool.chosen(TIMES)), not_claimed, not_expressible, not_met)


def _drawers(scope: Scope) -> list[CaseDrawer]:
    """One drawer for each world size, which is the usual one there."""
    sizes = scope.world_sizes
    return [CaseDrawer(replace(scope, world_sizes=(*sizes[at:], *sizes[:at]))) for at in range(len(sizes))]


class _Pool:
    """Cases, each with a bit mask of its traits; and for each trait the mask of those that it has met.

    Attributes:
        numbers: The bit of each trait.
        missing: The unclaimed capabilities that a case with both traits of a pair needs, if every such case needs some.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._drawers = _drawers(scope)
        self.numbers: dict[str, int] = {}
        self.missing: dict[Pair, frozenset[str]] = {}
        self._cases: list[tuple[Case, int]] = []
        self._met: defaultdict[int, int] = defaultdict(int)
        self._examples: defaultdict[str, list[Case]] = defaultdict(list)

    def draw(self, count: int) -> None:
        """Draw cases, each with some of the options that are not drawn elsewhere."""
        for number in range(count):
            choices, drawer = SeededChoices(_SEED + number), self._drawers[number % len(self._drawers)]
            case = drawer.draw(choices)
            more = drawer.shape(with_options(case, choices))
            self._add(more if self._fair(more) else case)

    def has(self, pair: Pair) -> bool:
        """Return whether a case has both traits."""
        first, second = map(self.numbers.get, pair)
        return first is not None and second is not None and bool(self._met[first] >> second & 1)

    def make(self, pair: Pair) -> bool:
        """Make a case of two that have one trait each, and keep it if its legal form has both.

        Some operations are legal in low precision with a model of the zoo alone: these models are tried last.
        """
        trees = [*product(*(self._examples[trait] for trait in pair))]
        zoo = [
            replace(one, model=case.model, wrapping=case.wrapping) for one, _ in trees for case in self._examples[ZOO]
        ]
        shape = self._drawers[0].shape
        for one, other in chain(trees, product(zoo, self._examples[pair[1]])):
            for mixed in _mixed(one, other):
                case = shape(mixed)
                missing = needs_of_case(case) - self._scope.capabilities
                if not case.program or not set(pair) <= traits_of(case):
                    continue
                if not missing:
                    self._add(case)
                    return True
                self.missing[pair] = min(self.missing.get(pair, missing), missing, key=len)
        return False

    def chosen(self, times: int) -> Iterator[Case]:
        """Yield cases until every pair occurs the required number of times, if possible: cases with the most pairs first."""
        met = [defaultdict[int, int](int) for _ in range(times)]
        left, least = self._cases, 256
        while least:
            passed_over = []
            for case, mask in left:
                new = sum((mask & ~met[-1][bit]).bit_count() for bit in _bits(mask))
                if new < 2 * least:
                    passed_over += [(case, mask)] if new else []
                    continue
                yield case
                for bit in _bits(mask):
                    carried = mask
                    for layer in met:
                        carried, layer[bit] = carried & layer[bit], layer[bit] | carried
            left, least = passed_over, least // 2

    def _fair(self, case: Case) -> bool:
        return bool(case.program) and needs_of_case(case) <= self._scope.capabilities

    def _add(self, case: Case) -> None:
        traits = traits_of(case)
        mask = sum(1 << self.numbers.setdefault(trait, len(self.numbers)) for trait in traits)
        self._cases.append((case, mask))
        for trait in traits:
            self._met[self.numbers[trait]] |= mask
            if len(self._examples[trait]) < _EXAMPLES:
                self._examples[trait].append(case)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _mixed(one: Case, other: Case) -> Iterator[Case]:
    """Yield cases that combine parts of two others: every combination of model, program, world, dtypes and the rest."""
    programs = [one.program, other.program, (*one.program, *other.program)[:_LONGEST]]
    programs.append((*other.program, *one.program)[:_LONGEST])
    models = [(case.model, wrapping.wrapping) for case, wrapping in product((one, other), repeat=2)]
    # What names modules of one tree: the other tree has others.
    again = other.wrapping.units if one.wrapping.checkpointed else ()
    ignored = unit_names(other.model.tree) if one.wrapping.ignored and other.model.tree else ()
    models.append((other.model, replace(other.wrapping, checkpointed=again, ignored=ignored)))
    worlds = [(case.world, case.strategy) for case in (one, other)]
    numbers = list(product((one.model.dtype, other.model.dtype), (one.mixed_precision, other.mixed_precision)))
    rest = [(case.cpu_offload, case.optimizer) for case in (one, other)]
    # Each combination once: most parts of two cases are equal, and making a case legal takes half a millisecond.
    parts: tuple[Sequence[Any], ...] = (programs, models, worlds, numbers, rest)
    for program, (model, wrapping), (world, strategy), (dtype, precision), (offload, optimizer) in product(
        *map(_distinct, parts)
    ):
        yield Case(
            replace(model, dtype=dtype), world, program, one.seed, wrapping, strategy, precision, offload, optimizer
        )


def _distinct(items: Sequence[Any]) -> list[Any]:
    return [item for at, item in enumerate(items) if item not in items[:at]]


class _Needs:
    """The capabilities that each pair needs, whatever is claimed: those that all cases with the pair share."""

    def __init__(self, scope: Scope) -> None:
        self.of_trait: dict[str, frozenset[str]] = {}
        drawers = _drawers(replace(scope, capabilities=Scope().capabilities))
        self._seen: list[tuple[frozenset[str], frozenset[str]]] = []
        for number in range(DRAWN_OF_ALL):
            choices, drawer = SeededChoices(_SEED + number), drawers[number % len(drawers)]
            case = drawer.shape(with_options(drawer.draw(choices), choices))
            traits, needs = traits_of(case), needs_of_case(case)
            if leaves_unused(case) and (case.optimizer.name, *case.optimizer.arguments) != ("sgd", "lr"):
                needs |= {"unused_gradient_is_none"}
            self._seen.append((traits, needs))
            for trait in traits:
                self.of_trait[trait] = self.of_trait.get(trait, needs) & needs

    def of(self, pair: Pair) -> frozenset[str]:
        """Return the capabilities without which no case has both traits."""
        apart = frozenset().union(*(self.of_trait.get(trait, frozenset()) for trait in pair))
        together = [needs for traits, needs in self._seen if set(pair) <= traits]
        return apart | (frozenset.intersection(*together) if together else frozenset())

    def least(self, pair: Pair, claimed: frozenset[str]) -> frozenset[str]:
        """Return the smallest set of unclaimed capabilities that a case with both, or two cases with one each, need.

        If two kinds of an operation need different capabilities, its cases do not share them.
        """
        groups = [[needs for traits, needs in self._seen if set(pair) <= traits]]
        if not groups[0]:
            groups = [[needs for traits, needs in self._seen if trait in traits] for trait in pair]
        return frozenset().union(*(min((needs - claimed for needs in group), key=len) for group in groups if group))
