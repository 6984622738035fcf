"""Writes ci/swaps.md: which confusions of ranks, shards, parameters and micro-batches each check would not notice.

    python ci/blind_swaps.py               # compute everything and write the page
    python ci/blind_swaps.py CHECK...      # print what these checks (fnmatch patterns) would not notice

No implementation runs. The oracle computes each case of a check as it is, and once more for each swap that an
implementation could commit. What is compared by the check is compared, with its bounds: a swap after which all of it
agrees is one that the check is blind to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp_testing.cases.records import UNIT_ROUNDOFF, Case
from fsdp_testing.checks.suites import CHECKS, Check
from fsdp_testing.checks.suites.check import HYBRID, Place
from fsdp_testing.judging.case_runner import ORDINARY
from fsdp_testing.oracle import models, oracle
from fsdp_testing.oracle.quantities import Comparison, Expected, ExpectedPoint, Quantity
from fsdp_testing.oracle.reduction import LocalGradients
from fsdp_testing.oracle.replay import Replay, ReplayPoint
from fsdp_testing.oracle.tensors import difference

PAGE = Path(__file__).parent / "swaps.md"
ROUNDINGS = 16
"""Of one operation, where a check compares in lockstep: an order of magnitude more than bounds there allow."""

KINDS = {
    "inputs": "one rank computes on the inputs of the rank before it",
    "rank": "the gradient of the rank before it is reduced in place of a rank's own",
    "sign": "a rank's gradient is reduced with the other sign",
    "micro-batch": "the gradient of the backward before it is reduced in place of a backward's own",
    "gradients": "the gradients of two parameters of one shape are exchanged",
    "gradient shards": "the halves of a gradient are exchanged, as by two ranks that take each other's shard",
    "parameters": "two parameters of one shape are exchanged when they are gathered",
    "parameter shards": "the halves of a parameter are exchanged when it is gathered",
}


class Reason(NamedTuple):
    """Why a check need not notice a swap: check, kind of swap and what is swapped (`model: name`) as fnmatch patterns."""

    check: str
    kind: str
    what: str
    why: str


REASONS = (
    Reason(
        "*", "gradient shards", "batch_norm: first.bias", "a bias before batch normalisation has no gradient but roundings"
    ),
    *(
        Reason(check, "micro-batch", what, "what was trained since saving is undone before it is compared: the claim")
        for check, what in (("*.rolled_back*", "*"), ("optim_state.partly_stepped", "conditional: 1 and 0"))
    ),
    Reason("backward.twice", "micro-batch", "*", "two backwards of one graph give the same gradient: the claim"),
    Reason("training.same_batch_twice", "micro-batch", "*", "the same batch twice is what the check asks about"),
    Reason("zero_grad.then_step", "micro-batch", "*", "the reduced gradient is cleared before anything is compared: the claim"),
    Reason("accumulation.cleared", "micro-batch", "*: 2 and 1", "cleared to zeros before any reduction: it counts for nothing"),
    Reason("accumulation.cleared_then_unused", "micro-batch", "*: 1 and 0", "cleared before reductions: it counts for nothing"),
    Reason("mixed_precision.largest_numbers", "rank", "*", "ranks have equal inputs, so that it is known how large their sum is"),
    Reason(
        "mixed_precision.largest_numbers", "* shards", "deep_nest: before.*",
        "inputs near 10,000 saturate the first tanh: no gradient comes before it, and no bias counts there"
    ),
    *(
        Reason(check, "rank", "*", "ranks have equal inputs, for nobody reduces what is ignored")
        for check in ("clipping.ignored_trained", "wrapping.ignored_stepped", "options.ignored_by_parameter")
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Swap:
    """One confusion that an implementation could commit.

    Attributes:
        kind: One of `KINDS`.
        one: Rank, number of a backward, or FQN.
        other: What it is exchanged with, or stands in for it.
    """

    kind: str
    one: Any = None
    other: Any = None


class SwappedReplay(Replay):
    """The oracle's run of a program with one confusion in it."""

    def __init__(self, case: Case, swap: Swap) -> None:
        self.swap = swap
        self._inside = self._awaited = self._reduced = False
        self.computed = False
        self._latest: dict[int, list[LocalGradients]] = {}
        self._used: set[str] = set()
        super().__init__(case)

    @property
    def committed(self) -> bool:
        """Whether there were numbers to confuse: reduced gradients, or parameters that something was computed with."""
        if self.swap.kind not in ("parameters", "parameter shards"):
            return self._reduced
        names = {self.swap.one, self.swap.other} & set(self.parameters)
        frozen = {fqn for fqn in names if not self.parameters[fqn].requires_grad}
        return self.computed and (bool(names & self._used or frozen) or not self._latest)

    def forward(self, rank: int, batch: Any, *, penalised: bool = False, leaves: Any = None) -> models.Forwarded:
        """Run forward on the inputs, or with the parameters, that the swap makes of them."""
        swap = self.swap
        if swap.kind == "inputs" and rank == swap.one:
            self._reduced = self._reduced or not batch.alike
            # Its own buffers, on the inputs of the other.
            kept = self.replicas[swap.other]
            self.replicas[swap.other] = self.replicas[rank]
            try:
                return super().forward(swap.other, batch, penalised=penalised, leaves=leaves)
            finally:
                self.replicas[swap.other] = kept
        if swap.kind not in ("parameters", "parameter shards") or self._inside:
            return super().forward(rank, batch, penalised=penalised, leaves=leaves)
        with _Exchanged(self, swap):
            return super().forward(rank, batch, penalised=penalised, leaves=leaves)

    def local_gradients(
        self, rank: int, batch: Any, *, penalised: bool = False, leaves: Any = None
    ) -> tuple[models.Forwarded, LocalGradients]:
        """Run forward and backward with the parameters that the swap makes of them."""
        if self.swap.kind not in ("parameters", "parameter shards"):
            return super().local_gradients(rank, batch, penalised=penalised, leaves=leaves)
        with _Exchanged(self, self.swap):
            self._inside = True
            try:
                return super().local_gradients(rank, batch, penalised=penalised, leaves=leaves)
            finally:
                self._inside = False

    def accumulate(self, rank: int, gradients: LocalGradients) -> None:
        """Add the gradients that the swap takes for those of `rank`."""
        self._latest.setdefault(rank, []).append(gradients)
        self._used |= set(gradients.values)
        values = self._confused(rank, gradients.values)
        super().accumulate(rank, LocalGradients(values, {fqn: one.abs().double() for fqn, one in values.items()}))

    def _confused(self, rank: int, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        swap, number = self.swap, len(self._latest[rank]) - 1
        if swap.kind == "rank" and rank == swap.one:
            return self._instead(own, self._latest[swap.other][-1].values)
        if swap.kind == "micro-batch" and number == swap.one:
            return self._instead(own, self._latest[rank][swap.other].values)
        if swap.kind == "sign" and rank == swap.one:
            return self._instead(own, {fqn: -gradient for fqn, gradient in own.items()})
        if swap.kind == "gradients" and swap.one in own and swap.other in own:
            return self._instead(own, own | {swap.one: own[swap.other], swap.other: own[swap.one]})
        if swap.kind == "gradient shards" and swap.one in own:
            return self._instead(own, own | {swap.one: halves_exchanged(own[swap.one])})
        return own

    def _instead(self, own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._awaited = self._awaited or any(bool(one.any()) for one in (*own.values(), *other.values()))
        return other

    def reduce_pending(self) -> None:
        """Reduce; what was confused before counts from now on."""
        self._reduced = self._reduced or self._awaited
        super().reduce_pending()

    def _nothing_pending(self) -> None:
        self._awaited = False
        super()._nothing_pending()


class _Exchanged:
    """Lets a replay compute with confused parameters for a while."""

    def __init__(self, replay: SwappedReplay, swap: Swap) -> None:
        self._replay = replay
        self._names = [fqn for fqn in (swap.one, swap.other) if fqn is not None]

    def __enter__(self) -> None:
        compute = self._replay.compute
        self._kept = [compute[fqn].data for fqn in self._names]
        shown = self._kept[::-1] if len(self._kept) > 1 else [halves_exchanged(self._kept[0])]
        for fqn, data in zip(self._names, shown):
            compute[fqn].data = data
        self._replay.computed = True

    def __exit__(self, *_: object) -> None:
        for fqn, data in zip(self._names, self._kept):
            self._replay.compute[fqn].data = data


def halves_exchanged(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, as two ranks have them that take each other's half."""
    return tensor.reshape(-1).roll(tensor.numel() // 2).reshape(tensor.shape).contiguous()


def swaps_of(case: Case, replay: Replay, ignored: Sequence[str]) -> Iterator[Swap]:
    """Every swap that an implementation could commit in a case, but for parameters that are not compared."""
    yield from (Swap(kind, rank, rank - 1) for kind in ("inputs", "rank") for rank in range(1, case.world.size))
    yield from (Swap("sign", rank) for rank in range(case.world.size))
    backwards = sum(len(operation.batches()) for operation in case.program)
    yield from (Swap("micro-batch", number, number - 1) for number in range(1, backwards))
    by_shape: dict[tuple[Any, ...], list[str]] = {}
    for fqn, parameter in replay.parameters.items():
        if any(fnmatchcase(fqn, pattern) for pattern in ignored):
            continue
        by_shape.setdefault((parameter.shape, parameter.dtype, replay.compute[fqn].dtype), []).append(fqn)
        if parameter.numel() > 1 and parameter.numel() % 2 == 0:
            yield from (Swap(kind, fqn) for kind in ("gradient shards", "parameter shards"))
    for alike in by_shape.values():
        numel = replay.parameters[alike[0]].numel()
        yield from (Swap(kind, *pair) for pair in pairwise(alike) if numel for kind in ("gradients", "parameters"))


# ------------------------------------------------------------------------------------------------- what is noticed


def truth_of(case: Case, comparison: Comparison) -> tuple[Replay, Sequence[ExpectedPoint]]:
    """The oracle's own run of a case, and what a check expects of it."""
    replay = Replay(case)
    if not comparison.lockstep:
        return replay, oracle.expect_free(case).points
    points = [_after_one_operation(point) for point in replay.run(observe_all=True)]
    return replay, points


def _after_one_operation(point: ReplayPoint) -> ExpectedPoint:
    quantities = {quantity: _rounded(value) for quantity, value in point.values.items()}
    return ExpectedPoint(point.index, quantities, snapshot=point.snapshot, pending=point.pending)


def _rounded(value: torch.Tensor | None) -> Expected:
    if value is None or not value.is_floating_point() or not value.numel():
        return Expected(value)
    return Expected(value, ROUNDINGS * UNIT_ROUNDOFF[models.dtype_name(value.dtype)] * float(value.abs().max()))


def notices(points: Sequence[ExpectedPoint], seen: Sequence[ReplayPoint], comparison: Comparison) -> bool:
    """Whether anything that is compared is beyond its bound."""
    return any(
        _differs(expected, other.values.get(quantity))
        for point, other in zip(points, seen, strict=True)
        for quantity, expected in point.quantities.items()
        if _is_compared(quantity, comparison)
    )


def _is_compared(quantity: Quantity, comparison: Comparison) -> bool:
    asked = {"gradient": comparison.gradients, "optimizer": comparison.optimizer, "buffer": comparison.buffers}
    asked["result"] = comparison.outputs
    ignored = quantity.kind != "result" and any(fnmatchcase(quantity.name, one) for one in comparison.ignore)
    return asked.get(quantity.kind, True) and not ignored


def _differs(expected: Expected, got: torch.Tensor | None) -> bool:
    if expected.value is None or got is None:
        return (expected.value is None) != (got is None)
    return expected.value.shape != got.shape or difference(got, expected.value, expected.bound).exceeded


# ----------------------------------------------------------------------------------------------------- every check


@dataclass(slots=True)
class Blind:
    """What one check does not notice, by kind of swap.

    Attributes:
        asked: Swaps that there was occasion for, of each kind; the same swap in several cases of one model counts once.
        unnoticed: Those that no case of the check notices.
    """

    asked: dict[str, set[tuple[str, Swap]]] = field(default_factory=dict)
    unnoticed: dict[str, set[tuple[str, Swap]]] = field(default_factory=dict)


def cases_of(check: Check) -> list[Case]:
    """The cases of a check on two ranks (on four, for hybrid strategies) under the first of its strategies."""
    strategy = check.strategies[0]
    hybrid = strategy in HYBRID
    return [
        check.mode.seen_as(case)
        for case in check.build(Place(4 if hybrid else 2, strategy, mesh=(2, 2) if hybrid else ()))
    ]


def is_computed(check: Check) -> bool:
    """Whether a check is decided by what one run of the oracle expects; others compare runs or follow rules of their own."""
    return check.judge is None and check.mode.expect is None and (check.mode.review is None or check.mode == ORDINARY)


def blind_of(check: Check) -> Blind:
    """Return what a check does not notice."""
    found = Blind()
    noticed: set[tuple[str, Swap]] = set()
    for case in cases_of(check):
        replay, points = truth_of(case, check.comparison)
        for swap in swaps_of(case, replay, check.comparison.ignore):
            key = (case.model.name, swap)
            if key in noticed:
                continue
            other = SwappedReplay(case, swap)
            try:
                seen = other.run(observe_all=check.comparison.lockstep)
            except RuntimeError as error:
                # Forward edits what the swap put in its place: autograd refuses, on ranks as here.
                if "modified by an inplace operation" not in str(error):
                    raise
                found.asked.setdefault(swap.kind, set()).add(key)
                noticed.add(key)
                continue
            if other.committed:
                found.asked.setdefault(swap.kind, set()).add(key)
                if notices(points, seen, check.comparison):
                    noticed.add(key)
    found.unnoticed = {kind: keys - noticed for kind, keys in found.asked.items() if keys - noticed}
    return found


Unnoticed = tuple[str, str, str, str]
"""Check, kind of swap, what is swapped, and why the check need not notice it; empty if nobody has said so."""


def unnoticed(name: str, blind: Blind) -> Iterator[Unnoticed]:
    """Yield what a check does not notice, with the reasons."""
    for kind, keys in blind.unnoticed.items():
        for model, swap in sorted(keys, key=str):
            names = [str(one) for one in (swap.one, swap.other) if one is not None]
            what = f"{model}: {' and '.join(names)}"
            reasons = (
                reason.why
                for reason in REASONS
                if all(fnmatchcase(*pair) for pair in zip((name, kind, what), reason[:3]))
            )
            yield name, kind, what, next(reasons, "")


def page(table: Mapping[str, Blind]) -> str:
    """The page: how many swaps each suite notices, and all that are not noticed."""
    lines = [
        "# What each suite would not notice",
        "",
        "Made by `python ci/blind_swaps.py`: the oracle computes the cases of each check once more for each swap that an",
        "implementation could commit, and what the check compares is compared, with its bounds. A cell says how many of the",
        "swaps of that kind some case of the same check notices.",
        "",
        *(f"- *{kind}*: {meaning}" for kind, meaning in KINDS.items()),
        "",
        f"| suite | checks | {' | '.join(KINDS)} |",
        f"|---|---|{'---|' * len(KINDS)}",
    ]
    for suite in dict.fromkeys(name.partition(".")[0] for name in table):
        inside = [blind for name, blind in table.items() if name.partition(".")[0] == suite]
        cells = (_cell(inside, kind) for kind in KINDS)
        lines.append(f"| {suite} | {len(inside)} | {' | '.join(cells)} |")
    lines += ["", "## Not noticed, and why", "", "| check | kind | swap | reason |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {kind} | {what} | {why or '**none**'} |"
        for check, blind in table.items()
        for name, kind, what, why in unnoticed(check, blind)
    ]
    others = ", ".join(f"`{name}`" for name, check in CHECKS.items() if not is_computed(check))
    lines += ["", "## Not computed", "", f"Checks that compare runs or follow rules of their own: {others}."]
    return "\n".join([*lines, ""])


def _cell(inside: Sequence[Blind], kind: str) -> str:
    asked = sum(len(blind.asked.get(kind, ())) for blind in inside)
    missed = sum(len(blind.unnoticed.get(kind, ())) for blind in inside)
    return f"{asked - missed} of {asked}" if asked else ""


def main(patterns: list[str]) -> None:
    """Compute, and write the page or print."""
    torch.set_num_threads(1)
    chosen = [c for name, c in CHECKS.items() if not patterns or any(fnmatchcase(name, one) for one in patterns)]
    table = {check.name: blind_of(check) for check in chosen if is_computed(check)}
    for name, blind in table.items():
        for one in unnoticed(name, blind):
            sys.stdout.write(f"{': '.join(one[:3])}: {one[3] or 'NO REASON'}\n")
    if not patterns:
        PAGE.write_text(page(table), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
