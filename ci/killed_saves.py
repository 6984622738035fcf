"""Kills saves, and checks that the checkpoint before stays and that none loads with wrong numbers.

    python ci/killed_saves.py --moments 200

Two ranks train and save with fsdp_ref, again and again, and are killed (SIGKILL) at a random moment of each save: all of
them, or one. Whoever starts next loads every checkpoint that counts as complete and compares all numbers, as a user who
goes on would. In turn: a full file as docs/state.md writes it, a directory of torch.distributed.checkpoint, and the same
by `async_save` while the model changes on. A moment is a call among all that Python makes during a save, half of them among
those after the first file was opened; so they do not depend on how busy the machine is, and `--seed` gives them again.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor  # here, so that ranks are forked with it
from torch import nn

import fsdp_ref
from fsdp_ref import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from fsdp_ref.wrap import ModuleWrapPolicy

WAYS = ("file", "dcp", "async")
RANKS = 2
WIDTH = 192
PATIENCE_S, SURVIVORS_S = 300.0, 20.0
"""How long ranks may take to load and save, on the slowest machine, and how long those are waited for whose peer was killed."""


def save_file(state: dict[str, Any], path: Path) -> None:
    beside = path.with_name(path.name + ".partial")
    with beside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def complete(folder: Path) -> dict[int, Path]:
    """Return the directories that were saved to the end, by step: `.metadata` is written last."""
    return {int(path.parent.name.removeprefix("step-")): path.parent for path in folder.glob("step-*/.metadata")}


class Lost(Exception):
    """A checkpoint is gone, cannot be loaded, or has wrong numbers."""


# --------------------------------------------------------------------------------------------------------- on the ranks


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model = FullyShardedDataParallel(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()  # directories are loaded into a state that is there
    return model, optimizer


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    """Write one number into everything that is saved: from then on it says which save an element comes from."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    for state in optimizer.state.values():
        for entry in state.values():
            entry.fill_(value)
    for group in optimizer.param_groups:
        group["lr"] = value


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    """Return all numbers of this rank, each once."""
    entries = [entry for state in optimizer.state.values() for entry in state.values()]
    found = {float(value) for tensor in (*model.parameters(), *entries) for value in tensor.detach().unique()}
    return found | {float(group["lr"]) for group in optimizer.param_groups}


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": fsdp_ref.optim_state_dict(model, optimizer)}


