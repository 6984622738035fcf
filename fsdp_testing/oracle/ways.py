"""Carries a state from one run to another: as objects, as a file, or as a directory of shards.

Each way is one that users take: nothing is renamed, cast or completed. The adapter decides what it saves and how it loads;
everything in between is torch's own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.ranks.pool.channel import dumps, loads
from fsdp_testing.ranks.pool.world import current_world

_OBJECTS, _FILE, _DIRECTORY = "objects.pickle", "state.pt", "shards"
_DIRECTORIES = ("dcp", "async")


@dataclass(frozen=True, slots=True)
class Trained:
    """What a rank saves.

    Attributes:
        model: As the implementation wrapped it.
        optimizer: None: the model alone.
        beside: Entries that no implementation knows, by key; the ranks' values of one key are put together.
    """

    model: nn.Module
    optimizer: Any
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def save(way: str, adapter: Adapter, trained: Trained, folder: Path, group: Any = None) -> None:
    """Save what is trained below `folder`.

    Collectives: those of the adapter, and of `torch.distributed.checkpoint.save`; every rank calls, of `group` if one is given
    (for "dcp" alone). With entries beside a full state, one more over the world.
    """
    model, optimizer = trained.model, trained.optimizer
    if way in _DIRECTORIES:
        state: dict[str, Any] = {"model": _shards(adapter, model)[0], **trained.beside}
        state |= {} if optimizer is None else {"optimizer": _optimizer_shards(adapter, model, optimizer)}
        with refusals_as_errors():
            if way == "dcp":
                dcp.save(state, checkpoint_id=folder / _DIRECTORY, process_group=group)
            else:
                saving: Any = dcp.async_save(state, checkpoint_id=folder / _DIRECTORY)
                with _other_numbers(model, optimizer):
                    saving.result()
        return
    full: dict[str, Any] = {"model": dict(adapter.full_state_dict(model))}
    full |= {} if optimizer is None else {"optimizer": adapter.full_optimizer_state(model, optimizer)}
    full |= _of_all_ranks(trained.beside) if trained.beside else {}
    rank, last = current_world().rank, current_world().size - 1
    # Every rank has the complete state: one way takes the first rank's, the other the last one's.
    if way == "file" and rank == 0:
        torch.save(full, folder / _FILE)
    elif way == "memory" and rank == last:
        (folder / _OBJECTS).write_bytes(dumps(full))


def _of_all_ranks(beside: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    everyone: list[Any] = [None] * current_world().size
    dist.all_gather_object(everyone, beside)
    return {key: {name: value for entries in everyone for name, value in entries[key].items()} for key in beside}


@contextmanager
def _other_numbers(model: nn.Module, optimizer: Any) -> Iterator[None]:
    """Change the tensors that this rank trains, as the next steps do while files are written, and restore them."""
    states = optimizer.state.values() if optimizer is not None else ()
    tensors: list[Any] = [
        *model.parameters(),
        *model.buffers(),
        *(entry for state in states for entry in state.values()),
    ]
    local: list[torch.Tensor] = [_own_part(t).detach() for t in tensors if isinstance(t, torch.Tensor)]
    before = [tensor.clone() for tensor in local]
    for tensor in local:
        tensor.add_(1)
    try:
        yield
    finally:
        for tensor, value in zip(local, before):
            tensor.copy_(value)


def _own_part(tensor: Any) -> Any:
    """Return what this rank has of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def read(way: str, folder: Path) -> dict[str, Any]:
    """Return what lies below `folder` as complete tensors, without any implementation's help. Collectives: none."""
    if way == "memory":
        objects: dict[str, Any] = loads((folder / _OBJECTS).read_bytes())
        return objects
    if way == "file":
        state: dict[str, Any] = torch.load(folder / _FILE, weights_only=True)
        return state
    blank = _blank(folder, "")
    with refusals_as_errors():
        dcp.load(blank, checkpoint_id=folder / _DIRECTORY, no_dist=True)
    return blank


class DirectoryRefused(RuntimeError):
    """torch.distributed.checkpoint could not save or load; `except Exception` does not catch its own exception."""


@contextmanager
def refusals_as_errors() -> Iterator[None]:
    """Raise `DirectoryRefused` in place of torch's exception."""
    try:
        yield
    except CheckpointException as refused:
        reasons = [f"rank {rank}: {type(error).__name__}: {error}" for rank, (error, _) in refused.failures.items()]
        raise DirectoryRefused("; ".join(reasons)) from refused


