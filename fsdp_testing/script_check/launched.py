"""How does a rank run a script that nobody changed, as torchrun would have started it?

In a folder of its own that shows the files of the current one: what the script writes goes there and is removed.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.ledger.late_delivery import deliver_late
from fsdp_testing.pool.world import current_world
from fsdp_testing.programs.fresh_memory import filled_with_garbage
from fsdp_testing.script_check.copies import copies_in
from fsdp_testing.script_check.feeding import Feed, Feeder, Taken
from fsdp_testing.script_check.numbers import Log, watch_numbers
from fsdp_testing.training_check.disturbance import disturbed
from fsdp_testing.training_check.evidence import StepEvidence, Witness
from fsdp_testing.training_check.held import Spans
from fsdp_testing.training_check.launch import as_torchrun_starts
from fsdp_testing.training_check.observation import Observer, StepSeen

_MOST_FILES = 5000


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
        copies: Other copies of the weights at the end, by the name of their variable.
        ended: Whether the script ended by itself.
    """

    steps: tuple[StepSeen, ...]
    evidence: tuple[StepEvidence, ...]
    taken: Taken
    numbers: Log
    outside: tuple[str, ...]
    copies: dict[str, Spans]
    ended: bool


class _EnoughSteps(BaseException):
    """Ends a script from inside after so many steps; no `except Exception` of the script takes it."""


def run_here(run: ScriptRun) -> RankReport:
    """Run the script in this rank and return what was seen of it.

    Raises:
        InvalidArgument: The script starts processes of its own, or ends with an exit code.
    """
    world = current_world()
    feeder, witness = Feeder(run.feed), Witness()

    def stop(steps: int) -> None:
        if steps >= run.steps:
            raise _EnoughSteps

    def stop_before(steps: int) -> None:
        if run.stop_before and steps >= run.stop_before:
            raise _EnoughSteps

    observer = Observer(stop, feeder.forward, stop_before)
    observer.keep_calls = run.keep_data
    roundings = disturbed(run.seed * world.size + world.rank) if run.seed else nullcontext()
    ended, copies = False, dict[str, Spans]()
    with ExitStack() as stack:
        numbers = stack.enter_context(watch_numbers())
        for context in (
            _in_folder(run.folder),
            as_torchrun_starts(world),
            _without_dropout(),
            _without_own_processes(),
            witness.watch(),
            observer.watch(),
            feeder.watch(),
            deliver_late(),
            filled_with_garbage(),
            roundings,
        ):
            stack.enter_context(context)
        try:
            copies = copies_in([run_script(run)], observer.models, observer.block)
            ended = True
        except _EnoughSteps as end:
            scopes = [frame.f_locals for frame, _ in traceback.walk_tb(end.__traceback__)]
            copies = copies_in(scopes, observer.models, observer.block)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise InvalidArgument(f"ended with exit code {end.code}") from end
            ended = True
    taken = feeder.taken
    taken.calls = observer.calls
    if not run.keep_data:
        taken.marked.clear()
        for loader in taken.loaders:
            loader.passes = [[] for _ in loader.passes]
    return RankReport(
        tuple(observer.steps), tuple(witness.steps), taken, numbers, tuple(sorted(_outside)), copies, ended
    )


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
def _without_dropout() -> Iterator[None]:
    """Switch dropout off: masks are drawn for the rows of a rank, which are others in each world."""
    functional = torch.nn.functional
    real_attention = functional.scaled_dot_product_attention

    def keep(inputs: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return inputs

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
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


@contextmanager
def _in_folder(folder: str) -> Iterator[None]:
    """Work in `folder`; files that it only shows are put aside before they are written to."""
    before = Path.cwd()
    os.chdir(folder)
    real_save = torch.save

    def save(value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)):
            _own(os.fspath(file), empty=True)
        return real_save(value, file, *args, **kwargs)

    _outside.clear()
    _written_in.append(os.path.realpath(folder))
    _hook_once()
    try:
        with mock.patch.object(torch, "save", save):
            yield
    finally:
        _written_in.pop()
        os.chdir(before)


_written_in: list[str] = []
_outside: set[str] = set()
_hooked: list[bool] = []


def _hook_once() -> None:
    """Put the hook in place that sees each file before it is opened; Python cannot take it away again."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_see_open)


def _see_open(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _written_in:
        return
    path, mode, flags = arguments
    writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
    if writes and isinstance(path, (str, os.PathLike)):
        _own(os.fspath(path), empty=isinstance(mode, str) and "w" in mode)


def _own(path: str, *, empty: bool) -> None:
    """Put aside the file of a link in the run's folder, and take note of files elsewhere.

    Args:
        path: Of the file that is to be written.
        empty: Whether its old content goes anyway.
    """
    place = Path(path)
    full = place.parent.resolve() / place.name
    if _written_in and not full.is_relative_to(_written_in[-1]) and full.parts[1:2] not in (("dev",), ("proc",)):
        _outside.add(str(full))
    elif _written_in and full.is_symlink():
        _replace(full, empty=empty)


def _replace(full: Path, *, empty: bool) -> None:
    """Replace a link by a file of its own, empty or a copy; of ranks that write at one moment the first one does."""
    import fcntl  # systems without it have no ranks

    folder = os.open(full.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # until it is closed
        if full.is_symlink():
            source = full.resolve()
            full.unlink()
            if not empty:
                shutil.copyfile(source, full)
    finally:
        os.close(folder)


def show_files(source: Path, folder: Path) -> None:
    """Fill `folder` with links to the files of `source`; folders are made anew, beyond many files they are links too."""
    count = 0
    for place, folders, files in os.walk(source):
        here = folder / Path(place).relative_to(source)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            count += 1
            (here / name).symlink_to(Path(place) / name)
        if count > _MOST_FILES:
            for name in folders:
                (here / name).symlink_to(Path(place) / name)
            folders.clear()
        for name in folders:
            (here / name).mkdir()
