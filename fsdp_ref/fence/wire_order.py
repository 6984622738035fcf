"""Compares ranks after each backward: for which units they communicated, in which order, and how forward edited.

Collectives pair by their order alone. Ranks that run different units of equal size gather each other's parameters and add
up each other's gradients, and nothing fails. Each rank therefore notes for whom it communicates. When the last reduction of
a backward pass is under way, a fingerprint of the notes follows it: 16 bytes over each group. Gathers are compared within
the shard group, which they travel over: replicas may evaluate alone. Reductions, and what a forward changed of its own
parameters (see ``handle.writeback``), are compared over both groups, and what a shard group knows its replicas hear.

An edit by way of ``.data`` raises no counter: the part of the buffer that this rank owns is compared with its shard, on the
device, and a difference is told with the same fingerprint.

Nothing here reads a value before :meth:`WireOrder.finish`, so that no host waits for its device.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ref.comm.collectives import Pending, collectives_for, gather_objects
from fsdp_ref.errors import ExecutionOrderError, ParametersChangedError, listing
from fsdp_ref.runtime.execution_order import ExecutionOrder
from fsdp_ref.runtime.guards import Guard, Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsdp_ref.comm.streams import Later, Streams
    from fsdp_ref.handle.flat_handle import FlatHandle
    from fsdp_ref.runtime.root import Root
    from fsdp_ref.runtime.unit import Unit

GATHER: Final = Traffic.GATHER
REDUCE: Final = Traffic.REDUCE
EDIT: Final = 2
_KINDS: Final = ("gathers the parameters", "reduces the gradients", "changes parameters in forward")
_KEPT: Final = 1 << 14
"""As many notes are compared: more than one step makes, and evaluations that no backward follows take no memory."""
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ALARM: Final = 0x5BD1E995
"""Added to the fingerprint of a rank that knows of a problem: others of its group then differ from it."""


@dataclass(slots=True, eq=False)
class _Comparison:
    """What one group compares after one backward pass.

    Attributes:
        group: the ranks; None for this rank alone, which has no other rank to compare with.
        own: this rank's fingerprint, without what it heard from another group.
        notes: what it is a fingerprint of.
        sent: the largest fingerprint of all ranks, and minus the smallest.
        expected: what ``sent`` is if all are equal.
    """

    group: dist.ProcessGroup | None
    own: Tensor
    notes: list[tuple[Unit, int]]
    sent: Tensor | None = None
    expected: Tensor | None = None
    pending: Pending | None = None

    def issue(self, alarm: Tensor | None) -> None:
        """Send it. ``alarm`` is whether another group of this rank found a problem."""
        if self.group is None:
            return
        mine = self.own if alarm is None else self.own + alarm * _ALARM
        self.expected = torch.stack([mine, -mine])
        self.sent = self.expected.clone()
        self.pending = collectives_for(self.group, mine.device).all_reduce(
            self.sent, self.group, "order of units", op="max"
        )

    def differs(self) -> Tensor:
        """Return whether ranks differ, once the maximum has arrived; the host does not wait for a device."""
        if self.pending is None or self.sent is None or self.expected is None:
            return torch.zeros((), dtype=torch.bool, device=self.own.device)
        self.pending.wait()
        return self.sent.ne(self.expected).any()


@dataclass(frozen=True, slots=True, eq=False)
class _Settled:
    """The comparisons of one backward pass, and whether each found a difference (last: whether this rank lost an edit)."""

    comparisons: list[_Comparison]
    marks: dict[Unit, Tensor]
    data_edits: dict[Unit, Tensor]
    verdict: Later


@dataclass(frozen=True, slots=True, eq=False)
class Mismatch:
    """What ranks did differently.

    Attributes:
        error: the message.
        units: those whose gradients are mixed up, on every rank that has this.
    """

    error: ExecutionOrderError | ParametersChangedError
    units: list[Unit]


class WireOrder:
    """What the units of one tree communicated since ranks were last compared.

    Attributes:
        notes: (unit, ``GATHER``, ``REDUCE`` or ``EDIT``), in the order of issue.
        marks: fingerprints of what forward made of a unit's own parameters.
        data_edits: whether forward changed a unit's parameters in a way that cannot be kept.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.notes: deque[tuple[Unit, int]] = deque(maxlen=_KEPT)
        self.marks: dict[Unit, Tensor] = {}
        self.data_edits: dict[Unit, Tensor] = {}
        self._units = [unit for unit in units if not unit.handle.empty]
        self._open: list[_Comparison] = []
        self._edits: tuple[dict[Unit, Tensor], dict[Unit, Tensor]] = {}, {}
        self._settled: list[_Settled] = []
        # Units are numbered within each group, since ranks outside of it may have others.
        self._numbers: dict[dist.ProcessGroup, dict[Unit, int]] = {}
        for unit in self._units:
            for group in (unit.config.groups.shard, unit.config.groups.replicate):
                if group is not None and group.size() > 1:
                    numbers = self._numbers.setdefault(group, {})
                    numbers[unit] = len(numbers)

    def start(self, device: torch.device) -> None:
        """Send the fingerprint to the first group, when anything was reduced.

        Collectives:
            A maximum of two 64-bit integers over each group of several ranks. All ranks must call.
        """
        if all(kind != REDUCE for _, kind in self.notes):
            return
        for group, numbers in self._numbers.items():
            notes = [
                (unit, kind)
                for unit, kind in self.notes
                if unit in numbers and (kind != GATHER or unit.config.groups.shard is group)
            ]
            codes = array("Q", [4 * numbers[unit] + kind for unit, kind in notes])
            self._open.append(_Comparison(group, self._fingerprint(codes, numbers, device), notes))
        if not self._open and self.data_edits:
            self._open.append(_Comparison(None, self._fingerprint(array("Q"), {}, device), []))
        self._edits, self.marks, self.data_edits = (self.marks, self.data_edits), {}, {}
        self.notes.clear()
        if self._open:
            self._open[0].issue(None)

    def _fingerprint(self, codes: array[int], numbers: dict[Unit, int], device: torch.device) -> Tensor:
        mine = int.from_bytes(blake2b(codes.tobytes(), digest_size=7).digest())
        # Filled by a kernel: a copy from the host would wait for what the device has yet to do.
        own = torch.full((), mine, dtype=torch.int64, device=device)
        for unit, number in numbers.items():
            if unit in self.marks:
                own += self.marks[unit] * (2 * number + 1)
            if unit in self.data_edits:
                own += self.data_edits[unit] * (_ALARM + 2 * number)
        return own

    def settle(self, streams: Streams) -> Tensor | None:
        """Wait for what :meth:`start` sent; return whether there is a problem, on the device. None when nothing was sent.

        Collectives:
            The maxima over the other groups.
        """
        if not self._open:
            return None
        comparisons, self._open = self._open, []
        (marks, data_edits), self._edits = self._edits, ({}, {})
        differences: list[Tensor] = []
        own = [flag.any() for flag in data_edits.values()]
        alarm = torch.stack(own).any() if own else None
        for index, each in enumerate(comparisons):
            if index:
                each.issue(alarm)
            differences.append(each.differs())
            alarm = differences[-1] if alarm is None else alarm | differences[-1]
        differences.append(torch.stack(own).any() if own else torch.zeros_like(differences[0]))
        verdict = torch.stack(differences)
        self._settled.append(_Settled(comparisons, marks, data_edits, streams.read_later(verdict)))
        return verdict.any()

    def finish(self) -> Mismatch | None:
        """Read what was settled; return what is wrong, on every rank of the groups concerned.

        Collectives:
            One object gather over each group in which ranks differ, which all of its ranks know by then.
        """
        settled, self._settled = self._settled, []
        for each in settled:
            differs = each.verdict.values()
            if any(differs):
                return self._explain(each, differs)
        return None

    def _explain(self, settled: _Settled, differs: list[bool]) -> Mismatch:
        orders: dict[str, None] = {}
        changed: dict[str, None] = {}
        lost: dict[str, None] = {_name(unit): None for unit, flag in settled.data_edits.items() if flag.any()}
        groups: list[dist.ProcessGroup] = []
        # All groups before the error: ranks of one group may belong to different others, which wait for them.
        for each, is_different in zip(settled.comparisons, differs):
            if each.group is None or not (is_different or differs[-1]):
                continue
            groups.append(each.group)
            mine = [f"{_KINDS[kind]} of {_name(unit)}" for unit, kind in each.notes]
            marks = {_name(unit): int(mark) for unit, mark in settled.marks.items()}
            per_rank = gather_objects((mine, marks, list(orders), list(changed), list(lost)), each.group)
            for _, _, their_orders, their_changed, their_lost in per_rank:
                orders.update(dict.fromkeys(their_orders))
                changed.update(dict.fromkeys(their_changed))
                lost.update(dict.fromkeys(their_lost))
            if any(each_notes != per_rank[0][0] for each_notes, *_ in per_rank):
                ranks = dist.get_process_group_ranks(each.group)
                orders[_first_difference([each_notes for each_notes, *_ in per_rank], ranks)] = None
            else:
                their_marks = [each_marks for _, each_marks, *_ in per_rank]
                names = sorted({name for each_marks in their_marks for name in each_marks})
                changed.update({n: None for n in names if len({each_marks.get(n) for each_marks in their_marks}) > 1})
        concerned = [
            u for u in self._units if not groups or {u.config.groups.shard, u.config.groups.replicate} & {*groups}
        ]
        return Mismatch(_error(list(orders), list(changed), list(lost)), concerned)

    def abandon(self) -> None:
        """Forget what is under way: the backward pass failed."""
        self._open.clear()


