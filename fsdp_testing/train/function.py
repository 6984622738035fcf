"""Checks that a user's own training loop, a function of a world, gives the same result on every world size."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.ranks.pool import Pool, WorldOutcome, default_pool
from fsdp_testing.ranks.pool.targets import Target, resolve, target_of
from fsdp_testing.ranks.pool.world import World, current_world
from fsdp_testing.train import causes
from fsdp_testing.train.check import judged, run_alone
from fsdp_testing.train.comparison import ROUNDINGS
from fsdp_testing.train.conventions import check_names
from fsdp_testing.train.deciding import check_something
from fsdp_testing.train.observation import Observer
from fsdp_testing.train.on_rank import Job, RunSettings
from fsdp_testing.train.report import TrainingDiffers, TrainingPartlyUndecided, TrainingUndecided
from fsdp_testing.train.running import Failed, Runner, Start, Undecided

__tracebackhide__ = True  # pytest shows the caller's frames and the ranks' errors, not these frames

__all__ = ["TrainingDiffers", "TrainingPartlyUndecided", "TrainingUndecided", "check_training"]

Train = Callable[[World], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class FunctionJob(Job):
    """A training loop as a rank runs it."""

    target: Target

    def train(self, run: RunSettings, observer: Observer) -> dict[str, Any]:
        """Run the loop; return what it gave, each quantity as a list of steps.

        Raises:
            InvalidArgument: It gives something else than named tensors.
        """
        returned = resolve(self.target)(current_world())
        if not isinstance(returned, Mapping):
            raise InvalidArgument(
                f"{self.target}: expected a mapping of names to tensors, got {type(returned).__name__}."
            )
        result: dict[str, list[torch.Tensor]] = {}
        for name, value in returned.items():
            steps = list(value) if isinstance(value, (list, tuple)) else [value]
            wrong = [type(step).__name__ for step in steps if not isinstance(step, (torch.Tensor, int, float))]
            if not isinstance(name, str) or wrong:
                raise InvalidArgument(
                    f"{self.target}: expected names with a tensor or a list of tensors, got {name!r}: "
                    f"{wrong or type(value).__name__}. Return what the loop computes, detached."
                )
            result[name] = [torch.as_tensor(step).detach().cpu().clone() for step in steps]
        return {"returned": result}


@dataclass(frozen=True, slots=True)
class Function(Start):
    """How a function is started: see `Start`."""

    target: Target
    backend: str = "gloo"
    timeout: float = 60.0
    roundings: float = ROUNDINGS
    accept: tuple[str, ...] = ()
    returns: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"check_training({self.target})"

    def world(self, size: int) -> str:
        return f"a world of {size}"

    def sentence(self, size: int, why: Failed | Undecided) -> str:
        subject = getattr(why, "subject", "")
        joined = f"{subject} " if subject.endswith(" on") else f"{subject} of " if subject else ""
        return f"{joined}{self.world(size)} {why}"

    def job(self, size: int) -> FunctionJob:
        return FunctionJob(self.target)

    def ending(self, outcome: WorldOutcome) -> Exception:
        error = outcome.ranks[0].error
        if error is not None and error.type_name == "InvalidArgument":
            return InvalidArgument(error.message)
        return Start.ending(self, outcome)


def check_training(
    train: Train,
    *,
    world_sizes: Sequence[int] = (1, 2, 3),
    backend: str = "gloo",
    timeout: float = 60.0,
    roundings: float = ROUNDINGS,
    accept: Sequence[str] = (),
    pool: Pool | None = None,
) -> None:
    """Run `train` on worlds of several sizes and compare the results.

    `train(world)` must train on the same global data at every size, each rank on its share, and return named tensors: one for
    a final quantity, a list for a quantity of every step. All ranks and all worlds must return the same. Parameters and
    gradients are compared at each optimizer step, and parameters at the end, without being returned. The loop finds
    torchrun's variables set, and may make and destroy its default process group.

    Args:
        train: An importable function.
        world_sizes: Sizes to run; the first is the reference.
        backend: Backend of the worlds.
        timeout: Seconds until a rank counts as hung.
        roundings: Differences up to this pass at once, in units of roundoff of the dtype times the largest number of the
            quantity; at most 4 in dtypes narrower than float32. Larger ones are judged by how far roundings move the loop
            (`disturbance`).
        accept: Intended conventions, by the names that `fsdp-verify train --accept` takes: "measured-gradients", and
            conventions that a reference world of one process then follows too.
        pool: The pool that lends worlds; the process's own by default.

    Raises:
        TrainingDiffers: Worlds, or the ranks of one, differ. Names the first quantity and step that differ, and the cause if
            the ranks saw one, or else what the difference suggests. Also raised if the first world returns NaN.
        TrainingUndecided: Rounding alone moves most of a quantity as far as worlds differ, nothing was trained or compared,
            or the loop hung once and not again.
        WorldFailed: A rank raised or died, or the loop hung twice.
        InvalidArgument: `train` is not importable, returns something else, or a size is not usable.
    """
    if not world_sizes:
        raise InvalidArgument("check_training: expected at least one world size, got none. Give world_sizes=(1, 2).")
    check_names(accept)
    start = Function(target_of(train), backend, timeout, roundings, tuple(accept))
    runner, first = Runner(start, pool or default_pool()), world_sizes[0]
    unknown = []
    try:
        reference, _ = run_alone(runner, first)
    except Failed as why:
        raise TrainingDiffers(f"{start.target}: {start.sentence(first, why)}") from why
    except Undecided as why:
        raise TrainingUndecided(f"{start.target}: {start.sentence(first, why)}") from why
    unknown += runner.unsteady
    wrong = causes.wrong_in_itself(reference, start.accept) if len(world_sizes) == 1 else ""
    if wrong:
        raise TrainingDiffers(f"{start.target}: {start.world(first)} is wrong with any number of ranks: {wrong}")
    try:
        check_something(reference)
    except Undecided as why:
        unknown.append(start.sentence(first, why))
    for size in world_sizes[1:]:
        judgement = judged(runner, {first: reference}, size)
        if judgement.verdict is Verdict.FAIL:
            raise TrainingDiffers("\n".join([f"{start.target}: {judgement.sentence}", *judgement.table]))
        if judgement.verdict is Verdict.UNKNOWN:
            unknown.append(judgement.sentence)
        elif judgement.unknown:
            warnings.warn(f"{start.target}: {' '.join(judgement.unknown)}", TrainingPartlyUndecided, stacklevel=2)
    if unknown:
        raise TrainingUndecided(f"{start.target}: " + "\n".join(dict.fromkeys(unknown)))
