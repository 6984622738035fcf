"""Conventions by which N ranks intentionally differ from one process. One process can be made to follow them too.

They are never followed automatically: a verdict names the convention that it sees, and users who mean it accept it by name.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing.errors import InvalidArgument

SCHEDULER, BATCH_NORM, LOSS = "scheduler-per-process", "batch-norm-per-rank", "loss-per-rank"
MEASURED = "measured-gradients"
"""Not a convention of ranks: one process has nothing to follow."""
CONVENTIONS = {
    SCHEDULER: "Accelerate's scheduler steps once for each process",
    BATCH_NORM: "batch norms normalise the rows of each rank alone, and rank 0's statistics are kept",
    LOSS: "a loss over the rows of each rank that is not a mean over rows, such as a router's balance or a "
    "contrastive loss",
    MEASURED: "backward passes whose gradients are all cleared before the step do not count: they are measurements",
}
_SCHEDULERS = "accelerate.scheduler"


def check_names(names: Sequence[str]) -> None:
    """Refuse unknown names of conventions.

    Raises:
        InvalidArgument: Lists the known names.
    """
    unknown = [name for name in names if name not in CONVENTIONS]
    if unknown:
        raise InvalidArgument(
            f"accept: expected some of {', '.join(CONVENTIONS)}, got {', '.join(map(repr, unknown))}. Correct the name."
        )


def flag(name: str) -> str:
    """Return the advice for users who mean a convention."""
    does = "leaves it out" if name == MEASURED else "makes one process do the same"
    return f'If this is intended, `--accept {name}` {does}, and judges the rest. In Python: accept=["{name}"].'


def to_follow(accept: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the conventions that one process must follow."""
    return tuple(name for name in accept if name != MEASURED)


@dataclass(frozen=True, slots=True)
class AsRanks:
    """The conventions that one process must follow, and the ranks that it stands for.

    Attributes:
        accept: Names of conventions.
        size: Number of ranks.
        rows: Digests of the rows of each rank, by step and forward.
    """

    accept: tuple[str, ...]
    size: int
    rows: tuple[tuple[tuple[tuple[str, ...], ...], ...], ...] = ()


class Follower:
    """Sees which conventions a rank follows, and makes one process follow them.

    Args:
        ranks: The ranks whose conventions it must follow; None on ranks, and where nothing is accepted.

    Attributes:
        seen: Conventions that this process was seen to follow by itself.
    """

    def __init__(self, ranks: AsRanks | None) -> None:
        self.seen: set[str] = set()
        self._ranks = ranks
        self._stack = ExitStack()
        self._looked = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        with self._stack:
            yield

    def look(self) -> None:
        """Watch the modules that the script has imported so far."""
        schedulers: Any = sys.modules.get(_SCHEDULERS)
        if schedulers is None or self._looked:
            return
        self._looked = True
        original, ranks = schedulers.AcceleratedScheduler.step, self._ranks
        state = schedulers.AcceleratorState

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler.step_with_optimizer and not scheduler.split_batches:
                self.seen.add(SCHEDULER)
            return original(scheduler, *args, **kwargs)

        self._stack.enter_context(mock.patch.object(schedulers.AcceleratedScheduler, "step", step))
        if ranks is not None and SCHEDULER in ranks.accept:
            as_many = SimpleNamespace(num_processes=ranks.size * state().num_processes)
            self._stack.enter_context(mock.patch.object(schedulers, "AcceleratorState", return_value=as_many))

    def forward(self, model: nn.Module, call: Callable[..., Any], given: tuple[Any, Any], place: _Place) -> Any:
        """Return what a forward gives: all rows at once, or those of each rank apart where that is accepted.

        Args:
            model: The model that computes.
            call: The forward.
            given: Its arguments.
            place: Step and number of the forward, and the digests of its rows.
        """
        args, kwargs = given
        ranks = self._ranks
        apart = ranks is not None and bool({LOSS, BATCH_NORM} & {*ranks.accept})
        groups = _groups(ranks, place) if apart and ranks is not None else []
        if len(groups) < 2:
            return call(*args, **kwargs)
        terms: list[_Attributes] = []
        outputs = []
        own = _OwnState(model)
        with _buffers_left_alone(model):
            for group in groups:
                own.begin_rank()
                here = rows_of((args, kwargs), group, len(place[2]))
                outputs.append(call(*here[0], **here[1]))
                terms.append(_terms_of(model))
                own.end_rank()
        own.end()
        for module, name in terms[0]:
            setattr(module, name, torch.stack([values[module, name] for values in terms]).mean())
        return _joined(outputs, groups)


@contextmanager
def _buffers_left_alone(model: nn.Module) -> Iterator[None]:
    """Keep DDP from broadcasting buffers in one process: it would write to tensors that backward has saved."""
    # The option by its name since torch 2.13, and before. What else decides is set anew by each forward.
    name = "forward_sync_buffers" if hasattr(DistributedDataParallel, "broadcast_buffers") else "broadcast_buffers"
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel) and getattr(m, name)]
    for wrapper in wrappers:
        setattr(wrapper, name, False)
    try:
        yield
    finally:
        for wrapper in wrappers:
            setattr(wrapper, name, True)


