"""How does a rank run a script that nobody changed, as torchrun would have started it, and what does it report of it?"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.oracle.fresh_memory import filled_with_garbage
from fsdp_testing.ranks.ledger.late_delivery import deliver_late
from fsdp_testing.ranks.pool.world import current_world
from fsdp_testing.train.function.disturbance import disturbed
from fsdp_testing.train.function.evidence import StepEvidence, Witness
from fsdp_testing.train.function.held import Spans, begin_with
from fsdp_testing.train.function.launch import as_torchrun_starts
from fsdp_testing.train.function.observation import Observer, StepSeen
from fsdp_testing.train.script.conventions import Follower
from fsdp_testing.train.script.copies import copies_in
from fsdp_testing.train.script.feeding import Feed, Feeder, Taken
from fsdp_testing.train.script.numbers import Log, watch_numbers
from fsdp_testing.train.script.surroundings import hosts, in_folder, outside


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """How a script is run.

    Attributes:
        script: Path of the script, or name of the module.
        arguments: Those after it.
        is_module: Whether it is run with `-m`.
        steps: Optimizer steps after which it is ended.
        folder: The current folder of this run.
        stop_before: Step before which it is ended; never with 0.
        seed: Other than 0: roundings are made differently.
        keep_data: Whether to report the data that was taken.
        feed: What it is given in place of its own data.
    """

    script: str
    arguments: tuple[str, ...]
    is_module: bool
    steps: int
    folder: str
    stop_before: int = 0
    seed: int = 0
    keep_data: bool = False
    feed: Feed = field(default_factory=Feed)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank reports of its run.

    Attributes:
        steps: Each step of an optimizer.
        evidence: What explains differences, by step.
        taken: The data.
        numbers: Numbers that the script took out of tensors, by line.
        outside: Files that it wrote elsewhere than below its current folder.
        hosts: Other machines that it asked for.
        copies: Other copies of the weights at the end, by the name of their variable.
        ended: Whether the script ended by itself.
        dropout: Whether dropout would have been active, which is switched off.
        conventions: Names of conventions that it was seen to follow.
    """

    steps: tuple[StepSeen, ...]
    evidence: tuple[StepEvidence, ...]
    taken: Taken
    numbers: Log
    outside: tuple[str, ...]
    hosts: tuple[str, ...]
    copies: dict[str, Spans]
    ended: bool
    dropout: bool = False
    conventions: tuple[str, ...] = ()


class _EnoughSteps(BaseException):
    """Ends a script from inside after so many steps; no `except Exception` of the script takes it."""


def run_here(run: ScriptRun) -> RankReport:
    """Run the script in this rank and return what was seen of it.

    Raises:
        InvalidArgument: The script starts processes of its own, ends with an exit code, or does not get what it downloads.
    """
    world = current_world()
    feeder = Feeder(replace(run.feed, rank=world.rank if world.size > 1 else -1), run.keep_data)
    witness, follower = Witness(), Follower(run.feed.ranks)

    observer = _observer(run, feeder, follower)
    roundings = disturbed(run.seed * world.size + world.rank) if run.seed else nullcontext()
    dropout: list[bool] = []
    with ExitStack() as stack:
        numbers = stack.enter_context(watch_numbers())
        for context in (
            in_folder(run.folder),
            as_torchrun_starts(world),
            _without_dropout(dropout),
            _without_own_processes(),
            witness.watch(),
            observer.watch(),
            feeder.watch(),
            follower.watch(),
            deliver_late(),
            filled_with_garbage(),
            roundings,
        ):
            stack.enter_context(context)
        copies, ended = _run_to_end(run, observer)
        observer.finish()
    feeder.finish()
    taken = feeder.taken
    taken.calls = observer.calls
    if not run.keep_data:
        taken.marked.clear()
    return RankReport(
        tuple(observer.steps),
        observer.of_steps(witness.steps),
        taken,
        numbers,
        tuple(sorted(outside)),
        tuple(sorted(hosts)),
        copies,
        ended,
        bool(dropout),
        tuple(sorted(follower.seen)),
    )


