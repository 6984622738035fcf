"""Does each operation keep what the strategy promises of memory and communication? Pure, over the ranks' accounts.

Right numbers do not show a gathered parameter that is never freed, nor a collective too many. The rules hold for any
program: they say what may be held after each operation, given what was held before it, and what the operations whose
cost is known from the strategy alone may put on the wire.

Source: Rajbhandari et al., "ZeRO", section 7 (one gather for forward, one for backward, one reduction); Zhao et al.,
"PyTorch FSDP", section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_testing.records import (
    AssignData,
    Case,
    EditFullParameters,
    Forward,
    ForwardBackward,
    Freeze,
    Interrupt,
    Measure,
    Observe,
    Operation,
    OperationAccount,
    Overrun,
    Reload,
    ReplaceParameters,
    SetLr,
    SeveralForwards,
    Step,
    Thaw,
    UnshardFirst,
    ZeroGrad,
)

FLAG_BYTES = 16
"""A collective of no more than this is a flag or a norm, and moves no parameter or gradient."""

_FREES_AFTER_FORWARD = ("full_shard", "hybrid_shard")
_SILENT = (Step, ZeroGrad, SetLr, Observe, Freeze, Thaw)
_ROOT = frozenset({""})


@dataclass(frozen=True, slots=True)
class Theory:
    """What one pass over the parameters takes at most.

    Attributes:
        uses: How often a forward may run one part of the model.
        padded_bytes: All parameters, with the padding that sharding may need.
        reductions: Collectives that reduce the gradients of all units once.
    """

    uses: int
    padded_bytes: int
    reductions: int


def review(case: Case, ranks: Sequence[Sequence[OperationAccount]], theory: Theory | None) -> Overrun | None:
    """Return the first promise that is not kept.

    Args:
        case: A legal case that ran to its end on every rank.
        ranks: By rank, the accounts in order; an operation without one issued nothing and changed nothing.
        theory: For the rules of communication; None leaves them out.
    """
    found = [broken for rank, accounts in enumerate(ranks) for broken in _of_rank(case, rank, accounts, theory)]
    return min(found, key=lambda broken: broken.operation, default=None)


def _of_rank(case: Case, rank: int, accounts: Sequence[OperationAccount], theory: Theory | None) -> Iterator[Overrun]:
    before: frozenset[str] = frozenset()
    for account in accounts:
        operation = case.program[account.index] if 0 <= account.index < len(case.program) else None
        held = dict(account.held)
        may_hold = _may_hold(case.strategy, operation, account.backward, before)
        kept = tuple((unit, held[unit]) for unit in sorted(set(held) - may_hold)) if may_hold is not None else ()
        if kept:
            stays = sum(size for _, size in kept)
            yield Overrun(Measure.KEPT_PARAMETERS, account.index, rank, stays, 0, kept)
        if theory is not None and operation is not None:
            yield from _excess(case.strategy, rank, operation, account, theory)
        before = frozenset(held)


# ----------------------------------------------------------------------------------------------- memory


def _may_hold(
    strategy: str, operation: Operation | None, backward: bool, before: frozenset[str]
) -> frozenset[str] | None:
    """Units that may be held when the operation is over; None for any."""
    if operation is None or isinstance(operation, Reload):
        return frozenset()  # a new model, of which nothing has run
    if isinstance(operation, Interrupt):
        return None  # what is open when the user's code raises is given back when it next runs
    early = strategy in _FREES_AFTER_FORWARD
    if isinstance(operation, (ForwardBackward, SeveralForwards, UnshardFirst)) and backward:
        # While gradients await their reduction, only a strategy that frees after forward gives parameters back.
        return None if getattr(operation, "no_sync", False) and not early else frozenset()
    if isinstance(operation, UnshardFirst):
        return before | _ROOT | frozenset(operation.units) if early else None
    if isinstance(operation, (Forward, ForwardBackward, SeveralForwards, AssignData)):
        # The root ends forward last and begins backward first: it may stay, with every strategy.
        return before | _ROOT if early else None
    return before


# ----------------------------------------------------------------------------------------------- communication


def _excess(
    strategy: str, rank: int, operation: Operation, account: OperationAccount, theory: Theory
) -> Iterator[Overrun]:
    passes, reductions = _most(strategy, operation, theory)
    if passes is None:
        return
    for unit, times in Counter(account.gathered).items():
        # Whole copies are filled too where they are cast; that moves nothing.
        if times > passes and strategy != "no_shard":
            yield Overrun(Measure.UNIT_GATHERS, account.index, rank, times, passes, ((unit, 0),))
    wire = sum(size for size in account.gather_bytes if size > FLAG_BYTES)
    limit = 0 if strategy == "no_shard" else passes * theory.padded_bytes
    if wire > limit:
        yield Overrun(Measure.GATHERED_BYTES, account.index, rank, wire, limit)
    issued = sum(size > FLAG_BYTES for size in account.reduction_bytes)
    if issued > reductions:
        yield Overrun(Measure.REDUCTIONS, account.index, rank, issued, reductions)


def _most(strategy: str, operation: Operation, theory: Theory) -> tuple[int | None, int]:
    """How often a unit may be gathered, and how many reductions there may be; None where theory does not tell."""
    if isinstance(operation, _SILENT):
        return 0, 0
    if isinstance(operation, (EditFullParameters, ReplaceParameters)):
        return 1, 0
    # What runs several times may be freed and gathered again each time, in forward and in backward.
    uses = theory.uses * len(operation.batches())
    if isinstance(operation, (Forward, AssignData)):
        return uses, 0
    if not isinstance(operation, (ForwardBackward, SeveralForwards, UnshardFirst)):
        return None, 0
    # Of several forwards the first backward frees what the next one needs, with every strategy.
    twice = strategy in _FREES_AFTER_FORWARD or isinstance(operation, SeveralForwards)
    by_hand = isinstance(operation, UnshardFirst)
    reduces = not getattr(operation, "no_sync", False)
    return uses * (1 + twice) + by_hand, uses * theory.reductions * reduces