def save(way: str, folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if way == "file":
        on_rank_0 = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with fsdp_ref.state_dict_type(model, StateDictType.FULL_STATE_DICT, on_rank_0):
            state = collect(model, optimizer)
        if dist.get_rank() == 0:
            save_file(state, folder / "checkpoint.pt")
        return
    with fsdp_ref.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = collect(model, optimizer)
    if way == "dcp":
        dcp.save(state, checkpoint_id=folder / f"step-{step}")
    else:
        saving: Any = dcp.async_save(state, checkpoint_id=folder / f"step-{step}")
        fill(model, optimizer, -1.0)  # what is trained on must not get into the files
        saving.result()


def load(way: str, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load whatever counts as complete, the newest last, and return its step; 0 if there is nothing.

    Raises:
        Lost: It cannot be loaded, or is not what was saved.
    """
    newest = 0
    files = [folder / "checkpoint.pt"] if (folder / "checkpoint.pt").exists() else []
    for path in files if way == "file" else [path for _, path in sorted(complete(folder).items())]:
        fill(model, optimizer, -2.0)
        try:
            _load_one(path, model, optimizer)
        except (Exception, dcp.CheckpointException) as error:
            raise Lost(f"{path.name} cannot be loaded: {type(error).__name__}: {error}") from error
        found = values(model, optimizer)
        wanted = {float(path.name.removeprefix("step-"))} if path.is_dir() else {max(found)}
        if found != wanted or not found.isdisjoint({-1.0, -2.0}):
            raise Lost(f"{path.name} has numbers of several states, or of none: {sorted(found)}")
        newest = int(max(found))
    return newest


def _load_one(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    form = StateDictType.SHARDED_STATE_DICT if path.is_dir() else StateDictType.FULL_STATE_DICT
    with fsdp_ref.state_dict_type(model, form):
        if path.is_dir():
            state = collect(model, optimizer)
            dcp.load(state, checkpoint_id=path)
        else:
            state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        fsdp_ref.optim_state_dict_to_load(model, optimizer, state["optimizer"], load_directly=True)


@dataclass
class Moment:
    """Who is killed, and when: at which call (its number) of which rank."""

    rank: int
    call: int
    victims: set[int]


class Calls:
    """Counts the calls that this process makes, in all its threads, and kills processes (this one last) at one; 0 for none."""

    def __init__(self, call: int, victims: list[int], folder: Path) -> None:
        self.count = 0
        self.first_file = 0
        self._call, self._victims, self._folder = call, victims, str(folder)

    def __enter__(self) -> Calls:
        sys.addaudithook(self._opened)
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _called(self, frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            self.count += 1
            if self.count == self._call:
                for pid in self._victims:
                    os.kill(pid, signal.SIGKILL)

    def _opened(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not self.first_file and str(arguments[0]).startswith(self._folder):
            self.first_file = self.count


def rank_main(
    rank: int, way: str, places: tuple[Path, Path], moment: Moment | None, say: Callable[[str], None]
) -> None:
    """Load, say what was found, and save the next step."""
    folder, store = places
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model, optimizer = build()
    try:
        step = load(way, folder, model, optimizer)
    except Lost as error:
        say(f"lost {error}")
        return
    say(f"loaded {step}")
    fill(model, optimizer, float(step + 1))
    pids = [0] * RANKS
    dist.all_gather_object(pids, os.getpid())
    call, victims = 0, []
    if moment is not None and moment.rank == rank:
        call, victims = moment.call, sorted((pids[each] for each in moment.victims), key=lambda pid: pid == os.getpid())
    with Calls(call, victims, folder) as calls:
        save(way, folder, step + 1, model, optimizer)
    say(f"saved {calls.count} {calls.first_file}")


# ------------------------------------------------------------------------------------------------ who starts and kills


@dataclass
class Rank:
    """A process and what it has said so far."""

    pid: int
    pipe: int
    said: list[str] = field(default_factory=list)
    ended: bool = False
    _rest: str = ""

    @property
    def saved(self) -> list[str]:
        """What was said at the end of the save: the number of calls, and of the one that opened the first file."""
        return next((line.split()[1:] for line in self.said if line.startswith("saved ")), [])

    def listen(self) -> None:
        """Take what has come."""
        data = os.read(self.pipe, 1 << 16).decode()
        *lines, self._rest = (self._rest + data).split("\n")
        self.said += lines
        self.ended = not data


def start(way: str, places: tuple[Path, Path], moment: Moment | None) -> list[Rank]:
    ranks = []
    for rank in range(RANKS):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                rank_main(rank, way, places, moment, partial(_say, writing))
            except BaseException:  # noqa: BLE001 - a rank whose peer was killed may raise anything
                _say(writing, "raised " + " | ".join(traceback.format_exc().splitlines()[-3:]))
            finally:
                os._exit(0)
        os.close(writing)
        ranks.append(Rank(pid, reading))
    return ranks


def _say(pipe: int, line: str) -> None:
    os.write(pipe, (line + "\n").encode())


def listen_to(ranks: list[Rank], seconds: float) -> None:
    """Listen until each has saved or ended, or until the time is over."""
    limit = time.monotonic() + seconds
    while (left := limit - time.monotonic()) > 0:
        going_on = {rank.pipe: rank for rank in ranks if not (rank.ended or rank.saved)}
        if not going_on:
            return
        for pipe in select.select(list(going_on), [], [], left)[0]:
            going_on[pipe].listen()


def end(ranks: list[Rank]) -> None:
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)  # nothing happens to one that has ended: it is waited for only here
    for rank in ranks:
        os.waitpid(rank.pid, 0)
        os.close(rank.pipe)


@dataclass
class Way:
    """The checkpoints of one way of saving, over all its moments: when saves were killed, and what was loaded after that."""

    name: str
    folder: Path
    newest: int = 0
    possible: set[int] = field(default_factory=lambda: {0})
    calls: list[tuple[int, int]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    killed: bool = False

    def draw(self, chance: random.Random) -> Moment:
        """Draw a moment of a save, in half of the cases one after its first file was opened."""
        rank = chance.randrange(RANKS)
        count, first_file = self.calls[rank]
        victims = chance.choice([set(range(RANKS)), *({each} for each in range(RANKS))])
        return Moment(rank, chance.randint(1 + first_file * chance.randrange(2), count), victims)

    def save(self, moment: Moment | None) -> None:
        """Start the ranks, which load, and kill some during their save; None: let them end.

        Raises:
            Lost: What they loaded is not what was there.
        """
        before = self._files()
        with tempfile.TemporaryDirectory() as store:
            ranks = start(self.name, (self.folder, Path(store) / "store"), moment)
            try:
                victims = range(RANKS) if moment is None else moment.victims
                listen_to([ranks[number] for number in victims], PATIENCE_S)
                # A survivor sees that its peer is gone, and may do what it likes about it.
                listen_to(ranks, SURVIVORS_S)
            finally:
                end(ranks)
        self._check(ranks)
        whole = all(rank.saved for rank in ranks)
        self.killed = moment is not None
        self.possible = {self.newest + 1} if whole else {self.newest, self.newest + 1}
        if moment is not None:
            when = "before files were touched" if self._files() == before else "while they were written"
            self.seen["after the end" if whole else when] += 1
        elif whole:
            self.calls = [(int(rank.saved[0]), int(rank.saved[1])) for rank in ranks]
        else:
            raise Lost(f"{self.name}: a save that nobody killed did not end: {[rank.said for rank in ranks]}")
        self._delete_old()

    def _files(self) -> set[tuple[str, int, int]]:
        return {(str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in self.folder.rglob("*") if f.is_file()}

    def _check(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            first = rank.said[0] if rank.said else "nothing"
            if not first.startswith("loaded "):
                raise Lost(f"{self.name}: {first}")
            found = int(first.split()[1])
            if found not in self.possible:
                raise Lost(f"{self.name}: expected step {sorted(self.possible)}, and step {found} was loaded")
        found = int(ranks[0].said[0].split()[1])
        if self.killed:
            self.left["the new one" if found > self.newest else "the one before"] += 1
        self.newest = found

    def _delete_old(self) -> None:
        """Delete what is older than the checkpoint before the newest; what was never completed stays, and is saved over."""
        whole = complete(self.folder)
        for step in sorted(whole)[:-2]:
            (whole[step] / ".metadata").unlink()  # first, so that nobody takes the rest for complete
            shutil.rmtree(whole[step])


def kill_saves(names: Sequence[str], moments: int, seed: int) -> list[Way]:
    """Kill that many saves, the ways in turn, and return the ways.

    Raises:
        Lost: A checkpoint was lost.
    """
    chance = random.Random(seed)
    torch.optim.AdamW([torch.empty(1, requires_grad=True)])  # imports much, which ranks are then forked with
    with tempfile.TemporaryDirectory() as folder:
        ways = [Way(name, Path(folder) / name) for name in names]
        for way in ways:
            way.folder.mkdir()
            for _ in range(2):  # calls are counted where there is something to load, as later
                way.save(None)
        for number in range(moments):
            way = ways[number % len(ways)]
            way.save(way.draw(chance))
        for way in ways:
            way.save(None)  # what the last moment left is loaded, too
        return ways


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--moments", type=int, default=200, help="saves that are killed, in all (default 200)")
    options.add_argument("--way", action="append", choices=WAYS, help="repeatable (default all)")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    try:
        ways = kill_saves(given.way or WAYS, given.moments, given.seed)
    except Lost as error:
        print(f"lost: {error}")
        return 1
    for way in ways:
        when, left = (", ".join(f"{n} {what}" for what, n in c.most_common()) for c in (way.seen, way.left))
        print(f"{way.name}: {way.seen.total()} saves killed, {when}; loaded afterwards: {left}")
    print(f"seed {given.seed}, {given.moments} moments: no checkpoint was lost, none loaded with wrong numbers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
