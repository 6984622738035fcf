"""Collects events between two optimizer steps that may explain a difference: reductions, seeds, random numbers, dtypes.

It explains a difference and never decides whether there is one. Each function that looks for a cause returns a sentence, or
nothing if it did not see the cause; `causes` sets the order of the calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_testing.base import compat
from fsdp_testing.cases.records.specs import UNIT_ROUNDOFF
from fsdp_testing.oracle.models import roundoff
from fsdp_testing.ranks.ledger.recorder import Call, GroupIdentity
from fsdp_testing.train.batches import local_part, tensors_in
from fsdp_testing.train.comparison import Difference
from fsdp_testing.train.quantities import Kind

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DIGESTED = 65536
"""Elements of a tensor that are digested: weights that differ do so everywhere, and hashing all of them takes time."""
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """What happened until one optimizer step.

    Attributes:
        reduced: For each backward pass whether as many elements were reduced, from its beginning to the next one's (or
            to the step), as there are gradients.
        local: Forwards of a model that must not synchronise.
        seed: `torch.initial_seed()` at the first forward.
        drew: Whether the default generator moved between the first forward and the step.
        dropout: Digest of its state at the first active dropout layer; empty without one.
        weights: Digest of the weights before the step.
        gradient_norm: Norm of the gradients that the optimizer is given on this rank.
        gathered: Whether parameters were gathered: then weights and gradients here are shards.
        roundoff: Unit roundoff of the narrowest dtype that gradients, parameters or inputs have, or autocast computes in.
        computed: Unit roundoff of the narrowest dtype that forward and backward compute in; 0 for a run that is not disturbed.
        agreed: Whether all ranks are given the same gradients of what they share, so that none of them lacks a reduction.
        factors: The constants that the loss of each backward pass was multiplied with last; only where the data is kept.
    """

    reduced: tuple[bool, ...] = ()
    local: int = 0
    seed: int = 0
    drew: bool = False
    dropout: str = ""
    weights: str = ""
    gradient_norm: float = 0.0
    gathered: bool = False
    roundoff: float = 0.0
    computed: float = 0.0
    agreed: bool = False
    factors: tuple[tuple[float, ...], ...] = ()

    @property
    def backwards(self) -> int:
        return len(self.reduced)

    def divided_by(self, count: int) -> bool:
        """Whether each loss is divided by a number, as by that of the micro-batches."""
        return bool(self.factors) and all(any(abs(one * count - 1) < CLOSE for one in each) for each in self.factors)


class Clues:
    """Collects the evidence of one step on one rank."""

    def __init__(self) -> None:
        self._seed = torch.initial_seed()
        self._generator = self._dropout = ""
        self._local = 0
        self._roundoff = self._computed = 0.0
        self._reduced: list[int] = []
        self._factors: list[tuple[float, ...]] = []
        self._gathered = False

    def see_collective(self, _group: GroupIdentity, call: Call, _site: str) -> None:
        """Note a collective; a listener of the ledger."""
        name, _, dtype, sizes = (*call.what, None, None)[:4]
        if self._reduced and str(name).startswith(_REDUCING):
            self._reduced[-1] += sum(sizes) if isinstance(sizes, tuple) else int(sizes or 0)
        # Floating numbers: DDP gathers shapes when it is made.
        self._gathered |= "gather" in str(name) and "float" in str(dtype)

    def see_backward(self, factors: tuple[float, ...] = ()) -> None:
        """Note a backward pass, and the constants that its loss was multiplied with last."""
        self._reduced.append(0)
        self._factors.append(factors)

    def see_results(self, results: Sequence[torch.Tensor]) -> None:
        """Note the results of an operation of a forward or a backward."""
        units = (roundoff(tensor.dtype) for tensor in results if tensor.is_floating_point())
        self._computed = max(self._computed, *units, 0.0)

    def see_forward(self, module: nn.Module, args: Any) -> None:
        if compat.in_backward():
            return  # activations are recomputed
        if not self._generator:
            self._seed, self._generator = torch.initial_seed(), _generator_digest()
        if isinstance(module, _DROPOUTS) and module.training and module.p > 0 and not self._dropout:
            self._dropout = _generator_digest()
        if getattr(module, "require_backward_grad_sync", True) is False:
            self._local += 1
        # Casts by FSDP's mixed precision show in the inputs of inner modules.
        self._roundoff = max(self._roundoff, *(roundoff(tensor.dtype) for tensor in tensors_in(args)), 0.0)
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self._roundoff = max(self._roundoff, roundoff(torch.get_autocast_dtype(device)))

    def at_step(self, optimizer: torch.optim.Optimizer) -> StepEvidence:
        """Return the evidence, when an optimizer is about to step; without what cannot be read of it."""
        try:
            listed = [p for group in optimizer.param_groups for p in group["params"]]
            parameters = [local_part(p) for p in listed]
            gradients = [local_part(p.grad) for p in listed if p.grad is not None]
        except Exception:  # noqa: BLE001 - a tensor of an unknown kind must not end a training that is only watched
            return StepEvidence()
        due = max(sum(gradient.numel() for gradient in gradients), 1)
        return StepEvidence(
            reduced=tuple(count >= due for count in self._reduced),
            local=self._local,
            seed=self._seed,
            drew=bool(self._generator) and self._generator != _generator_digest(),
            dropout=self._dropout,
            weights=_digest(parameters),
            gradient_norm=float(sum(float(g.double().square().sum()) for g in gradients) ** 0.5),
            gathered=self._gathered,
            computed=self._computed,
            factors=tuple(self._factors),
            roundoff=max([self._roundoff, *(roundoff(tensor.dtype) for tensor in [*parameters, *gradients])]),
        )


def _digest(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.reshape(-1)[:_DIGESTED].cpu().double().numpy().tobytes())
    return digest.hexdigest()[:12]


@compat.no_transforms()
def _generator_digest() -> str:
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:12]


Steps = Sequence[StepEvidence]

CLOSE = 1e-6
"""Relative; gradients of other world sizes differ by roundings."""
ROUNDINGS = 8
"""Roundings of a narrow dtype in which a norm may differ: few, since those of many numbers cancel in it."""


def between_ranks(ranks: Sequence[Steps], name: str = "", reduced: str = "") -> str:
    """Return why the ranks of one world give different results; empty if the evidence does not show it.

    Args:
        ranks: What each rank saw, step by step.
        name: Name of the returned quantity that differs first; empty for weights, and for what is kept of them.
        reduced: Whether its "mean" over ranks is what the reference world gives, or its "sum"; empty for neither.
    """
    for step, seen in enumerate(zip(*ranks)):
        cause = _seeds(seen, step) or _not_reduced(seen, step) or _generators(seen, step)
        if cause:
            return cause
    return _metric(ranks, name, reduced) if name else ""


def between_sizes(reference: Sequence[Steps], other: Sequence[Steps], size: int, in_step: str = "") -> str:
    """Return why a world of `size` gives a different result from the reference world.

    Args:
        reference: What ranks of the reference world saw.
        other: What ranks of the world saw.
        size: Its size.
        in_step: The cause if gradients that are not reduced before the step are reduced inside it.
    """
    for step, (before, after) in enumerate(zip(zip(*reference), zip(*other))):
        own = _not_reduced(after, step)
        cause = (own and (in_step or own)) or _accumulation(before, after, step) or _scaled(before, after, step, size)
        if cause:
            return cause
        random = _random(after, step)
        if random:
            return random
    return ""


def of_dtypes(ranks: Sequence[Steps]) -> str:
    """Return the cause if ranks compute in different narrowest dtypes, as a disturbed run shows."""
    for step, seen in enumerate(zip(*ranks)):
        units = [one.computed for one in seen]
        if all(units) and len(set(units)) > 1:
            other = next(rank for rank, unit in enumerate(units) if unit != units[0])
            names = {unit: name for name, unit in UNIT_ROUNDOFF.items()}
            return (
                f"Cause: ranks compute in different dtypes. At step {step} the narrowest dtype in forward and backward is "
                f"{names[units[0]]} on rank 0 and {names[units[other]]} on rank {other}. Use the same autocast and casts on "
                "every rank."
            )
    return ""


def of_rate(difference: Difference, size: int, *, begins: bool = True, regrouped: bool = False) -> str:
    """Return the cause where the first difference of a world of `size` is a learning rate; empty where it is not.

    Args:
        difference: The first.
        size: Number of ranks.
        begins: Whether all rates were zero before.
        regrouped: Whether the optimizer has another number of groups.
    """
    if difference.quantity.kind is not Kind.RATE:
        return ""
    if regrouped:
        return (
            "Cause: the optimizer has another number of groups of parameters than in one process. Wrappers change names: in DDP "
            "each begins with `module.`. Make groups from the model's names before it is wrapped, or look for parts of names."
        )
    if not begins:
        return (
            f"Cause: a schedule depends on the number of ranks: until step {difference.step} the learning rate is that of one "
            "process. It counts ranks or a rank's own batches, or follows a loss that is each rank's own. Count steps of the "
            "optimizer, and reduce what a schedule follows. If it is intended, set its length by an argument for this check."
        )
    times = f"{difference.ratio:.6g} times that of one process" if difference.ratio is not None else "by no one factor"
    scaled = (
        f" is multiplied by the number of ranks ({difference.ratio:.6g} times)"
        if difference.ratio is not None and abs(difference.ratio - size) < CLOSE * size
        else f" depends on the number of ranks ({times})"
    )
    return (
        f"Cause: the learning rate{scaled}. One process with the rows of all ranks takes the mean of the same gradients. If "
        "it is intended, set rate and warm-up by arguments for this check, the same on every number of ranks: the rest is judged."
    )


def _seeds(seen: Steps, step: int) -> str:
    seeds = [one.seed for one in seen]
    if len(set(seeds)) == 1 or any(one.gathered for one in seen):
        return ""
    different_weights = len({one.weights for one in seen}) > 1
    if not different_weights and not any(one.drew for one in seen):
        return ""
    first = next(rank for rank, seed in enumerate(seeds) if seed != seeds[0])
    effect = "ranks start from different weights" if different_weights else "ranks draw different random numbers"
    return (
        f"Cause: the seed depends on the rank. At step {step} torch.initial_seed() is {seeds[0]} on rank 0 and "
        f"{seeds[first]} on rank {first}, and the {effect}. Use one seed on all ranks, or broadcast what is drawn."
    )


def _not_reduced(seen: Steps, step: int) -> str:
    """Return the cause if no rank reduced the last backward pass before the step."""
    if len(seen) < 2 or any(not one.backwards or one.reduced[-1] for one in seen):
        return ""
    one = seen[0]
    if all(rank.agreed and not rank.local for rank in seen):
        return ""  # tensor parallelism reduces what flows through the model, and gradients of shards need nothing more
    passes = f"{one.backwards} backward passes" if one.backwards > 1 else "backward pass"
    if any(one.reduced):
        last = max(index for index, done in enumerate(one.reduced) if done) + 1
        return (
            f"Cause: the no_sync boundary is off by one. At step {step}, of {passes} number {last} is reduced and the "
            f"last one, number {one.backwards}, is not: its gradient stays on its rank. Leave no_sync for the last one."
        )
    if one.local:
        ran = f"all {passes} run" if one.backwards > 1 else f"the {passes} runs"
        return (
            f"Cause: the no_sync boundary is off by one. At step {step} {ran} inside no_sync (FSDP2: after "
            "set_requires_gradient_sync(False)) and none is reduced before the optimizer steps. Synchronise in the last one."
        )
    return (
        f"Cause: gradients are not reduced. At step {step} no collective of the gradients' size runs between the "
        f"{passes} and the optimizer step. Wrap the model, or all-reduce its gradients."
    )


def _generators(seen: Steps, step: int) -> str:
    states = [one.dropout for one in seen]
    if len(set(states)) == 1 or not all(states):
        return ""
    first = next(rank for rank, state in enumerate(states) if state != states[0])
    return (
        f"Cause: dropout is out of step. At step {step} ranks 0 and {first} reach the first dropout layer with different "
        "states of the random generator, though they have the same seed: one of them has drawn more numbers before. "
        "Draw the same numbers on every rank, or give dropout its own generator."
    )


def _metric(ranks: Sequence[Steps], name: str, reduced: str) -> str:
    """Weights agree at every step: only what is returned differs."""
    steps = list(zip(*ranks))
    if not steps or any(len({one.weights for one in seen}) > 1 for seen in steps):
        return ""
    lead = (
        f"Cause: {name} is not synchronised. The weights are equal on all ranks at every step, so training is in "
        "step and only this quantity is each rank's own"
    )
    how = {"mean": ": all-reduce it with AVG", "sum": ": all-reduce it"}.get(reduced)
    if how:
        return f"{lead}; its {reduced} over ranks is what one rank alone gives{how} before it is recorded."
    return f"{lead}. Reduce it before it is recorded."


def _norm(seen: Steps) -> float:
    """Norm of the whole gradient: of all shards, or of any rank's copy."""
    if any(one.gathered for one in seen):
        return float(sum(one.gradient_norm**2 for one in seen) ** 0.5)
    return seen[0].gradient_norm


