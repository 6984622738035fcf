"""`check_loss`: compares the loss of one step, and its gradient, over ways to share its items among ranks and micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.ranks.pool.targets import Target, resolve, target_of
from fsdp_testing.ranks.pool.world import current_world
from fsdp_testing.ranks.run import run_ranks
from fsdp_testing.train.batches import tensors_in
from fsdp_testing.train.comparison import CLEAR_ROUNDINGS, Decided, Difference, difference_of, first_difference
from fsdp_testing.train.conventions import rows_of
from fsdp_testing.train.disturbance import disturbed
from fsdp_testing.train.quantities import Kind, Quantities, Quantity, rank_count
from fsdp_testing.train.report import TrainingDiffers, TrainingUndecided

__tracebackhide__ = True  # pytest shows the caller's frames and the ranks' errors, not these frames

Loss = Callable[[nn.Module, Sequence[Any]], Any]
Arrangement = tuple[int, int]
"""Number of ranks, and of micro-batches of each."""


def check_loss(
    loss: Loss,
    model: nn.Module,
    batch: Any,
    *,
    world_sizes: Sequence[int] = (1, 2, 4),
    micro_batches: Sequence[int] = (1, 2, 4),
    reduce: str = "mean",
) -> None:
    """Compare the loss of the same items over several numbers of ranks and of micro-batches, and its gradient.

    `loss(model, micro_batches)` receives one rank's micro-batches of one step. It returns the tensor on which that rank calls
    backward, over all of them, or a mapping of names to its terms, which are then compared one by one. On ranks it may use
    torch.distributed, for example to add up token counts; with `world_sizes=(1,)` no process group exists and no rank starts.
    This function combines gradients and losses of the ranks, so no wrapper is needed.

    Args:
        loss: An importable function.
        model: Its parameters get the gradient. It must be picklable if there are ranks.
        batch: Tensors with items along their first dimension, nested in mappings, tuples and lists; or a list of items. Their
            number must be divisible by each number of ranks times each number of micro-batches.
        world_sizes: Numbers of ranks.
        micro_batches: Numbers of micro-batches per rank.
        reduce: How ranks combine their gradients: "mean", as DDP and FSDP do, or "sum".

    Raises:
        TrainingDiffers: The loss or a gradient differs; the cause is named if a variant of the loss gives these numbers.
        TrainingUndecided: Nothing was compared: no gradient, random numbers, or a difference that rounding alone explains.
        WorldFailed: It raised on a rank, or hung.
        InvalidArgument: The items cannot be shared, or the function cannot be called.
    """
    if reduce not in ("mean", "sum"):
        raise InvalidArgument(f'check_loss: expected reduce "mean" or "sum", got {reduce!r}. Choose one.')
    step = _Step(target_of(loss), loss, model, batch, reduce, ranked=tuple(world_sizes) != (1,))
    count = _count(batch)
    arrangements = [(size, k) for size in world_sizes for k in micro_batches]
    odd = [f"{size} x {k}" for size, k in arrangements if size < 1 or k < 1 or count % (size * k) or not count]
    if odd or not {*arrangements} - {(1, 1)}:
        raise InvalidArgument(
            f"check_loss: expected items that every number of ranks times micro-batches divides, and more than one of them, got "
            f"{count} items and {', '.join(odd) or arrangements}. Give another batch, or other world_sizes and micro_batches."
        )
    reference = step.computed((1, 1))
    step.check(reference)
    wrong = []
    for arrangement in arrangements:
        other = step.computed(arrangement)
        difference = step.difference(reference, other, arrangement)
        if difference is not None:
            wrong.append(f"{_named(arrangement)}: {difference}. {step.cause(reference, other, arrangement)}".rstrip())
    if wrong:
        raise TrainingDiffers("\n".join([f"{step.target}: differs from one process with all items at once", *wrong]))


@dataclass(frozen=True, slots=True)
class _Step:
    """The loss of one step, as `check_loss` is given it; `ranked` says that it is computed on ranks, be it one."""

    target: Target
    loss: Loss
    model: nn.Module
    batch: Any
    reduce: str
    ranked: bool

    def computed(self, arrangement: Arrangement, seed: int = 0, batch: Any = None) -> Quantities:
        """Return each term and its gradients, of all ranks together; a seed other than 0 changes the roundings."""
        (size, k), batch = arrangement, self.batch if batch is None else batch
        if self.ranked:
            ranks = run_ranks(_on_rank, self.target, self.model, batch, k, seed, size=size)
        else:
            ranks = [_terms(self.target, self.loss, self.model, _shared(batch, k), seed)]
        divisor = 1 if self.reduce == "sum" else size
        return {key: [torch.stack([rank[key] for rank in ranks]).sum(0) / divisor] for key in ranks[0]}

    def check(self, reference: Quantities) -> None:
        """Refuse a loss that cannot be compared.

        Raises:
            TrainingUndecided: It does not repeat itself, or has no gradient.
        """
        difference = first_difference(reference, self.computed((1, 1)), 0.0)
        if difference is not None:
            raise TrainingUndecided(
                f"{self.target}: does not repeat itself: two runs differ, first in {difference}. Seed what it draws."
            )
        if not all(bool(values[0].isfinite().all()) for values in reference.values()):
            raise TrainingUndecided(f"{self.target}: is not finite, so nothing can be compared. Give it other items.")
        if not any(bool(values[0].any()) for key, values in reference.items() if key.kind is Kind.GRADIENT):
            raise TrainingUndecided(
                f"{self.target}: its gradient is zero, and zeros are equal whatever they came from. Return the loss with its "
                "graph."
            )

    def difference(self, reference: Quantities, other: Quantities, arrangement: Arrangement) -> Difference | None:
        """Return the difference beyond roundings, by the bounds of `check_training`.

        Raises:
            TrainingUndecided: Roundings alone decide.
        """
        decided = Decided()

        def again(seed: int) -> Iterator[tuple[Quantities, Quantities]]:
            yield reference, self.computed((1, 1), seed)
            yield other, self.computed(arrangement, seed)

        difference = difference_of(reference, other, again, decided, {})
        if difference is None and not decided.enough:
            keys = ", ".join(map(str, decided.unknown[:3]))
            raise TrainingUndecided(f"{self.target}: roundings alone decide most of {keys}. Give it float64.")
        return difference

    def cause(self, reference: Quantities, other: Quantities, arrangement: Arrangement) -> str:
        """Return the mistake in the loss, if the same mistake made on purpose gives the same numbers."""
        size, k = arrangement
        odd = [key for key in reference if first_difference(_of(reference, key), _of(other, key), CLEAR_ROUNDINGS)]

        def gives(makes: Callable[[Quantity], torch.Tensor]) -> bool:
            made = {key: [makes(key)] for key in odd}
            return first_difference(made, {key: other[key] for key in odd}, CLEAR_ROUNDINGS) is None

        for factor, words in (
            (k, f"is {k} times as large: micro-batches are added and not divided by their number"),
            (1 / k, f"is 1/{k} of it: it is divided by the number of micro-batches once too often"),
            (
                size,
                f"is {size} times as large: each of {size} ranks adds a term that all ranks together should add once",
            ),
            (1 / size, f"is 1/{size} of it: it is divided by the number of ranks once too often"),
        ):
            if factor != 1 and gives(lambda key, factor=factor: reference[key][0] * factor):  # type: ignore[misc]  # mypy knows no default of a lambda
                return f"Cause: it {words}."
        for count, of in ((k * size, "each micro-batch"), (size, "each rank")):
            own = [self.computed((1, 1), batch=part) for part in _shared(self.batch, count)] if count > 1 else []
            if own and gives(lambda key, own=own: torch.stack([one[key][0] for one in own]).mean(0)):  # type: ignore[misc]  # likewise
                return (
                    f"Cause: a mean of means: {of} is divided by its own count (of tokens, of weights). Divide by the count of "
                    "all items of the step, summed over micro-batches and ranks."
                )
        return ""


def _of(quantities: Quantities, key: Quantity) -> Quantities:
    return {key: quantities[key]}


def _named(arrangement: Arrangement) -> str:
    return f"{rank_count([arrangement[0]])} of {arrangement[1]} micro-batch{'es' * (arrangement[1] > 1)}"


def _count(batch: Any) -> int:
    """Return the number of items in a batch."""
    if isinstance(batch, list) and not all(isinstance(part, torch.Tensor) for part in batch):
        return len(batch)
    lengths = {len(tensor) for tensor in tensors_in(batch) if tensor.ndim}
    if len(lengths) != 1:
        raise InvalidArgument(
            f"check_loss: expected tensors with one number of items, got {sorted(lengths) or 'none'}. Give each tensor its items "
            "along the first dimension."
        )
    return lengths.pop()


def _shared(batch: Any, parts: int) -> list[Any]:
    """Return a batch in this many equal parts."""
    count = _count(batch)
    length = count // parts
    groups = [range(start, start + length) for start in range(0, count, length)]
    if isinstance(batch, list) and not all(isinstance(part, torch.Tensor) for part in batch):
        return [[batch[place] for place in group] for group in groups]
    return [rows_of(batch, group, count) for group in groups]


def _on_rank(target: Target, model: nn.Module, batch: Any, k: int, seed: int) -> dict[Quantity, torch.Tensor]:
    """Compute the terms of one rank and their gradients. Collectives: those of the loss."""
    world = current_world()
    mine = _shared(batch, world.size)[world.rank]
    return _terms(target, resolve(target), model, _shared(mine, k), seed and seed * world.size + world.rank)


def _terms(target: Target, loss: Loss, model: nn.Module, parts: list[Any], seed: int) -> dict[Quantity, torch.Tensor]:
    """Return each term of a loss, and its gradient by parameter."""
    model = copy.deepcopy(model)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    named = dict(model.named_parameters())
    parameters = [parameter for parameter in named.values() if parameter.requires_grad]
    with disturbed(seed) if seed else nullcontext():
        value = loss(model, parts)
        terms = dict(value) if isinstance(value, Mapping) else {"": value}
        result: dict[Quantity, torch.Tensor] = {}
        for name, term in terms.items():
            if not isinstance(term, torch.Tensor) or term.numel() != 1:
                raise InvalidArgument(f"{target}: expected a tensor of one number for each term, got {term!r}.")
            gradients: Any = [None] * len(parameters)
            if term.requires_grad:
                gradients = torch.autograd.grad(term.sum(), parameters, retain_graph=True, allow_unused=True)
            result[Quantity(Kind.RETURNED, f"the term {name}" if name else "the loss")] = term.detach().reshape(())
            for (key, parameter), gradient in zip([(n, p) for n, p in named.items() if p.requires_grad], gradients):
                owner = f"{key} by the term {name}" if name else key
                kept = torch.zeros_like(parameter) if gradient is None else gradient
                result[Quantity(Kind.GRADIENT, owner)] = kept.detach()
    if not torch.equal(before, torch.get_rng_state()):
        raise TrainingUndecided(
            f"{target}: draws random numbers, which differ between parts. Switch dropout off (model.eval())."
        )
    return result