_Place = tuple[int, int, tuple[str, ...]]


def _groups(ranks: AsRanks, place: _Place) -> list[list[int]]:
    """Return which rows of a forward belong to each rank; nothing where other rows are among them."""
    step, number, digests = place
    waiting: dict[str, list[int]] = {}
    for position, digest in enumerate(digests):
        waiting.setdefault(digest, []).append(position)
    groups = []
    for rows in ranks.rows:
        own = rows[step][number] if step < len(rows) and number < len(rows[step]) else ()
        if any(not waiting.get(digest) for digest in own):
            return []
        groups.append([waiting[digest].pop(0) for digest in own])
    return groups if not any(waiting.values()) and all(groups) else []


def rows_of(tree: Any, group: Sequence[int], count: int) -> Any:
    """Return some rows of each tensor that has `count`, in the order of `group`; all else as it is."""
    if isinstance(tree, torch.Tensor):
        rows = torch.tensor(group, device=tree.device)
        return tree.index_select(0, rows) if tree.ndim and len(tree) == count else tree
    if isinstance(tree, Mapping):
        return type(tree)({key: rows_of(value, group, count) for key, value in tree.items()})  # type: ignore[call-arg]  # mypy knows no constructor of a mapping
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(rows_of(part, group, count) for part in tree))
    return type(tree)(rows_of(part, group, count) for part in tree) if isinstance(tree, (list, tuple)) else tree


def _joined(outputs: Sequence[Any], groups: Sequence[Sequence[int]]) -> Any:
    """Merge the outputs of the ranks' forwards: rows in their order, and the mean of numbers."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if not first.ndim:
            return torch.stack(list(outputs)).mean() if first.is_floating_point() else first
        order = torch.tensor([position for group in groups for position in group], device=first.device).argsort()
        times = len(first) // len(groups[0])
        if any(len(one) != times * len(group) for one, group in zip(outputs, groups)):
            return first
        rows = torch.cat(list(outputs)).unflatten(0, (-1, times)) if times > 1 else torch.cat(list(outputs))
        return rows[order].flatten(0, 1) if times > 1 else rows[order]
    if isinstance(first, Mapping):
        joined = {key: _joined([one[key] for one in outputs], groups) for key in first}
        return type(first)(**joined)
    if isinstance(first, (list, tuple)):
        parts = [_joined(column, groups) for column in zip(*outputs)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first


class _OwnState:
    """What modules keep from one forward to the next: buffers, and tensors, numbers and texts as attributes.

    Each rank begins a forward with what all ranks began it with. What rank 0 ends with is kept, as DDP broadcasts it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors = _tensors_of(model)
        self._plain = _plain_of(model)
        self._kept: list[_Attributes] = []

    def begin_rank(self) -> None:
        # Clones: the graph of one rank's forward may hold tensors that the next one changes in place.
        _set({key: tensor.clone() for key, tensor in self._tensors.items()})
        _set({key: copy.deepcopy(value) for key, value in self._plain.items()})

    def end_rank(self) -> None:
        self._kept = self._kept or [_tensors_of(self._model), _plain_of(self._model)]

    def end(self) -> None:
        tensors, plain = self._kept
        for key, original in self._tensors.items():
            if key in tensors and tensors[key].shape == original.shape:
                original.data.copy_(tensors[key])
                tensors[key] = original  # others may hold it, too
        _set(tensors)
        _set(plain)


_Attributes = dict[tuple[nn.Module, str], Any]
_OF_EVERY_MODULE = {*vars(nn.Module())}
_MOST_PLAIN = 1024


def _tensors_of(model: nn.Module) -> _Attributes:
    buffers = {(m, name): buffer for m in model.modules() for name, buffer in m.named_buffers(recurse=False)}
    others = {key: value for key, value in _attributes_of(model) if isinstance(value, torch.Tensor)}
    return buffers | {key: tensor for key, tensor in others.items() if not tensor.requires_grad}


def _plain_of(model: nn.Module) -> _Attributes:
    return {key: copy.deepcopy(value) for key, value in _attributes_of(model) if _is_plain(value)}


def _attributes_of(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], Any]]:
    """Yield what modules keep as attributes; torch's own modules keep nothing there that a forward changes."""
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            yield from (((module, name), value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= _MOST_PLAIN and all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple, set, deque)):
        return len(value) <= _MOST_PLAIN and all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _set(attributes: _Attributes) -> None:
    for (module, name), value in attributes.items():
        setattr(module, name, value)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module in training normalises by the statistics of one rank's rows alone."""
    return isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and module.training


def _terms_of(model: nn.Module) -> dict[tuple[nn.Module, str], torch.Tensor]:
    """Return the terms of the loss that modules keep as attributes, such as a router's balance."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not value.ndim and value.requires_grad
    }
