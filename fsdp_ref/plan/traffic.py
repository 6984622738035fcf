"""What a training step sends (each collective), and how many bytes of full parameters it holds at once.

Both follow the rules by which the reference, FSDP1 and FSDP2 gather, free and reduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_ref.plan.unit_layouts import UnitLayout


LIBRARIES = ("fsdp_ref", "fsdp1", "fsdp2")
_MARKS_BYTES = 16
KEEPS_GATHERED = frozenset({"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "NO_SHARD"})
"""Strategies by which a unit stays gathered from its forward to its backward."""


@dataclass(frozen=True, slots=True)
class Message:
    """One collective of a step.

    Attributes:
        op: all_gather, reduce_scatter or all_reduce.
        full_bytes: Bytes of the larger side: a gather's output, a reduction's input.
        ranks: That take part.
    """

    op: str
    full_bytes: int
    ranks: int

    @property
    def link_bytes(self) -> float:
        """What a rank sends in a ring, and receives: an all-reduce is a reduce-scatter and a gather."""
        return (2 if self.op == "all_reduce" else 1) * self.full_bytes * (self.ranks - 1) / self.ranks


def messages(
    units: Sequence[UnitLayout], *, strategy: str, replicas: int, library: str = "fsdp_ref"
) -> tuple[Message, ...]:
    """Return the collectives of one step without accumulation; gathers that are prefetched come sooner than here.

    On one rank FSDP2 issues none, and the others reduce gradients over it.

    Args:
        units: In the order of their forward; the root, whose name is empty, stays gathered until its backward.
        strategy: Strategy of each unit.
        replicas: Number of groups of ranks that shard.
        library: One of `LIBRARIES`.
    """
    return tuple(_messages(units, strategy, replicas, library))


def _messages(units: Sequence[UnitLayout], strategy: str, replicas: int, library: str) -> Iterator[Message]:
    alone = bool(units) and replicas * units[0].shards.world_size == 1
    if alone and library == "fsdp2":
        return
    if alone:
        strategy = "NO_SHARD"
    # Without shards what is reduced is padded to the ranks of the group all the same.
    multiple = replicas if strategy == "NO_SHARD" else 1
    sized = [(unit, gathered_bytes(unit, library=library, multiple=multiple)) for unit in units]
    shards = units[0].shards.world_size if units else 1
    if shards > 1:
        yield from (Message("all_gather", size, shards) for _, size in sized)
    for unit, size in reversed(sized):
        if shards > 1 and unit.name and strategy not in KEEPS_GATHERED:
            yield Message("all_gather", size, shards)
        if shards > 1:
            yield Message("reduce_scatter", size, shards)
        if replicas > 1 or alone:
            yield Message("all_reduce", size // shards, replicas)
    if library == "fsdp_ref":
        yield from (Message("all_reduce", _MARKS_BYTES, ranks) for ranks in (shards, replicas) if ranks > 1)


def gathered_bytes(unit: UnitLayout, *, library: str, multiple: int = 1) -> int:
    """Return the bytes of a unit's full parameters as they are gathered: with padding, to a `multiple` of elements."""
    ranks, layout = unit.shards.world_size, unit.shards.layout
    if library == "fsdp2":  # cuts each parameter into equal numbers of rows
        rows = [(param.shape[0] if param.shape else 1, math.prod(param.shape[1:])) for param in layout.params]
        return unit.element_bytes * sum(-(-count // ranks) * ranks * numel for count, numel in rows)
    return unit.element_bytes * (-(-unit.shards.padded_numel // multiple) * multiple)


def step_seconds(
    traffic: Sequence[Message], elements: int, *, tokens: int, link_bytes: float, flops: float
) -> tuple[float, float]:
    """Return seconds of computation and of communication of one step on one rank, at these rates.

    Args:
        traffic: Traffic of the step.
        elements: Elements of all parameters; each costs two operations a token in forward, and four in backward.
        tokens: Tokens of one rank.
        link_bytes: Bytes per second, in each direction.
        flops: Operations a second.
    """
    return 6 * elements * tokens / flops, sum(message.link_bytes for message in traffic) / link_bytes


def peak_bytes(
    units: Sequence[UnitLayout], *, strategy: str, library: str = "fsdp_ref", has_streams: bool = False
) -> int | None:
    """Return the most bytes of full parameters in any step but the first, in which the order of units is not known yet.

    The reference and FSDP1 gather the next unit while one computes. On a device with streams the reference also keeps the
    unit before, which kernels may still read. FSDP2 copies parameters out of what it gathered, and keeps that until the
    next unit was copied out. One rank gathers nothing.

    Args:
        units: In the order of their forward; the root, whose name is empty, stays gathered until its backward.
        strategy: Strategy of each unit.
        library: As `messages` knows them.
        has_streams: Whether it is on a device with streams; on the CPU there are none.

    Returns:
        None where a unit lies inside another that is not the root: when that is freed depends on the model.
    """
    names = {unit.name for unit in units}
    if any(outer in names for name in names for outer in _modules_around(name)):
        return None
    if strategy == "NO_SHARD" or (library != "fsdp2" and units[0].shards.world_size == 1):
        return 0  # what a rank keeps is whole
    sizes = {unit.name: gathered_bytes(unit, library=library) for unit in units}
    keeps = strategy in KEEPS_GATHERED
    if library == "fsdp2":
        return _copied_out(sizes, keeps=keeps, through_buffer=units[0].shards.world_size > 1)
    if keeps:
        return sum(sizes.values())
    root, parts = sizes.pop("", 0), list(sizes.values())
    together = 3 if has_streams and library == "fsdp_ref" else 2
    return root + max((sum(parts[start : start + together]) for start in range(len(parts))), default=0)


def _copied_out(sizes: dict[str, int], *, keeps: bool, through_buffer: bool) -> int:
    peak = kept = before = 0
    for name, size in sizes.items():
        gathered = size if through_buffer else 0
        peak = max(peak, kept + before + gathered + size)
        before = gathered
        kept += size if keeps or not name else 0
    return peak


def _modules_around(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
