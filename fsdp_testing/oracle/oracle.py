"""Says what an implementation's run of a case must give, and how far off it may be.

Runs in a rank process of a world of one, never in the controller: the rank's threads and torch state are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch

from fsdp_testing.adapters.protocol import Division
from fsdp_testing.cases.records import UNIT_ROUNDOFF, Case
from fsdp_testing.cases.records.specs import LOW_DTYPES
from fsdp_testing.oracle import tensor_axis
from fsdp_testing.oracle.assemble import GatheredState
from fsdp_testing.oracle.disturbance import NO_DISTURBANCE, Disturbance
from fsdp_testing.oracle.models import build_model, dtype_name
from fsdp_testing.oracle.quantities import Expectation, Expected, ExpectedPoint, Quantity
from fsdp_testing.oracle.replay import Replay, ReplayPoint, Slack
from fsdp_testing.oracle.stepping import DIRECTIONS
from fsdp_testing.oracle.tensors import largest as largest_of

BITWISE: Slack = (0.0, "bitwise: the same operations in the same order")
DRAWS = 4
"""Disturbed replays of a program: in a single one, effects of rounding may happen to cancel where they matter."""


def expect_free(
    case: Case,
    *,
    observe_all: bool = False,
    make: Callable[[Disturbance], Replay] | None = None,
    draws: int = DRAWS,
) -> Expectation:
    """Replay `case` undisturbed and disturbed several times, and bound every quantity by their differences.

    Args:
        case: The case.
        observe_all: Expect a snapshot after every operation.
        make: Makes the replays, if they do not begin with the freshly built model.
        draws: Number of disturbed replays. With none, every bound is at most as wide: agreement is final, a difference
            needs another comparison.
    """
    roundings = roundings_of(case)
    make = make or (lambda disturbance: Replay(case, disturbance=disturbance))
    replay = make(NO_DISTURBANCE)
    plain = replay.run(observe_all=observe_all)
    # One for each replay: it remembers which directions it drew and where it put parameters.
    disturbances = (Disturbance(case.seed + draw, roundings, displaced=True) for draw in range(draws))
    disturbed = [make(disturbance).run(observe_all=observe_all) for disturbance in disturbances]
    numel = sum(parameter.numel() for parameter in replay.parameters.values())
    points = tuple(_free_point(point, moved, roundings, numel) for point, *moved in zip(plain, *disturbed))
    return Expectation(points, replay.shapes, {"roundings": roundings, "mode": "free"})


def expect_lockstep(
    case: Case,
    division: Division | None,
    adopted: Mapping[int, GatheredState],
    *,
    displaced: bool = True,
    sums: torch.dtype | None = None,
) -> Expectation:
    """Replay `case` from the implementation's own state before each operation.

    Args:
        case: The case.
        division: How the implementation divides, if it tells.
        adopted: Its state after every operation that it ran, by index.
        displaced: Allow for another place in memory, which takes a second replay. Without it every bound is at most as
            wide: agreement is final, a difference needs another comparison.
        sums: Dtype in which local micro-batches add up, if it is not the reduction's.
    """
    replay = Replay(case, division, adopted=adopted, sums=sums)
    plain = replay.run(observe_all=True)
    # Without other replays there is no difference, and bounds are the narrowest.
    elsewhere = [Disturbance(case.seed, 0, displaced=True)] if displaced else []
    if displaced and case.world.tensor_parallel > 1 and not computes_in_16_bits(case):
        elsewhere += [Disturbance(case.seed + draw, 0, displaced=True, products=True) for draw in range(DRAWS)]
    moved = [Replay(case, division, each, adopted, sums).run(observe_all=True) for each in elsewhere]
    points = tuple(_lockstep_point(point, others, case) for point, *others in zip(plain, *moved))
    return Expectation(points, replay.shapes, {"mode": "lockstep"})


def computes_in_16_bits(case: Case) -> bool:
    """Return whether products have 16 bits: the last of them say nothing of how their summands were added up, in float32."""
    return tensor_axis.compute_dtype(case) in LOW_DTYPES


def roundings_of(case: Case) -> int:
    """Return how many roundings of one gradient element may differ in another correct implementation.

    The sums over ranks and over micro-batches in any order, and the inner products of each layer in any order (a matrix
    product may be blocked otherwise for a tensor that lies elsewhere in memory).
    """
    batches = [batch for operation in case.program for batch in operation.batches()]
    rows = max((max(batch.rows) for batch in batches), default=1)
    module = build_model(case)
    widest = max((max(parameter.shape, default=1) for parameter in module.parameters()), default=1)
    depth = sum(1 for inner in module.modules() if next(inner.parameters(recurse=False), None) is not None)
    return case.world.size + len(batches) + max(depth, 1) * (rows + widest + 8)


def _free_point(plain: ReplayPoint, disturbed: Sequence[ReplayPoint], roundings: int, numel: int) -> ExpectedPoint:
    largest = max(
        (largest_of(value) for quantity, value in plain.values.items() if quantity.kind == "gradient"), default=0.0
    )
    quantities: dict[Quantity, Expected] = {}
    for quantity, value in plain.values.items():
        # A gradient may be the small difference of large numbers; the largest gradient stands for their size.
        scale = max(largest_of(value), largest if quantity.kind == "gradient" else 0.0)
        # A norm adds up every element of the model, in any order.
        count = roundings + (numel if quantity.name == "total_norm" else 0)
        quantities[quantity] = _free_bound(value, [moved.values.get(quantity) for moved in disturbed], count, scale)
    return point_of(plain, quantities)


def _free_bound(
    value: torch.Tensor | None, disturbed: Sequence[torch.Tensor | None], roundings: int, scale: float
) -> Expected:
    if value is None or not value.numel():
        return Expected(value)
    if not value.is_floating_point():
        return Expected(value, 0.0, "integers are exact")
    name = dtype_name(value.dtype)
    # Differences from the undisturbed replay, not from one another: ranks are compared with that replay.
    deviation = max((float((value - moved).abs().max()) for moved in disturbed if moved is not None), default=0.0)
    own = roundings * UNIT_ROUNDOFF[name] * scale
    bound = DIRECTIONS * deviation + own
    return Expected(
        value,
        bound,
        f"{DIRECTIONS} x {deviation:.2e} (apart under the largest roundings) + {roundings} x u({name}) x {scale:.2e}",
    )


def _lockstep_point(point: ReplayPoint, displaced: Sequence[ReplayPoint], case: Case) -> ExpectedPoint:
    quantities: dict[Quantity, Expected] = {}
    cuts = _roundings_of_cuts(point, case) if case.world.tensor_parallel > 1 else {}
    for quantity, value in point.values.items():
        bound, why = reduce(_wider, (each.slack.get(quantity, BITWISE) for each in (point, *displaced)))
        apart = max((_apart(value, other.values.get(quantity)) for other in displaced), default=0.0)
        if apart:
            # On this machine the last bits of a product depend on where its operands lie, or those of a sum on the units. Over
            # tensor parallelism products of parts have other last bits than those of whole matrices.
            why = f"{why}; {DIRECTIONS} x {apart:.2e} for the place in memory, the units' borders and parts of products"
            bound = bound + DIRECTIONS * apart
        cut = cuts.get(quantity, 0.0)
        if cut:
            bound, why = bound + cut, f"{why}; {cut:.2e} for sums that tensor parallelism cuts"
        quantities[quantity] = Expected(value, bound, why)
    return point_of(point, quantities)


def _roundings_of_cuts(point: ReplayPoint, case: Case) -> dict[Quantity, float]:
    gradients = [value for quantity, value in point.values.items() if quantity.kind == "gradient"]
    largest = max(map(largest_of, gradients), default=0.0)
    sizes = {quantity: largest_of(value) for quantity, value in point.values.items()}
    sizes |= {q: largest for q, value in point.values.items() if q.kind == "gradient" and value is not None}
    return {q: tensor_axis.roundings_of_cut_sums(case, point.index, q, size) for q, size in sizes.items()}


def _wider(slack: Slack, rival: Slack) -> Slack:
    """Return the wider one: the displaced replay knows what each call of a unit contributed, so how large summands may be."""
    if slack is rival:
        return slack
    bounds = torch.as_tensor(slack[0]), torch.as_tensor(rival[0])
    if bool((bounds[1] <= bounds[0]).all()):
        return slack
    return torch.maximum(*torch.broadcast_tensors(*bounds)), rival[1]


def _apart(value: torch.Tensor | None, displaced: torch.Tensor | None) -> float:
    if (
        value is displaced
        or value is None
        or displaced is None
        or not value.is_floating_point()
        or torch.equal(value, displaced)
    ):
        return 0.0
    return float((value - displaced).abs().nan_to_num(0.0).max())


def point_of(point: ReplayPoint, quantities: dict[Quantity, Expected]) -> ExpectedPoint:
    """Return what is expected at a point of a replay, with `quantities` and their bounds."""
    return ExpectedPoint(point.index, quantities, point.requires_grad, point.dtypes, point.snapshot, point.pending)