def _error(orders: list[str], changed: list[str], lost: list[str]) -> ExecutionOrderError | ParametersChangedError:
    if lost:
        return ParametersChangedError(
            f"Parameters were changed without being counted: expected the gathered full parameters of "
            f"{listing(lost)}, or in-place edits of them, got others at the end of forward (an edit through .data, "
            "or of a sharded parameter's .data while it was gathered). It would be lost on some ranks. Edit the parameter "
            "itself, "
            "in place, under torch.no_grad(), with the same values on all ranks."
        )
    if changed and not orders:
        return ParametersChangedError(
            "Ranks changed parameters differently in forward: expected the same values on all ranks, got others in "
            f"{listing(changed)}. Each rank kept its own values of its part. Edit a parameter with values that all "
            "ranks share (reduce statistics of a batch over ranks first), or keep it in a buffer."
        )
    return ExecutionOrderError(
        "Ranks ran different units, whose collectives paired by their order alone: expected one order on all "
        f"ranks, got {listing(orders)}. Parameters and gradients of these units are mixed up. Make control flow "
        "in forward independent of the rank."
    )


def _name(unit: Unit) -> str:
    return repr(unit.name) if unit.name else "the root"


def _first_difference(per_rank: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """Name the first collective at which a rank did something other than the first rank."""
    first = per_rank[0]
    places = [
        (next((i for i, (one, two) in enumerate(zip(first, each)) if one != two), min(len(first), len(each))), rank)
        for rank, each in enumerate(per_rank)
        if each != first
    ]
    place, rank = min(places)
    did = [each[place] if place < len(each) else "does nothing more" for each in (first, per_rank[rank])]
    return f"rank {ranks[0]} {did[0]} where rank {ranks[rank]} {did[1]} (collective {place} since the last backward)"


class RankComparison(Guard):
    """Refuses gradients of ranks that did different things.

    On CPU the end of backward raises. An accelerator has yet to compute whether ranks differ, and the host would stop for it:
    there gradients of such a pass become NaN on the device, and the next forward or summon raises, so that no step with them
    goes unnoticed. It waits for the copy that begins here, hence for this backward, and not for the optimizer's step.

    Args:
        root: the tree.

    Attributes:
        wire_order: what this rank sent since ranks were last compared.
        reads_late: the host learns at the next forward only whether ranks did the same.
    """

    def __init__(self, root: Root) -> None:
        super().__init__(root)
        self.wire_order = WireOrder(root.units)
        self.reads_late = root.unit.config.device.type != "cpu" and not root.offloads

    def sends(self, unit: Unit, traffic: Traffic) -> None:
        """Note it."""
        self.wire_order.notes.append((unit, traffic))

    def edits_kept(self, unit: Unit, edited: Sequence[int]) -> None:
        """Note a fingerprint of the edited parameters, in full, as all ranks have them."""
        handle = unit.handle
        views = handle.compute_views()
        mark = torch.zeros((), dtype=torch.int64, device=views[0].device)
        for index in edited:
            mark = mark * 31 + _fingerprint(views[index]) * (2 * index + 1)
        self.wire_order.notes.append((unit, EDIT))
        known = self.wire_order.marks.get(unit)
        self.wire_order.marks[unit] = mark if known is None else known * 31 + mark

    def unit_ends(self, unit: Unit) -> None:
        """Note whether its parameters were changed in a way that cannot be kept."""
        handle = unit.handle
        # Offloaded shards would have to be fetched: there only what raises a counter is noticed.
        if not handle.needs_buffer or handle.shard_S.device != handle.config.device:
            return
        differs = _differs(handle)
        known = self.wire_order.data_edits.get(unit)
        self.wire_order.data_edits[unit] = differs if known is None else known.logical_or_(differs)

    def reductions_issued(self) -> None:
        """Send the first fingerprint behind them."""
        self.wire_order.start(self.root.unit.config.device)

    def gradients_ready(self) -> None:
        """Compare, or begin to where the host must not wait.

        Raises:
            ExecutionOrderError, ParametersChangedError: See :meth:`tree_used`.
        """
        problem = self.wire_order.settle(self.root.streams)
        if not self.reads_late:
            self.tree_used()
        elif problem is not None:
            for unit in self.root.in_pass:
                unit.handle.grads.spoil(problem)

    def tree_used(self) -> None:
        """Read what was compared at the end of backward passes.

        Raises:
            ExecutionOrderError: ranks communicated for different units; on every rank of the groups concerned.
            ParametersChangedError: forward changed parameters in a way that cannot be kept.

        Collectives:
            One object gather over each group in which ranks differ, which all of its ranks know by then.
        """
        mismatch = self.wire_order.finish()
        if mismatch is None:
            return
        # Ranks recorded different orders, and would gather ahead what others do not.
        self.root.order = ExecutionOrder()
        # Not only those of this rank's pass: a parameter must not have a gradient on some of its ranks only.
        for unit in mismatch.units:
            unit.handle.grads.forget()
        for unit in {**self.root.in_pass, **dict.fromkeys(mismatch.units)}:
            unit.handle.grads.publish()
        raise mismatch.error

    def backward_failed(self) -> None:
        """Forget what was sent."""
        self.wire_order.abandon()


def _bits(flat: Tensor) -> Tensor:
    return flat.view(_INTEGERS.get(flat.element_size(), torch.int64))


def _fingerprint(view: Tensor) -> Tensor:
    """Return a number that depends on all bits of a tensor and on their places, on its device."""
    if not view.numel():
        return torch.zeros((), dtype=torch.int64, device=view.device)
    rows = _bits(view.contiguous().reshape(-1)).reshape(view.shape[0] if view.dim() else 1, -1)
    sums = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64)
    odd = [torch.arange(1, 2 * len(each), 2, device=view.device) for each in sums]
    return (sums[0] * odd[0]).sum() * 31 + (sums[1] * odd[1]).sum()


def _differs(handle: FlatHandle) -> Tensor:
    """Return whether the part of the full buffer that this rank owns is another than its shard, bit by bit."""
    span = handle.shard_map.shard_span(handle.shard_rank)
    mine = handle.shard_S[: span.numel].to(handle.compute_dtype)
    return _bits(handle.full_F()[span.as_slice()]).ne(_bits(mine)).any()
