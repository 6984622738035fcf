"""How much memory full parameters take at once in a step, by the rules by which each library gathers and frees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fsdp_ref.plan.traffic import KEEPS_GATHERED, gathered_bytes

if TYPE_CHECKING:
    from fsdp_ref.plan.unit_layouts import UnitLayout


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