class Source:
    """A state that lies below a folder, as a loading rank sees it.

    Args:
        way: How it was saved.
        folder: The folder to read.
        group: The ranks that load; None for the world.
        full: The full state, if it is not in a file.
    """

    def __init__(self, way: str, folder: Path, group: Any = None, full: Mapping[str, Any] | None = None) -> None:
        self._folder = folder
        self._group = group
        # A full state is read once; each rank reads its own shards when it loads them.
        self._full = full if full is not None or way in _DIRECTORIES else read(way, folder)

    def load_model(self, adapter: Adapter, model: nn.Module) -> None:
        """Load the model. Collectives: those of the adapter, and of `torch.distributed.checkpoint.load`."""
        if self._full is not None:
            adapter.load_full_state_dict(model, self._full["model"])
            return
        state, sharded = _shards(adapter, model)
        with refusals_as_errors():
            dcp.load({"model": state}, checkpoint_id=self._folder / _DIRECTORY, process_group=self._group)
        load: Any = adapter.load_sharded_state_dict if sharded else adapter.load_full_state_dict
        load(model, state)

    def load_optimizer(self, adapter: Adapter, model: nn.Module, optimizer: Any) -> None:
        """Load the optimizer. Collectives: as for the model."""
        if self._full is not None:
            adapter.load_full_optimizer_state(model, optimizer, self._full["optimizer"])
            return
        state, shards = _blank(self._folder, "optimizer"), _optimizer_shards(adapter, model, optimizer)
        state["optimizer"].setdefault("state", {})  # a directory does not keep what is empty
        # Shards are filled in place; before the optimizer's first step there may be none.
        has_room = state["optimizer"]["state"].keys() <= shards.get("state", {}).keys()
        sharded = has_room and "load_sharded_optimizer_state" not in adapter.missing
        state |= {"optimizer": shards} if sharded else {}
        with refusals_as_errors():
            dcp.load(state, checkpoint_id=self._folder / _DIRECTORY, process_group=self._group)
        load: Any = adapter.load_sharded_optimizer_state if sharded else adapter.load_full_optimizer_state
        load(model, optimizer, state["optimizer"])

    def beside(self, key: str) -> dict[str, Any]:
        """Return all ranks' entries of a key. Collectives: those of `torch.distributed.checkpoint.load`."""
        if self._full is not None:
            return dict(self._full[key])
        state = _blank(self._folder, key)
        with refusals_as_errors():
            dcp.load(state, checkpoint_id=self._folder / _DIRECTORY, process_group=self._group)
        return dict(state[key])


class Carrier:
    """Carries a state from some ranks to others; the last saved state is loaded.

    Args:
        folder: Has a directory of `torch.distributed.checkpoint` for each save, with shards where the adapter gives shards; None
            keeps the full state, as objects.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        # Of directories the number of the last one.
        self._saved: Any = 0 if folder is not None else {}

    def save(self, adapter: Adapter, model: nn.Module, optimizer: Any, group: Any) -> None:
        """Save model and optimizer (None: the model alone). Collectives: every rank of `group` (None: the world) calls."""
        if self._folder is not None:
            self._saved += 1
            save("dcp", adapter, Trained(model, optimizer), self._folder / str(self._saved), group)
            return
        # The optimizer first, unlike everywhere else: saving the model first would free units that a forward left gathered.
        self._saved = {} if optimizer is None else {"optimizer": adapter.full_optimizer_state(model, optimizer)}
        self._saved["model"] = adapter.full_state_dict(model)

    def send(self, source: int) -> None:
        """Give every rank of the world the state that rank `source` saved. Collectives: one broadcast, of the world."""
        box = [self._saved]
        dist.broadcast_object_list(box, src=source)
        (self._saved,) = box

    def source(self, group: Any = None) -> Source:
        """Return what the ranks of `group` (None: the world) load."""
        if self._folder is None:
            return Source("memory", Path(), group, self._saved)
        return Source("dcp", self._folder / str(self._saved), group)


@contextmanager
def carried_in_directory(parent: Path) -> Iterator[Carrier]:
    """Yield a carrier through a new directory. Collectives: those of `shared_directory`."""
    with shared_directory(parent) as folder:
        yield Carrier(folder)


@contextmanager
def shared_directory(parent: Path) -> Iterator[Path]:
    """Make a directory below `parent` on rank 0, and remove it when every rank has left.

    Collectives: a broadcast on entry, a barrier on exit; after an exception none.
    """
    rank = dist.get_rank()
    box = [tempfile.mkdtemp(prefix="state-", dir=parent) if rank == 0 else ""]
    dist.broadcast_object_list(box, src=0)
    try:
        yield Path(box[0])
        # Rank 0 must not remove what others still read. Not after an exception: the others may never come here.
        dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(box[0], ignore_errors=True)


def _shards(adapter: Adapter, model: nn.Module) -> tuple[dict[str, Any], bool]:
    """Return the model's state for a directory, and whether it is in shards.

    An implementation's sharded form may be any; only tensors that name their place in the whole can be assembled.
    """
    if "sharded_state_dict" in adapter.capabilities:
        state = dict(adapter.sharded_state_dict(model))
        if any(isinstance(t, torch.Tensor) and type(t) not in (torch.Tensor, nn.Parameter) for t in state.values()):
            return state, True
    return dict(adapter.full_state_dict(model)), False


def _optimizer_shards(adapter: Adapter, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    if "sharded_optimizer_state" in adapter.missing:
        return dict(adapter.full_optimizer_state(model, optimizer))
    return dict(adapter.sharded_optimizer_state(model, optimizer))


def _blank(folder: Path, part: str) -> dict[str, Any]:
    """Return room for what a directory holds, as complete tensors.

    Args:
        folder: As for `read`.
        part: Only what is saved under this key; all of it if empty.
    """
    metadata = FileSystemReader(folder / _DIRECTORY).read_metadata()
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data
    room: dict[str, Any] = {part: {}} if part else {}
    entries: Mapping[str, Any] = metadata.state_dict_metadata
    for key, entry in entries.items():
        path = paths[key]
        if part in ("", path[0]):
            level = room
            for name in path[:-1]:
                level = level.setdefault(name, {})
            whole = isinstance(entry, TensorStorageMetadata)
            level[path[-1]] = torch.zeros(entry.size, dtype=entry.properties.dtype) if whole else None
    return {name: _with_lists(level) for name, level in room.items()}


def _with_lists(entry: Any) -> Any:
    """Return it with a list wherever a directory numbers its entries."""
    if not isinstance(entry, dict):
        return entry
    inner = {name: _with_lists(value) for name, value in entry.items()}
    return [inner[index] for index in sorted(inner)] if inner and all(type(n) is int for n in inner) else inner
