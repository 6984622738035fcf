"""Runs an unmodified script in a rank, as torchrun would have started it."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.train.holdings import buffers_beside, copies_in
from fsdp_testing.train.observation import Observer
from fsdp_testing.train.on_rank import EnoughSteps, Job, RunSettings
from fsdp_testing.train.surroundings import NOT_OF_SCRIPTS, hosts, in_folder, outside, watch_numbers


@dataclass(frozen=True, slots=True)
class ScriptJob(Job):
    """A script as a rank runs it.

    Attributes:
        script: Path of the script, or name of the module.
        arguments: Those after it.
        is_module: Whether it is run with `-m`.
        moved: A folder of modules, and the folder that replaces it; empty if none is replaced.
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    moved: tuple[str, str] = ("", "")

    @contextmanager
    def watch(self, run: RunSettings) -> Iterator[Callable[[], dict[str, Any]]]:
        """Watch the numbers that it takes out of tensors, files and machines; dropout is off."""
        dropout: list[bool] = []

        def facts() -> dict[str, Any]:
            return {
                "numbers": numbers,
                "outside": tuple(sorted(outside)),
                "hosts": tuple(sorted(hosts)),
                "dropout": bool(dropout),
                "dropout_off": True,
            }

        with (
            watch_numbers() as numbers,
            in_folder(run.folder),
            _without_dropout(dropout),
            _without_own_processes(),
        ):
            yield facts

    def train(self, run: RunSettings, observer: Observer) -> dict[str, Any]:
        """Run the script; return the copies of the weights that it has at its end, and whether it ended by itself.

        Raises:
            InvalidArgument: It starts processes of its own, ends with an exit code, or does not get what it downloads.
        """
        frames: list[FrameType] = []

        def keep(*_: Any) -> None:
            """Keep the functions that run at the last step, with their variables: when the script ends they have returned."""
            frames[:] = reversed(_of_script(traceback.walk_stack(sys._getframe(1))))

        hook = register_optimizer_step_post_hook(keep)
        scopes, ended = [], True
        try:
            with _modules_moved(*self.moved):
                scopes = [run_script(self, run.arguments)]
        except EnoughSteps as end:
            frames += _of_script(traceback.walk_tb(end.__traceback__))
            ended = False
        except SystemExit as end:
            if end.code not in (None, 0):
                raise InvalidArgument(_of_exit(self.script, end)) from end
        except OSError as error:  # as those of sockets, urllib and huggingface_hub are
            if not hosts:
                raise
            raise InvalidArgument(
                f"downloads something: it asked for {', '.join(sorted(hosts))} and got {type(error).__name__}: {error}. Run it "
                "once without fsdp-verify. Then give it the path of its files, or its framework's offline switch."
            ) from error
        finally:
            hook.remove()
        scopes += [frame.f_locals for frame in frames]
        reader = observer.reader
        copies, called = copies_in(scopes, reader.models, reader.block, observer.ran)
        beside = buffers_beside(scopes, reader.models, reader.block)
        return {"copies": copies, "called": called, "beside": beside, "ended": ended}


def _of_script(stack: Iterable[tuple[FrameType, int]]) -> list[FrameType]:
    return [frame for frame, _ in stack if not frame.f_code.co_filename.startswith(NOT_OF_SCRIPTS)]


def run_script(job: ScriptJob, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the script to its end and return its globals."""
    argv, path = list(sys.argv), list(sys.path)
    main = sys.modules.get("__main__")
    try:
        sys.argv[:] = [job.script, *job.arguments, *arguments]
        if job.is_module:
            sys.path.insert(0, str(Path.cwd()))
            return runpy.run_module(job.script, run_name="__main__", alter_sys=True)
        sys.path.insert(0, str(Path(job.script).parent))
        return runpy.run_path(job.script, run_name="__main__")
    finally:
        sys.argv[:], sys.path[:] = argv, path
        if main is not None:
            sys.modules["__main__"] = main


@contextmanager
def _modules_moved(folder: str, other: str) -> Iterator[None]:
    """Import modules of a folder from the same places of another one.

    Raises:
        InvalidArgument: One is still imported from the folder.
    """
    if not folder:
        yield
        return
    path = list(sys.path)
    _forget(folder)  # a kept rank, or a preloaded module, has imported them already
    for number, entry in enumerate(path):
        place = Path(entry).resolve()
        if place.is_relative_to(folder) and (Path(other) / place.relative_to(folder)).is_dir():
            sys.path[number] = str(Path(other) / place.relative_to(folder))
    try:
        yield
    finally:
        sys.path[:] = path
        _forget(other)
        stayed = _forget(folder)
        if stayed:
            raise InvalidArgument(
                f"imports {', '.join(stayed[:3])} from {folder} (an editable install), not from the commit. Compare "
                "environments instead, each with its version installed: --against PATH_OF_ENVIRONMENT."
            )


def _forget(folder: str) -> list[str]:
    """Remove the modules of a folder, other than installed ones and our own, from those that are imported; return their names."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    inside = {name: Path(file).parts for name, file in files.items() if file.startswith(f"{folder}/")}
    ours = __name__.partition(".")[0]
    gone = [n for n, parts in inside.items() if not {"site-packages", ours} & {*parts} and n != "__main__"]
    for name in gone:
        del sys.modules[name]
    return sorted(gone)


def _of_exit(script: str, end: SystemExit) -> str:
    """Return the message and place of the script's exit: its text, or a number, as argparse gives."""
    frames = [frame for frame in traceback.extract_tb(end.__traceback__) if frame.filename == script]
    where = f" at {Path(script).name}:{frames[-1].lineno}" if frames else ""
    if not isinstance(end.code, int):
        return f'ended itself by sys.exit("{str(end.code)[:300]}"){where}. Fix the error that it reports.'
    advice = (
        "Give the script the arguments it needs after its name." if end.code == 2 else "See why the script ends itself."
    )
    return f"ended with exit code {end.code}{where}. {advice}"


@contextmanager
def _without_dropout(active: list[bool]) -> Iterator[None]:
    """Switch dropout off: masks are drawn for the rows of a rank, which differ between worlds."""
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
            "starts its own processes with torch.multiprocessing. Expected a script for torchrun, each process of "
            "which is one rank. Call the function that it starts, and read RANK and WORLD_SIZE from the environment."
        )

    import torch.multiprocessing as processes

    with mock.patch.object(processes, "spawn", refuse), mock.patch.object(processes, "start_processes", refuse):
        yield
