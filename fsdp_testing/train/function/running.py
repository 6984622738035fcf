"""How is a loop run on a world, what does each rank report of it, and what does the world hold together?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from fsdp_testing.errors import InvalidArgument, WorldFailed
from fsdp_testing.oracle.fresh_memory import filled_with_garbage
from fsdp_testing.ranks.ledger.late_delivery import deliver_late
from fsdp_testing.ranks.pool import Fate, Pool, WorldOutcome
from fsdp_testing.ranks.pool.targets import Target, resolve
from fsdp_testing.ranks.pool.world import current_world
from fsdp_testing.train.function.comparison import Quantities
from fsdp_testing.train.function.disturbance import disturbed
from fsdp_testing.train.function.evidence import StepEvidence, Witness
from fsdp_testing.train.function.held import Spans
from fsdp_testing.train.function.launch import as_torchrun_starts
from fsdp_testing.train.function.observation import Observer, StepSeen
from fsdp_testing.train.function.terms import Terms
from fsdp_testing.train.function.whole import (
    PARAMETER,
    Disagreement,
    at_end,
    at_start,
    own_parts,
    together,
    with_agreement,
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the loop.

    Attributes:
        size: Number of ranks.
        ranks: What each returned, each quantity as a list of steps.
        evidence: What each saw.
        observed: Losses, gradients, parameters and the like of all ranks; without gradients on which these do not agree.
        steps: What each rank was seen to do.
        start: Parameters before the first step.
        disagreements: Where ranks that share something first hold different numbers of it.
        own: Parameters that each rank has of its own.
    """

    size: int
    ranks: tuple[Quantities, ...]
    evidence: tuple[tuple[StepEvidence, ...], ...]
    observed: Quantities
    steps: tuple[tuple[StepSeen, ...], ...]
    start: Quantities
    disagreements: tuple[Disagreement, ...]
    own: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"a world of {self.size}"

    @property
    def terms(self) -> tuple[tuple[Terms, ...], ...]:
        """What each backward pass of each rank added to gradients, step by step."""
        return tuple(tuple(one.terms for one in rank) for rank in self.steps)

    @property
    def counts(self) -> list[int]:
        """Optimizer steps of each rank."""
        return [len(rank) for rank in self.steps]

    @property
    def parameters(self) -> list[str]:
        return [name for name in self.observed if name.startswith(PARAMETER)]


def train_here(target: Target, seed: int) -> tuple[Quantities, tuple[StepEvidence, ...], tuple[StepSeen, ...], Spans]:
    """Run the loop in this rank; return what it gave, each quantity as a list of steps, what was seen, and the parameters then.

    Roundings are left as they are with seed 0, and made differently on every rank with another one.
    """
    import torch

    witness, observer, world = Witness(), Observer(), current_world()
    # Luck is to help nobody: neither a quick network nor memory full of zeros.
    roundings = disturbed(seed * world.size + world.rank) if seed else nullcontext()
    with as_torchrun_starts(world), witness.watch(), observer.watch(), deliver_late(), filled_with_garbage(), roundings:
        returned = resolve(target)(world)
    if not isinstance(returned, Mapping):
        raise InvalidArgument(f"{target}: expected a mapping of names to tensors, got {type(returned).__name__}.")
    result: Quantities = {}
    for name, value in returned.items():
        steps = list(value) if isinstance(value, (list, tuple)) else [value]
        wrong = [type(step).__name__ for step in steps if not isinstance(step, (torch.Tensor, int, float))]
        if not isinstance(name, str) or wrong:
            raise InvalidArgument(
                f"{target}: expected names with a tensor or a list of tensors, got {name!r}: "
                f"{wrong or type(value).__name__}. Return what the loop computes, detached."
            )
        result[name] = [torch.as_tensor(step).detach().cpu().clone() for step in steps]
    observer.finish()
    evidence = _with_kept_gradients(observer.of_steps(witness.steps), observer.steps)
    return result, evidence, tuple(observer.steps), observer.parameters()


def _with_kept_gradients(evidence: Sequence[StepEvidence], steps: Sequence[StepSeen]) -> tuple[StepEvidence, ...]:
    """Note as local the backward passes of a sharded model that left nothing to step by: it keeps what it does not reduce."""
    if len(evidence) != len(steps):
        return tuple(evidence)
    return tuple(
        replace(one, local=one.backwards) if one.gathered and seen.losses and not seen.given else one
        for one, seen in zip(evidence, steps)
    )


@dataclass(frozen=True, slots=True)
class Runner:
    """How the loop is run on a world; disturbed runs are kept by size and seed."""

    pool: Pool
    target: Target
    backend: str
    timeout: float
    kept: dict[tuple[int, int], Run] = field(default_factory=dict)
    unsteady: list[str] = field(default_factory=list)

    def disturbed(self, run: Run, seed: int) -> Run:
        """Return a run as another one with roundings made differently, by each seed otherwise."""
        if (run.size, seed) not in self.kept:
            self.kept[run.size, seed] = self.run(run.size, seed, own=run.own)
        return self.kept[run.size, seed]

    def run(
        self,
        size: int,
        seed: int = 0,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        own: Sequence[str] | None = None,
    ) -> Run:
        """Run the loop on `size` ranks; with another seed than 0, disturbed.

        Args:
            size: Number of ranks.
            seed: Of the disturbance.
            shapes: Of the parameters of the reference world.
            own: Parameters that each rank has of its own; by default those that are seen to be.

        Raises:
            WorldFailed: A rank raised or died, or hung twice.
            InvalidArgument: The loop returns something else than named tensors.
        """
        outcome = self._execute(size, seed)
        if any(rank.fate is Fate.HUNG for rank in outcome.ranks):
            again = self._execute(size, seed)  # the machine may have been slow
            if again.ok:
                self.unsteady.append(
                    f"{outcome.cause}; run again, it came to its end. Nothing is known of a loop that hangs once."
                )
            outcome = again
        if not outcome.ok:
            error = outcome.ranks[0].error
            if error is not None and error.type_name == "InvalidArgument":
                raise InvalidArgument(error.message)
            raise WorldFailed(outcome.describe(), outcome)
        returned, evidence, steps, ends = (tuple(column) for column in zip(*outcome.values))
        own = tuple(own_parts(steps, shapes or {})) if own is None else tuple(own)
        observed, disagreements = together(steps, own)
        ended, apart = at_end(ends, own)
        if not seed:  # what ranks round differently they do not share to the bit
            observed = {n: v for n, v in observed.items() if not any(n.startswith(d.kind) for d in disagreements)}
        observed |= ended
        evidence = with_agreement(evidence, steps, disagreements)
        found = tuple(sorted((*disagreements, *apart), key=lambda one: one.step % (len(steps[0]) + 1)))
        return Run(size, returned, evidence, observed, steps, at_start(steps), found, own)

    def _execute(self, size: int, seed: int) -> WorldOutcome:
        self.pool.expect(__name__)  # ranks that import it one by one take seconds of the timeout
        world = self.pool.world(size, self.backend)
        try:
            return world.execute(
                train_here, (self.target, seed), timeout=self.timeout, name=f"check_training({self.target})"
            )
        finally:
            world.release()