def _observer(run: ScriptRun, feeder: Feeder, follower: Follower) -> Observer:
    """Return what sees the training, ends it in time, and has its data and forwards replaced."""

    def stop(steps: int) -> None:
        if steps >= run.steps:
            raise _EnoughSteps

    def stop_before(steps: int) -> None:
        feeder.end_step()
        follower.look()
        if run.stop_before and steps >= run.stop_before:
            raise _EnoughSteps

    def forward(model: torch.nn.Module, call: Any, given: Any, place: Any) -> Any:
        if run.feed.weights and not any(model is known for known in observer.reader.models):
            begin_with(run.feed.weights, model, len(observer.reader.models))
        return follower.forward(model, call, given, place)

    observer = Observer(stop, feeder.forward, stop_before, forward)
    observer.keep_calls = run.keep_data
    return observer


def _run_to_end(run: ScriptRun, observer: Observer) -> tuple[dict[str, Spans], bool]:
    """Run the script; return the copies of the weights that it has at its end, and whether it ended by itself."""
    try:
        return copies_in([run_script(run)], observer.reader.models, observer.reader.block), True
    except _EnoughSteps as end:
        scopes = [frame.f_locals for frame, _ in traceback.walk_tb(end.__traceback__)]
        return copies_in(scopes, observer.reader.models, observer.reader.block), False
    except SystemExit as end:
        if end.code in (None, 0):
            return {}, True
        raise InvalidArgument(_of_exit(run.script, end)) from end
    except OSError as error:  # as those of sockets, urllib and huggingface_hub are
        if not hosts:
            raise
        raise InvalidArgument(
            f"downloads something: it asked for {', '.join(sorted(hosts))} and got {type(error).__name__}: {error}. Run it "
            "once by itself, so that what it needs is there, and give it the path, or the offline switch, of its framework."
        ) from error


def _of_exit(script: str, end: SystemExit) -> str:
    """Return what an exit of the script says and where: a text that it gave, or a number, as argparse does."""
    frames = [frame for frame in traceback.extract_tb(end.__traceback__) if frame.filename == script]
    where = f" at {Path(script).name}:{frames[-1].lineno}" if frames else ""
    if not isinstance(end.code, int):
        return f'ended itself by sys.exit("{str(end.code)[:300]}"){where}. Mend what it says there.'
    advice = (
        "Give the script the arguments it needs after its name." if end.code == 2 else "See why the script ends itself."
    )
    return f"ended with exit code {end.code}{where}. {advice}"


def run_script(run: ScriptRun) -> dict[str, Any]:
    """Run the script to its end and return its globals."""
    argv, path = list(sys.argv), list(sys.path)
    main = sys.modules.get("__main__")
    try:
        sys.argv[:] = [run.script, *run.arguments]
        if run.is_module:
            sys.path.insert(0, str(Path.cwd()))
            return runpy.run_module(run.script, run_name="__main__", alter_sys=True)
        sys.path.insert(0, str(Path(run.script).parent))
        return runpy.run_path(run.script, run_name="__main__")
    finally:
        sys.argv[:], sys.path[:] = argv, path
        if main is not None:
            sys.modules["__main__"] = main


@contextmanager
def _without_dropout(active: list[bool]) -> Iterator[None]:
    """Switch dropout off: masks are drawn for the rows of a rank, which are others in each world.

    Args:
        active: Filled if any would have been active.
    """
    functional = torch.nn.functional
    real_attention = functional.scaled_dot_product_attention

    def keep(inputs: torch.Tensor, p: float = 0.5, training: bool = True, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        if p and training and not active:
            active.append(True)
        return inputs

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        if (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) and not active:
            active.append(True)
        if len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return real_attention(*args, **kwargs)

    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(functional, name, keep))
        stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", attention))
        yield


@contextmanager
def _without_own_processes() -> Iterator[None]:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise InvalidArgument(
            "starts processes of its own with torch.multiprocessing. Expected a script for torchrun, each process of "
            "which is one rank. Call the function that it starts, and read RANK and WORLD_SIZE from the environment."
        )

    import torch.multiprocessing as processes

    with mock.patch.object(processes, "spawn", refuse), mock.patch.object(processes, "start_processes", refuse):
        yield
