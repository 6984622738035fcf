"""Ranks that disagree about a collective are reported so at once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from legal_programs import me, rank, run, scatter_single, single

from fsdp_testing.ranks.pool import Fate, Pool
from fsdp_testing.ranks.pool.world import current_world


def other_operation() -> None:
    if me():
        dist.broadcast(torch.ones(4), 0)
    else:
        dist.all_reduce(torch.ones(4))


def gather_against_scatter() -> None:
    if me():
        single(torch.ones(8), torch.ones(4))
    else:
        scatter_single(torch.ones(4), torch.ones(8))


def reduce_against_gather() -> None:
    if me():
        dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4))
    else:
        dist.all_reduce(torch.ones(4))


def other_size() -> None:
    dist.all_reduce(torch.ones(8 if me() else 4))


def other_gathered_size() -> None:
    n = 8 if me() else 4
    dist.all_gather([torch.ones(n), torch.ones(n)], torch.ones(n))


def other_integer_dtype() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if me() else torch.float32))


def other_float_dtype() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if me() else torch.float32))


def other_reduce_op() -> None:
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if me() else dist.ReduceOp.SUM)


def other_reduce_op_of_scatter() -> None:
    value, out = torch.ones(4), torch.ones(2)
    op = dist.ReduceOp.MAX if me() else dist.ReduceOp.SUM
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, value, op=op)


def other_order() -> None:
    sizes = (3, 5) if me() else (5, 3)
    for size in sizes:
        dist.all_reduce(torch.ones(size))


def other_root() -> None:
    dist.broadcast(torch.ones(4), 1 if me() else 0)


def other_destination() -> None:
    dist.reduce(torch.ones(4), 1 if me() else 0)


def skipped_call() -> None:
    for step in range(4):
        if not (me() and step == 1):
            dist.all_reduce(torch.ones(step + 1))


def functional_op() -> None:
    funcol.all_reduce(torch.ones(4), "max" if me() else "sum", current_world().group).add(1)


def functional_size() -> None:
    funcol.all_gather_tensor(torch.ones(8 if me() else 4), 0, current_world().group).add(1)


def overload_of_the_method() -> None:
    group = current_world().group
    group.allreduce([torch.ones(4)], dist.ReduceOp.MAX if me() else dist.ReduceOp.SUM).wait()


def object_against_tensor() -> None:
    if me():
        dist.all_gather_object([None, None], {"a": 1})
    else:
        dist.all_reduce(torch.ones(4))


def meta_tensor() -> None:
    dist.all_reduce(torch.ones(4, device="meta" if me() else "cpu"))


def meta_gather() -> None:
    device = "meta" if me() else "cpu"
    single(torch.ones(8, device=device), torch.ones(4, device=device))


REFUSED: dict[Callable[[], None], tuple[str, str]] = {
    other_operation: ("all_reduce(sum) float32[4]", "broadcast(root=0) float32[4]"),
    gather_against_scatter: ("reduce_scatter_single(sum) float32[8]", "all_gather_single float32[8]"),
    reduce_against_gather: ("all_reduce(sum) float32[4]", "all_gather float32[[4], [4]]"),
    other_size: ("all_reduce(sum) float32[4]", "all_reduce(sum) float32[8]"),
    other_gathered_size: ("all_gather float32[[4], [4]]", "all_gather float32[[8], [8]]"),
    other_integer_dtype: ("all_reduce(sum) float32[4]", "all_reduce(sum) int32[4]"),
    other_float_dtype: ("all_reduce(sum) float32[4]", "all_reduce(sum) float64[4]"),
    other_reduce_op: ("all_reduce(sum) float32[4]", "all_reduce(max) float32[4]"),
    other_reduce_op_of_scatter: ("reduce_scatter_single(sum) float32[4]", "reduce_scatter_single(max) float32[4]"),
    other_order: ("all_reduce(sum) float32[5]", "all_reduce(sum) float32[3]"),
    meta_tensor: ("all_reduce(sum) float32[4]", "all_reduce(sum) float32[4] on the meta device (moves nothing)"),
    meta_gather: ("all_gather_single float32[8]", "all_gather_single float32[8] on the meta device (moves nothing)"),
    other_root: ("broadcast(root=0) float32[4]", "broadcast(root=1) float32[4]"),
    other_destination: ("reduce(sum, root=0) float32[4]", "reduce(sum, root=1) float32[4]"),
    skipped_call: ("all_reduce(sum) float32[2]", "all_reduce(sum) float32[3]"),
    functional_op: ("all_reduce(sum) float32[4]", "all_reduce(max) float32[4]"),
    functional_size: ("all_gather_single float32[2, 4]", "all_gather_single float32[2, 8]"),
    overload_of_the_method: ("all_reduce(sum) float32[4]", "all_reduce(max) float32[4]"),
    # Torch 2.15 gathers the sizes of objects into one tensor.
    object_against_tensor: ("all_reduce(sum) float32[4]", "all_gather int64[[1], [1]] or all_gather_single int64[2]"),
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_ranks_that_disagree_are_told_at_once(pool: Pool, function: Callable[[], None]) -> None:
    outcome = run(pool, function)
    # Whoever comes second tells it.
    expected = ("|".join(map(re.escape, what.split(" or "))) for what in REFUSED[function])
    first, second = (rf"rank {{}} issue[ds] (?:{what}) at \S+:\d+ in \w+" for what in expected)
    number = 2 if function is skipped_call else 1
    start = rf"^ranks disagree: collective #{number} of the default group differs: "
    orders = [f"{first.format(0)}; {second.format(1)}", f"{second.format(1)}; {first.format(0)}"]
    assert any(re.search(start + order, outcome.cause) for order in orders), outcome.describe()
    assert Fate.HUNG not in {r.fate for r in outcome.ranks}, outcome.describe()
    assert any(r.error is not None and r.error.type_name == "CollectiveMismatch" for r in outcome.ranks)


def crossed_groups() -> None:
    groups = [dist.new_group(), dist.new_group()]
    for group in groups if me() else reversed(groups):
        dist.all_reduce(torch.ones(4), group=group)


def crossed_with_the_default_group() -> None:
    other = dist.new_group()
    for group in (other, None) if me() else (None, other):
        dist.barrier(group)


def cycle_of_three() -> None:
    pairs = ((0, 1), (1, 2), (0, 2))
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    order = {0: ((0, 1), (0, 2)), 1: ((1, 2), (0, 1)), 2: ((0, 2), (1, 2))}[rank()]
    for pair in order:
        dist.all_reduce(torch.ones(4), group=groups[pair])


@pytest.mark.parametrize(
    ("function", "size"), [(crossed_groups, 2), (crossed_with_the_default_group, 2), (cycle_of_three, 3)]
)
def test_groups_used_in_opposite_order_are_told(pool: Pool, function: Callable[[], None], size: int) -> None:
    outcome = run(pool, function, size=size)
    assert outcome.cause.startswith("ranks disagree: groups are used in opposite order: rank "), outcome.describe()
    assert outcome.cause.count(" waits in ") == size - 1
    assert Fate.HUNG not in {r.fate for r in outcome.ranks}, outcome.describe()


def other_members() -> None:
    dist.new_group([0, 1] if me() else [0])


def other_members_of_three() -> None:
    dist.new_group([0, 1] if me() else [0, 2])


def members_of_halves() -> None:
    dist.new_group([0, 1] if rank() < 2 else [2, 3])  # gloo connects them to each other: both have one name


@pytest.mark.parametrize(
    ("function", "size", "lists"),
    [
        (other_members, 2, ("of one rank", "[0, 1]")),
        (other_members_of_three, 3, ("[0, 2]", "[0, 1]")),
        (members_of_halves, 4, ("[0, 1]", "[2, 3]")),
    ],
)
def test_groups_of_other_members_are_told_at_once(
    pool: Pool, function: Callable[[], None], size: int, lists: tuple[str, str]
) -> None:
    outcome = run(pool, function, size=size)
    for members in lists:
        assert re.search(
            rf"rank \d issue[ds] new_group {re.escape(members)} at \S+:\d+ in {function.__name__}", outcome.cause
        )
    assert "ranks disagree: collective #1 of the making of groups differs: " in outcome.cause
    assert Fate.HUNG not in {r.fate for r in outcome.ranks}, outcome.describe()


def groups_of_one_rank() -> None:
    alone = dist.new_group([me()])  # as the experts of torch's own suite are
    dist.all_reduce(torch.ones(1), group=alone)
    dist.new_group([0])


def test_each_rank_may_make_its_own_group_of_one(pool: Pool) -> None:
    outcome = run(pool, groups_of_one_rank)
    assert not outcome.diagnosis and not outcome.cause


def group_on_one_rank() -> None:
    if not me():
        dist.new_group([0, 1])


def test_a_rank_that_makes_no_group_is_told(pool: Pool) -> None:
    outcome = run(pool, group_on_one_rank)
    assert re.match(r"rank 0 waits in new_group #1 \[0, 1\] on making of groups at .*; rank 1 returned", outcome.cause)


def group_that_torch_refuses_on_one_rank() -> None:
    if not me():
        with contextlib.suppress(TypeError):
            dist.new_group([0, 1], timeout="none")
    dist.new_group([0, 1])


def test_a_group_that_torch_refuses_was_not_made(pool: Pool) -> None:
    assert not run(pool, group_that_torch_refuses_on_one_rank).diagnosis


def swallowed() -> None:
    for operation in (other_size, dist.barrier):
        with contextlib.suppress(RuntimeError if operation is dist.barrier else Exception):
            operation()


def test_what_follows_a_swallowed_mismatch_is_refused_with_it(pool: Pool) -> None:
    outcome = run(pool, swallowed)
    start = r"ranks disagree: collective #1 of the default group differs: .*float32\[[48]\].*float32\[[48]\]"
    assert re.match(start + r".* This rank caught that error and went on to barrier\.$", outcome.cause), (
        outcome.describe()
    )
    assert {r.fate for r in outcome.ranks} == {Fate.RAISED, Fate.STOPPED}, outcome.describe()


def caught() -> str:
    try:
        other_reduce_op()
    except Exception as error:
        return type(error).__name__
    return "issued"


def test_a_mismatch_that_the_test_swallows_still_fails(pool: Pool) -> None:
    outcome = run(pool, caught)
    assert not outcome.ok
    assert "differ" in outcome.cause
