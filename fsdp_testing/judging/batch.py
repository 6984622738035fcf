"""Runs a batch of cases on the ranks, one after the other until one goes wrong."""

from __future__ import annotations

import gc
import hashlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.base.torch_state import process_groups
from fsdp_testing.cases.records import OUTLIVES, Case, CaseRecord, RaisedError, RankObservation
from fsdp_testing.judging import record_stream
from fsdp_testing.oracle import kept_groups
from fsdp_testing.oracle.accounts import AccountedProgram, program_for
from fsdp_testing.oracle.rank_jobs import survivors
from fsdp_testing.oracle.setup import fitted
from fsdp_testing.ranks.ledger.interception import listen
from fsdp_testing.ranks.ledger.recorder import Call, GroupIdentity
from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.world import World, current_world

_PATIENCE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Watch:
    """Observations besides the numbers.

    Attributes:
        operations: Take a snapshot after every operation, so that the first one that diverges is known.
        models: Whether models outlive their case.
    """

    operations: bool = False
    models: bool = False


def run_batch(adapter: Adapter, cases: Sequence[Case], directory: str, watch: Watch) -> int | Failed:
    """Run cases through an implementation, up to the first one that leaves the ranks in different places.

    An exception that every rank raised in the same operation ends its case only.

    Returns:
        How many cases were begun; a `Failed` if the ranks cannot go on together after the last one.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    world = current_world()

    def run(index: int) -> tuple[CaseRecord, weakref.ref[nn.Module]]:
        return _run(adapter, fitted(cases[index], adapter), world, index, watch, directory)

    return run_each(len(cases), run, directory, models_stay=not watch.models)


def run_each(
    count: int,
    run: Callable[[int], tuple[CaseRecord, weakref.ref[nn.Module]]],
    directory: str,
    *,
    models_stay: bool = False,
) -> int | Failed:
    """Run so many programs by number, up to the first one that leaves the ranks in different places.

    A record lies in its file as soon as its program is over: it outlives the rank.

    Args:
        count: How many.
        run: Runs one, and returns its record and its model.
        directory: The directory for the records.
        models_stay: Nothing is said of models that outlive their program.

    Returns:
        How many were begun; a `Failed` if the ranks cannot go on together after the last one.

    Collectives: those of the programs; every rank of the world runs the same call.
    """
    world = current_world()
    models: list[tuple[int, weakref.ref[nn.Module]]] = []
    with record_stream.path_of(directory, world.rank).open("ab") as file, _garbage_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as for every judged program, whatever filters the caller has
        for index in range(count):
            record, model = run(index)
            models.append((index, model))
            # As soon as the case ends: a rank that dies in the next one has reported this one.
            record_stream.append(file, record)
            error = record.observation.error
            # State that a case changed would affect the next one, and ranks that raised at different places cannot run it.
            if record.leaks or (error is not None and not everyone_raised(directory, world, index, error)):
                return Failed(index + 1)
        # Once, at the end: a collection for each case would cost more than the case.
        left = survivors(models)
        for index in () if models_stay else left:
            record_stream.append(file, CaseRecord(index, RankObservation(world.rank), leaks=(OUTLIVES,)))
    return count


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Disable the garbage collector: a full collection walks all of torch's objects, at unpredictable points."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def everyone_raised(directory: str, world: World, index: int, mine: RaisedError) -> bool:
    """Return whether every other rank raised the same kind of exception in the same operation; wait a moment for them.

    It reads the files, since the ranks may no longer agree on their next collective. The answer only decides whether these
    ranks go on: the judge reads every rank's report, also within the pool's grace period.
    """
    limit = time.monotonic() + _PATIENCE_SECONDS
    missing = set(range(world.size)) - {world.rank}
    # Read again each time: ranks append to their files while this one looks.
    while missing and time.monotonic() < limit:
        for rank in sorted(missing):
            reported = [r for r in record_stream.read(directory, rank) if r.index == index]
            if reported:
                error = reported[0].observation.error
                if error is None or (error.index, error.type_name) != (mine.index, mine.type_name):
                    return False
                missing.discard(rank)
        if missing:
            time.sleep(0.001)
    return not missing


def _run(
    adapter: Adapter, case: Case, world: World, index: int, watch: Watch, directory: str
) -> tuple[CaseRecord, weakref.ref[nn.Module]]:
    kept_groups.keep(kept_groups.groups_of(case))  # before existing objects are noted: they stay for later cases
    before = _fingerprint()
    program = program_for(case, adapter, world.rank)
    program.files = Path(directory)
    accounted = program if isinstance(program, AccountedProgram) else None
    issued = _Issued(accounted)
    with listen(issued):
        observation = program.run(observe_all=watch.operations or case.low_precision)
        adapter.finish(program.model)
    changed = ((name, was, now) for (name, was), now in zip(before.items(), _fingerprint().values()) if was != now)
    leaks = tuple(f"{name}: {was} before, {now} after" for name, was, now in changed)
    accounts = None if accounted is None else tuple(accounted.accounts)
    record = CaseRecord(index, observation, issued.summary(), leaks, accounts, issued.groups)
    # Weak, and from a frame that ends here: the batch must not keep alive what it looks for.
    return record, weakref.ref(program.model)


class _Issued:
    """Counts the collectives of one case and keeps a digest of what they were, group by group.

    Attributes:
        groups: Members of each group that was used, by its key.
    """

    def __init__(self, accounted: AccountedProgram | None = None) -> None:
        self._calls: dict[int, list[Call]] = {}
        self._accounted = accounted
        self.groups: dict[int, tuple[int, ...]] = {}

    def __call__(self, group: GroupIdentity, call: Call, _site: str) -> None:
        self._calls.setdefault(group.key, []).append(call)
        self.groups[group.key] = group.members
        if self._accounted is not None:
            self._accounted.collective(group, call)

    def summary(self) -> dict[int, tuple[int, int]]:
        """Return count and digest, by group key, of what must be equal on all members: not of sizes that each may choose."""
        return {key: (len(calls), _digest(calls)) for key, calls in self._calls.items()}


def _digest(calls: Sequence[Call]) -> int:
    texts = {call: repr(call.what) for call in dict.fromkeys(calls)}
    joined = "|".join(map(texts.__getitem__, calls))
    return int.from_bytes(hashlib.blake2b(joined.encode(), digest_size=8).digest(), "little")


def _fingerprint() -> dict[str, object]:
    """Return the state of this process that no case may change; cheap enough to read after every one."""
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch threads": torch.get_num_threads(),
        "Python threads": threading.active_count(),
        "process groups": len(list(process_groups())),
    }