def _close(seen: Steps) -> float:
    return max(CLOSE, ROUNDINGS * seen[0].roundoff)


def _exactly(seen: Steps) -> str:
    return "exactly" if _close(seen) == CLOSE else "within roundings"


def _accumulation(before: Steps, after: Steps, step: int) -> str:
    """Return the cause if the gradient grows with the number of backward passes."""
    counts = before[0].backwards, after[0].backwards
    if counts[0] == counts[1] or not all(counts) or not _norm(before) or after[0].divided_by(counts[1]):
        return ""
    ratio, wanted = _norm(after) / _norm(before), counts[1] / counts[0]
    if abs(ratio - wanted) > _close(before) * wanted:
        return ""
    return (
        f"Cause: the loss is not divided by the number of accumulation steps. At step {step} the gradient is "
        f"{ratio:.6g} times that of the reference, {_exactly(before)} as {counts[1]} backward passes are to {counts[0]}. "
        "Divide the loss of each micro-batch by how many of them make a step."
    )


def _scaled(before: Steps, after: Steps, step: int, size: int) -> str:
    if not _norm(before):
        return ""
    ratio, close, exactly = _norm(after) / _norm(before), _close(before), _exactly(before)
    if size > 1 and abs(ratio - size) < close * size:
        return (
            f"Cause: gradients are summed over ranks, not averaged. At step {step} the gradient is {exactly} {size} "
            "times that of the reference. Divide by the number of ranks."
        )
    if size > 1 and abs(ratio - 1 / size) < close / size:
        return (
            f"Cause: gradients are divided by the number of ranks once too often. At step {step} the gradient is {exactly} "
            f"1/{size} of that of the reference."
        )
    return ""


def _random(seen: Steps, step: int) -> str:
    if any(one.dropout for one in seen):
        return (
            f"Cause: dropout is out of step between world sizes. It is active at step {step}, and every rank draws masks "
            "for its own rows, which differ from the masks that one rank draws for all. Switch it off for this "
            "check, or draw the masks of the global batch."
        )
    if any(one.drew for one in seen):
        return (
            f"Cause: random numbers are drawn during step {step}, which cannot be the same for another share of the "
            "data. Draw them for the global batch, or from a generator that is seeded by its place in the data."
        )
    return ""
