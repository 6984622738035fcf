"""Do all ranks communicate for the same units, in the same order?

Collectives pair by their order alone. Ranks that run different units of equal size gather each other's parameters and add
up each other's gradients, and nothing fails. Each rank therefore notes for whom it communicates. When the last reduction of
a backward pass is under way, a fingerprint of the notes follows it: 16 bytes over each group, waited for with the
reductions and before users get their gradients.
"""

from __future__ import annotations

from array import array
from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ref.comm.collectives import SILENT, Pending, collectives_for, gather_objects
from fsdp_ref.errors import ExecutionOrderError, listing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsdp_ref.runtime.unit import Unit

GATHER: Final = 0
REDUCE: Final = 1
_KINDS: Final = ("gathers the parameters", "reduces the gradients")
_KEPT: Final = 1 << 14
"""As many notes are compared: more than one step makes, and evaluations that no backward follows take no memory."""


class WireOrder:
    """What the units of one tree communicated since ranks were last compared.

    Attributes:
        notes: (unit, ``GATHER`` or ``REDUCE``), in the order of issue.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.notes: deque[tuple[Unit, int]] = deque(maxlen=_KEPT)
        self._open: list[tuple[dist.ProcessGroup, Tensor, Pending, list[int], list[tuple[Unit, int]]]] = []
        # Units are numbered within each group, since ranks outside of it may have others.
        self._numbers: dict[dist.ProcessGroup, dict[Unit, int]] = {}
        for unit in units:
            for group in (unit.config.groups.shard, unit.config.groups.replicate):
                if unit.handle is not None and group is not None and group.size() > 1:
                    numbers = self._numbers.setdefault(group, {})
                    numbers[unit] = len(numbers)

    def start(self, device: torch.device) -> None:
        """Send the fingerprint, when anything was reduced.

        Collectives:
            A maximum of two 64-bit integers over each group of several ranks. All ranks must call.
        """
        if all(kind == GATHER for _, kind in self.notes):
            return
        for group, numbers in self._numbers.items():
            notes = [(unit, kind) for unit, kind in self.notes if unit in numbers]
            codes = array("Q", [2 * numbers[unit] + kind for unit, kind in notes])
            mine = int.from_bytes(blake2b(codes.tobytes(), digest_size=7).digest())
            expected = [mine, -mine]
            sent = torch.tensor(expected, device=device)  # becomes the largest, and minus the smallest
            silent = next(iter(numbers)).config.switches.fake_reduce
            collectives = SILENT if silent else collectives_for(group, device)
            pending = collectives.all_reduce(sent, group, "order of units", op="max")
            self._open.append((group, sent, pending, expected, notes))
        self.notes.clear()

    def finish(self) -> None:
        """Wait for what :meth:`start` sent.

        Raises:
            ExecutionOrderError: Ranks communicated for different units; on every rank of the groups concerned.

        Collectives:
            One object gather over each group in which ranks differ, which all of its ranks know by then.
        """
        problems: list[str] = []
        # All groups before the first error: ranks of one group may belong to different others, which wait for them.
        for group, sent, pending, expected, notes in self._open:
            pending.wait()
            if sent.tolist() != expected:
                mine = [f"{_KINDS[kind]} of {unit.name or 'the root'!r}" for unit, kind in notes]
                problems.append(_first_difference(gather_objects(mine, group), dist.get_process_group_ranks(group)))
        self._open.clear()
        if problems:
            raise ExecutionOrderError(
                "Ranks ran different units, whose collectives paired by their order alone: expected one order on all "
                f"ranks, got {listing(problems)}. Parameters and gradients of these units are mixed up. Make control flow "
                "in forward independent of the rank."
            )

    def abandon(self) -> None:
        """Forget what is under way: the backward pass failed."""
        self._open.clear()


def _first_difference(per_rank: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """Name the first place at which a rank did something else than the first rank."""
    first = per_rank[0]
    places = [
        (next((i for i, (one, two) in enumerate(zip(first, each)) if one != two), min(len(first), len(each))), rank)
        for rank, each in enumerate(per_rank)
        if each != first
    ]
    place, rank = min(places)
    did = [each[place] if place < len(each) else "does nothing more" for each in (first, per_rank[rank])]
    return f"rank {ranks[0]} {did[0]} where rank {ranks[rank]} {did[1]} (collective {place} since the last backward)"
