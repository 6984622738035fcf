"""The entries of a state, and the first of them in which two states differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fsdp_testing.base.documentation import page
from fsdp_testing.cases.records import ObservedPiece, Snapshot
from fsdp_testing.errors import InvalidImplementation
from fsdp_testing.oracle.assemble import assemble
from fsdp_testing.oracle.tensors import difference_in_bits
from fsdp_testing.search.checkpoints.on_ranks import Settings, StateObservation

LATER = -1
"""The last of a rank's snapshots: after the further step."""


class Entry(NamedTuple):
    """The name of one entry.

    Attributes:
        kind: `parameter`, `buffer`, `state` (of the optimizer), `setting` (of a group), `schedule` (of learning rates) or
            `random numbers` (of a rank).
        name: Parameter, buffer or rank.
        part: Name of the state (`exp_avg`), of the setting (`lr`) or of the schedule's (`last_epoch`).
    """

    kind: str
    name: str
    part: str = ""

    def __str__(self) -> str:
        """Return it as reports name it."""
        return f"{self.kind} {self.name}" if not self.part else f"{self.part} of {self.name}"


Entries = dict[Entry, Any]
"""Tensors, numbers and settings."""


class Contradiction(Exception):
    """The ranks hold different states; the text names the first entry that differs."""


def of_ranks(ranks: Sequence[StateObservation], point: int = 0) -> Entries:
    """Return the combined state of all ranks.

    Args:
        ranks: The ranks' reports, by rank.
        point: Index of the snapshot. After the further step (`LATER`) buffers and random numbers differ by rank, and are left
            out.

    Raises:
        Contradiction: Two ranks hold different bits of one entry, or no rank holds some element.
    """
    later = point == LATER
    snapshots = [rank.snapshots[point] for rank in ranks]
    shapes = {fqn: parameter.shape for snapshot in snapshots for fqn, parameter in snapshot.parameters.items()}
    entries: Entries = {}
    for fqn, shape in shapes.items():
        pieces = [(r, s.parameters[fqn].pieces) for r, s in enumerate(snapshots) if fqn in s.parameters]
        entries[Entry("parameter", fqn)] = _whole(Entry("parameter", fqn), pieces, shape)
    for fqn in dict.fromkeys(fqn for s in snapshots for fqn in s.buffers if not later):
        entry = Entry("buffer", fqn)
        entries[entry] = _common(
            entry, [(r, s.buffers[fqn].value) for r, s in enumerate(snapshots) if fqn in s.buffers]
        )
    entries |= dict(_state(snapshots, shapes))
    for rank, observation in enumerate(ranks):
        beside = observation.beside[point]
        for entry, value in (*of_settings(beside.settings), *_of_schedule(beside.schedule or {})):
            if entries.setdefault(entry, value) != value:
                raise Contradiction(f"{entry} is {entries[entry]!r} on rank 0 and {value!r} on rank {rank}")
        if beside.random is not None and not later:
            entries[random_numbers(rank)] = beside.random
    return entries


def random_numbers(rank: int) -> Entry:
    """Return the name of the entry of a rank's random numbers."""
    return Entry("random numbers", f"of rank {rank}")


def _state(snapshots: Sequence[Snapshot], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[Entry, Any]]:
    for fqn, shape in shapes.items():
        states = [(r, s.optimizer[fqn]) for r, s in enumerate(snapshots) if s.optimizer and fqn in s.optimizer]
        for part in dict.fromkeys(part for _, state in states for part in (*state.tensors, *state.scalars)):
            entry = Entry("state", fqn, part)
            pieces = [(r, state.tensors[part]) for r, state in states if part in state.tensors]
            numbers = [(r, state.scalars[part]) for r, state in states if part in state.scalars]
            yield entry, _common(entry, numbers) if numbers else _whole(entry, pieces, shape)


def _whole(entry: Entry, pieces: Sequence[tuple[int, Sequence[ObservedPiece]]], shape: Sequence[int]) -> torch.Tensor:
    whole = assemble(pieces, shape)
    if whole is None or not whole.complete:
        raise Contradiction(f"{entry}: no rank holds element {0 if whole is None else whole.first_hole()}")
    for first, second, element in whole.contradictions[:1]:
        raise Contradiction(f"{entry}, element {element}: ranks {first} and {second} hold different numbers")
    return whole.flat.reshape(tuple(shape))


def _common(entry: Entry, by_rank: Sequence[tuple[int, Any]]) -> Any:
    first, value = by_rank[0]
    for rank, other in by_rank[1:]:
        if _difference(other, value):
            raise Contradiction(f"{entry}: ranks {first} and {rank} hold different numbers")
    return value


def of_settings(settings: Settings) -> Iterator[tuple[Entry, Any]]:
    """Yield one entry for each setting of each parameter."""
    for fqn, group in settings.items():
        yield from ((Entry("setting", fqn, name), value) for name, value in group.items())


def of_state(state: Mapping[str, Any]) -> Entries:
    """Return the entries of a full state."""
    # A state does not say which of its entries are buffers.
    entries: Entries = {Entry(kind, fqn): t for kind in ("parameter", "buffer") for fqn, t in state["model"].items()}
    optimizer = state.get("optimizer") or {"state": {}, "param_groups": ()}
    for fqn, parts in (optimizer.get("state") or {}).items():
        entries |= {Entry("state", fqn, part): value for part, value in parts.items()}
    for group in optimizer["param_groups"]:
        if "params" not in group:
            raise InvalidImplementation(
                "full_optimizer_state: expected groups with the names of their parameters (`params`), got "
                f"{sorted(group)}. Correct the adapter ({page('docs/adapters.md')})."
            )
        settings = {name: value for name, value in group.items() if name != "params"}
        entries |= dict(of_settings(dict.fromkeys(group["params"], settings)))
    entries |= dict(_of_schedule(state.get("schedule", {})))
    return entries | {Entry("random numbers", f"of {rank}"): value for rank, value in state.get("random", {}).items()}


def _of_schedule(schedule: Mapping[str, Any]) -> Iterator[tuple[Entry, Any]]:
    yield from ((Entry("schedule", "the schedule", name), value) for name, value in schedule.items())


def first_difference(expected: Entries, actual: Entries) -> str:
    """Return the first entry that is not equal to the bit, with both numbers; empty if all are."""
    for entry, wanted in expected.items():
        if entry not in actual:
            return f"{entry} is missing"
        got = actual[entry]
        if entry.kind in ("state", "setting", "schedule") and not _both_tensors(got, wanted):
            got, wanted = _number(got), _number(wanted)
        if text := _difference(got, wanted):
            return f"{entry}{text}"
    return ""


def _both_tensors(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)


def _number(value: Any) -> Any:
    """Return the value of an entry: some implementations store counters as numbers, others as 0-dim tensors."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else value
    # A list and a tuple are equal here.
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _difference(got: Any, wanted: Any) -> str:
    if _both_tensors(got, wanted):
        return difference_in_bits(got, wanted)
    same = not isinstance(got, torch.Tensor) and not isinstance(wanted, torch.Tensor) and bool(got == wanted)
    return "" if same else f": got {got!r:.60}, expected {wanted!r:.60}"
