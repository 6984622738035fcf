"""Is a rank after a job as it was before? A snapshot says what is not, and puts back what can be put back.

Cheap comparisons come first: a job that leaves nothing behind pays for reading some hundred values twice. Only a
difference is examined, named and undone. Random generators are not compared: every job starts from seeds, so that a
test draws the same numbers alone, in any order, and on a kept or a new rank.
"""

from __future__ import annotations

import gc
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_testing.base import compat
from fsdp_testing.ranks.pool import hygiene_names, hygiene_process, hygiene_python, hygiene_torch
from fsdp_testing.ranks.pool.dirt import Dirt
from fsdp_testing.ranks.pool.hygiene_probe import Probe

PROBES: tuple[Probe, ...] = (
    hygiene_process.LIMITS,  # first: with a limit put back, more can be read
    *hygiene_python.PROBES,
    *hygiene_torch.PROBES,
    *hygiene_names.PROBES,  # after settings that hold a name too: `torch.Storage` follows the default dtype
    *hygiene_process.PROBES,
)
# What is nobody's concern after a call whose process ends with it: all but what ends badly, or not at all, with the process.
ENDS_WITH_PROCESS = frozenset(probe.kind for probe in PROBES) - {
    "process group",
    "child process",
    "thread",
    "temporary file",
}
_READERS = tuple(probe.read for probe in PROBES)


def seed_generators(seed: int) -> None:
    """Seed Python's, numpy's (when imported) and torch's generators.

    Every rank gets the same seed: a model built from it starts equal on all ranks, as with one process. A test that
    wants other numbers on each rank adds the rank to a seed of its own.
    """
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


class Snapshot:
    """The state of this process at one moment; `restore` compares with the present."""

    def __init__(self, ignore: frozenset[str] = frozenset()) -> None:
        self._ignore = ignore
        self._values: list[Any] = [read() for read in _READERS]

    def restore(self) -> tuple[Dirt, ...]:
        """Put back what differs and name it.

        Returns:
            One record for each difference; `restored` is False for what only a new process is free of.
        """
        try:
            now = [read() for read in _READERS]
        except Exception:
            now = [_read(probe) for probe in PROBES]
        if now == self._values:
            return ()
        return tuple(self._examine(now))

    def accept(self, before: Snapshot, after: Snapshot) -> None:
        """Take over what changed between two other snapshots: it is to stay."""
        for i, (old, new) in enumerate(zip(before._values, after._values, strict=True)):
            if old != new:
                self._values[i] = new

    def _examine(self, now: list[Any]) -> list[Dirt]:
        suspects = [i for i, (old, new) in enumerate(zip(self._values, now, strict=True)) if old != new]
        suspects = [i for i in suspects if PROBES[i].kind not in self._ignore]
        if any(PROBES[i].collect_first for i in suspects):
            gc.collect()
        dirt: list[Dirt] = []
        for i in suspects:
            value = _read(PROBES[i])
            if isinstance(value, _Unreadable):
                dirt.append(Dirt(PROBES[i].kind, f"can no longer be read ({value.why})", restored=False))
            elif value != self._values[i]:
                dirt.extend(_clean(PROBES[i], self._values[i], value))
        if any(PROBES[i].kind == "process group" for i in suspects):
            compat.forget_dtensor_layouts()
            # A group holds its connections open, for a while also after it was destroyed; the group itself is reported.
            dirt = [entry for entry in dirt if not (entry.kind == "open file" and entry.what.endswith("]"))]
        return dirt


@dataclass(frozen=True, slots=True)
class _Unreadable:
    why: str


def _read(probe: Probe) -> Any:
    try:
        return probe.read()
    except Exception as error:
        return _Unreadable(type(error).__name__)


def _clean(probe: Probe, before: Any, now: Any) -> list[Dirt]:
    texts = list(probe.describe(before, now))
    if not texts:
        return []
    if probe.put_back is None:
        return [Dirt(probe.kind, text, restored=False) for text in texts]
    try:
        probe.put_back(before, now)
    except Exception as error:
        return [Dirt(probe.kind, f"{text}; putting it back failed: {error}", restored=False) for text in texts]
    # Described again after the repair: what still differs could not be put back.
    left = set(probe.describe(before, probe.read()))
    return [Dirt(probe.kind, text, restored=text not in left) for text in texts]


def take_snapshot(seed: int | None = 0, ignore: frozenset[str] = frozenset()) -> Snapshot:
    """Record the state of this process, and seed its generators unless `seed` is None; kinds in `ignore` may change."""
    if seed is not None:
        seed_generators(seed)
    return Snapshot(ignore)
