"""Checks that no operation takes more memory or communication than the strategy promises. Pure, over the ranks' accounts.

Right numbers do not show a gathered parameter that is never freed, nor a collective too many. The rules hold for any
program: they say what may be unsharded after each operation, given what was before it, and what the operations whose
cost is known from the strategy alone may put on the wire.

Source: Rajbhandari et al., "ZeRO", section 7 (one gather for forward, one for backward, one reduction); Zhao et al.,
"PyTorch FSDP", section 3.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from fsdp_testing.cases.drawing.normal_form import plans_of
from fsdp_testing.cases.models.tree_schema import ParameterSpec, every, parameters, walk
from fsdp_testing.cases.operations import ForwardBackward, UnshardFirst
from fsdp_testing.cases.records import (
    Case,
    FailureKind,
    Finding,
    Measure,
    Operation,
    OperationAccount,
    Overrun,
    RankObservation,
)
from fsdp_testing.judging.checkers.explain import finding
from fsdp_testing.oracle.models import most_uses
from fsdp_testing.oracle.quantities import Expectation

FLAG_BYTES = 16
"""A collective up to this size is a flag or a norm, and moves no parameter or gradient."""

_FREES_AFTER_FORWARD = ("full_shard", "hybrid_shard")
_KEEPS = {"kept_after_backward", "partial_reshard", "single_units", "unit_strategies"}
"""Settings with which parameters, or a part of them, stay where the strategy would free them."""


@dataclass(frozen=True, slots=True)
class CommunicationBudget:
    """The most that one pass over the parameters may take.

    Attributes:
        uses: How often a forward may run one part of the model.
        padded_bytes: All parameters, with the padding that sharding may need.
        reductions: Collectives that reduce the gradients of all units once.
        casts: Whole copies may be filled where nothing is sharded, because they are cast; that moves nothing.
    """

    uses: int
    padded_bytes: int
    reductions: int
    casts: bool = True


def first_overrun(
    case: Case,
    ranks: Sequence[Sequence[OperationAccount]],
    budget: CommunicationBudget | None,
    measures: Collection[Measure] = tuple(Measure),
) -> Overrun | None:
    """Return the first operation that takes more than it may.

    Args:
        case: A legal case that ran to its end on every rank.
        ranks: By rank, the accounts in order; an operation without one issued nothing and changed nothing.
        budget: For the rules of communication; None leaves them out.
        measures: The rules to apply.
    """
    overruns = [overrun for rank, accounts in enumerate(ranks) for overrun in _of_rank(case, rank, accounts, budget)]
    measured = (overrun for overrun in overruns if overrun.measure in measures)
    return min(measured, key=lambda overrun: overrun.operation, default=None)


def _of_rank(
    case: Case, rank: int, accounts: Sequence[OperationAccount], budget: CommunicationBudget | None
) -> Iterator[Overrun]:
    # An operation may leave units unsharded that it finds unsharded.
    before: frozenset[str] = frozenset()
    for account in accounts:
        operation = case.program[account.index] if 0 <= account.index < len(case.program) else None
        unsharded = dict(account.held)
        sharded = case.world.replicas > 1  # one rank has nothing to free, but for copies in another dtype
        early = sharded and case.strategy in _FREES_AFTER_FORWARD and not _KEEPS & set(case.wrapping.settings)
        # Without an operation it is a new model that has not run.
        allowed: frozenset[str] | None = frozenset()
        if operation is not None:
            allowed = operation.may_stay_unsharded(before, frees_early=early, backward=account.backward)
        kept = () if allowed is None else tuple(item for item in sorted(unsharded.items()) if item[0] not in allowed)
        if kept:
            stays = sum(size for _, size in kept)
            earlier = all(unit in before and unit not in account.gathered for unit, _ in kept)
            yield Overrun(Measure.KEPT_PARAMETERS, account.index, rank, stays, 0, kept, earlier)
        if budget is not None and operation is not None:
            yield from _excess(case.strategy, rank, operation, account, budget)
        before = frozenset(unsharded)


def _excess(
    strategy: str, rank: int, operation: Operation, account: OperationAccount, budget: CommunicationBudget
) -> Iterator[Overrun]:
    passes = operation.most_passes(budget.uses, frees_early=strategy in _FREES_AFTER_FORWARD)
    if passes is None:
        return
    reductions = operation.most_reductions(budget.uses) * budget.reductions
    for unit, times in Counter(account.gathered).items():
        most = 0 if strategy == "no_shard" else passes
        if times > most and not (strategy == "no_shard" and budget.casts):
            yield Overrun(Measure.UNIT_GATHERS, account.index, rank, times, most, ((unit, 0),))
    wire = sum(size for size in account.gather_bytes if size > FLAG_BYTES)
    limit = 0 if strategy == "no_shard" else passes * budget.padded_bytes
    if wire > limit:
        yield Overrun(Measure.GATHERED_BYTES, account.index, rank, wire, limit)
    issued = sum(size > FLAG_BYTES for size in account.reduction_bytes)
    if issued > reductions:
        yield Overrun(Measure.REDUCTIONS, account.index, rank, issued, reductions)


def review_by_hand(case: Case, ranks: Sequence[RankObservation], _expectation: Expectation) -> Finding | None:
    """Return the finding that units were not gathered or released by hand before a micro-batch, as the program asks.

    The program has a plain micro-batch, too: after a release, the forward has to gather each unit once more than there.
    """
    (plain,) = (index for index, operation in enumerate(case.program) if isinstance(operation, ForwardBackward))
    (by_hand,) = (index for index, operation in enumerate(case.program) if isinstance(operation, UnshardFirst))
    for rank in ranks:
        accounts = {account.index: Counter(account.gathered) for account in getattr(rank, "accounts", ())}
        usual, times = accounts.get(plain, Counter()), accounts.get(by_hand, Counter())
        names = ", ".join(sorted(unit or "the root" for unit in usual if times[unit] <= usual[unit]))
        if names or not usual:
            text = (
                f"rank {rank.rank} gathers no unit"
                if not usual
                else f"rank {rank.rank} does not gather {names} by hand"
            )
            text += ", or does not release it: its forward gathers nothing again" if usual else ""
            return finding(case, FailureKind.MISSING, "gathers", by_hand, text, ranks=(rank.rank,))
    return None


_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_ALIGNMENT_BYTES = 16


def budget_of(case: Case) -> CommunicationBudget | None:
    """Return the most that one pass takes; None if unknown: models of the zoo, and recomputed activations."""
    if case.model.tree is None or case.wrapping.checkpointed:
        return None
    specs = {spec.tie or spec.fqn: spec for spec in parameters(case.model.tree)}
    shards = case.world.mesh_shape[-1]
    cast = [dtype for o in case.program if (dtype := o.new_dtype())]
    wide = max((case.model.dtype, *cast), key=lambda name: _BYTES[name])
    units = _units(case, len(specs))
    # Aligned in the dtype of the computation, and gathered in that of storage where numbers are edited or saved.
    computed = (case.mixed_precision.param_dtype if case.mixed_precision else None) or case.model.dtype
    aligned = _ALIGNMENT_BYTES // min(_BYTES[computed], _BYTES[case.model.dtype])
    padded = sum(_padded(spec, shards, wide, aligned) for spec in specs.values())
    dtypes = {spec.dtype or case.model.dtype for spec in specs.values()}
    # A forward whose outputs cannot be examined passes for one without a graph, and frees what it gathered.
    hides = "opaque" in (case.model.tree.get("output"), *(p.node.get("returns") for p in every(walk(case.model.tree))))
    # With a mesh of two axes gradients are reduced over one and then over the other.
    return CommunicationBudget(
        uses=most_uses(case) * (2 if hides else 1),
        padded_bytes=padded + units * shards * aligned * _BYTES[wide],
        reductions=units * len(dtypes) * len(case.world.mesh_shape),
    )


def _units(case: Case, most: int) -> int:
    """Return how many units there may be: by a policy, one for each parameter."""
    if case.wrapping.policy is not None:
        return most + 1
    return 1 + max(len(units) for units in plans_of(case))


def _padded(spec: ParameterSpec, shards: int, dtype: str, aligned: int) -> int:
    """Return the bytes of one parameter, padded on its first dimension or with up to `aligned` elements, whichever is more."""
    rows, *rest = spec.shape or (1,)
    row = math.prod(rest)
    size = max(_BYTES[spec.dtype or dtype], _BYTES[dtype])
    return max(-(-rows // shards) * shards * row, rows * row + aligned) * size
