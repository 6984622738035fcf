"""Full parameters shown to users, and how their edits are kept.

The full parameters are gathered in full precision into a buffer of their own, whatever state the unit is in, so that a
unit which stays unsharded between forward and backward is not disturbed. Edits survive however they were made: in
place, by ``.data =``, or by putting another parameter on the module.

All refusals come before the first collective, on every rank alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_ref import compat
from fsdp_ref.access.summon_grads import FullGradients
from fsdp_ref.annotations import unit_of, units_under
from fsdp_ref.config import ShardingStrategy
from fsdp_ref.errors import (
    SharedParameterError,
    UnshardConflictError,
    UnsupportedError,
    WritebackError,
    listing,
)
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.originals import Shown
from fsdp_ref.handle.writeback import absorb_params
from fsdp_ref.runtime.root import close_ended, lazy_init
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import READABLE, ReshardReason, UnitState
from fsdp_ref.storage.views import flat_views


@dataclass(frozen=True, slots=True)
class SummonOptions:
    """The user's options; all fields but the last are arguments of ``summon_full_params``.

    Attributes:
        gather: fill the parameters. Without it nothing is sent: the parameters have only their full shapes, for a caller that
            reads the shard and, with ``writeback``, writes to it.
    """

    recurse: bool = True
    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False
    gather: bool = True


@contextmanager
def summon(module: nn.Module, options: SummonOptions) -> Iterator[None]:
    """Show full parameters of the units at or below ``module`` while the context lasts.

    Raises:
        UnshardConflictError: a unit runs forward or backward, or its parameters are already summoned.
        UnsupportedError: options that exclude one another.

    Collectives:
        With ``gather`` one all-gather per sharded unit over its shard group, with ``with_grads`` up to two more; at the end,
        with ``writeback`` and ``rank0_only``, broadcasts. All ranks must enter and leave.
    """
    if options.recurse:
        units = list(dict.fromkeys(unit for _, _, unit in units_under(module)))
    else:
        own = unit_of(module)
        units = [] if own is None else [own]
    for unit in units:
        close_ended(unit)
    _check(units, options)
    for unit in units:
        # Before the first summon: cleaning up after a failed pass frees the full parameters of every unit of the tree.
        root = lazy_init(unit)
        root.recover()
        for look in root.guards.tree_used:
            look()
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(_summoned(unit, options))
        yield


def _check(units: list[Unit], options: SummonOptions) -> None:
    if options.offload_to_cpu and not options.rank0_only:
        warnings.warn(
            "offload_to_cpu=True and rank0_only=False may result in the unsharded parameters being redundantly copied "
            "to CPU by every rank of one host. Pass rank0_only=True where one copy suffices.",
            UserWarning,
            stacklevel=5,
        )
    if options.with_grads and (options.offload_to_cpu or not all(unit.config.use_orig_params for unit in units)):
        raise UnsupportedError(
            f"with_grads=True: expected use_orig_params=True and offload_to_cpu=False, got offload_to_cpu="
            f"{options.offload_to_cpu} and use_orig_params="
            f"{listing(sorted({unit.config.use_orig_params for unit in units}))}. Gradients are shown on the originals only."
        )
    extended = [unit.name or "the root" for unit in units if unit.handle.originals.extended]
    if options.with_grads and extended:
        raise UnsupportedError(
            f"with_grads=True: expected plain parameters, got parts of larger ones (tensor parallelism) in {listing(extended)}. "
            "Read .grad outside of the context: this rank's piece of its part."
        )
    for unit in units:
        refuse_running(unit)
        if unit.state is UnitState.SUMMONED:
            raise UnshardConflictError(
                "Cannot manually unshard parameters when already unsharding parameters: expected a unit without "
                f"summoned parameters, got {unit!r}. Use the surrounding context."
            )


def refuse_running(unit: Unit) -> None:
    """Refuse a unit whose forward or backward is under way.

    Raises:
        UnshardConflictError: It is.
    """
    busy = compat.in_backward() and unit.root is not None and unit.root.in_backward()
    if unit.state is UnitState.FORWARD or busy:
        raise UnshardConflictError(
            "Cannot manually unshard parameters during forward/backward: expected an idle unit, got "
            f"{unit!r} while it runs. Summon, save or load before or after."
        )


@contextmanager
def _summoned(unit: Unit, options: SummonOptions) -> Iterator[None]:
    summoned = _Summoned(unit, unit.handle, options)
    summoned.prepare()
    resumes = unit.state
    unit.life.move(UnitState.SUMMONED, unit.name)
    try:
        summoned.show()
        try:
            yield
        finally:
            summoned.keep_edits(resumes)
    finally:
        # The unit's own buffer was left alone, so its gathered values stay valid.
        unit.life.move(resumes, unit.name)
        summoned.close()


class _Summoned:
    """One unit's full parameters while a user has them; tensors that the user keeps stay valid copies."""

    def __init__(self, unit: Unit, handle: FlatHandle, options: SummonOptions) -> None:
        self._unit = unit
        self._handle = handle
        self._options = options
        self._full_F = handle.shard_S
        self._views: list[Tensor] = []
        self._shown: list[nn.Parameter] = []
        self._grads: FullGradients | None = None
        self._was_full = False
        # Versions before, and counters of the shown tensors, to find the edited parameters.
        self._before: list[int] = []
        self._counted: list[int] = []

    @property
    def _visible(self) -> bool:
        return not self._options.rank0_only or self._handle.shard_rank == 0

    def prepare(self) -> None:
        """Take over what users changed, before the unit's own buffer is left alone."""
        handle = self._handle
        handle.grads.absorb()
        absorb_params(handle)
        partly = self._options.writeback and not self._options.gather
        if partly or handle.state is UnitState.GATHERING or handle.compute_dtype != handle.precision.original:
            # A low-precision copy would be out of date after an edit, as a whole one after an edit of this rank's elements
            # alone: later compute gathers again.
            self._unit.reshard(ReshardReason.OUT_OF_DATE)

    def show(self) -> None:
        """Gather and show."""
        handle = self._handle
        self._was_full = handle.originals.shown is Shown.FULL
        handle.originals.show_sharded()
        self._full_F = self._gather()
        self._before = handle.versions.now()
        if self._options.with_grads:
            self._grads = FullGradients(handle)
            self._grads.gather()
        if not self._visible:
            if not self._options.writeback and handle.sharded:
                # With writeback the buffer is kept: it receives rank 0's edits.
                self._full_F = handle.shard_S
            return
        if self._options.gather or not handle.sharded:
            self._views = flat_views(self._full_F, handle.layout)
        else:  # only shapes, over one element
            self._views = [self._full_F[0].expand(spec.shape) for spec in handle.layout.params]
        self._shown = handle.originals.show_summoned(self._views)
        self._counted = [compat.version_of(param) for param in self._shown]
        if self._grads is not None:
            self._grads.show(self._shown)

    def _gather(self) -> Tensor:
        handle = self._handle
        device = torch.device("cpu") if self._options.offload_to_cpu else handle.config.device
        if not handle.sharded:
            # The shard is the whole parameter. With NO_SHARD users edit it itself, whatever ``writeback`` says, as in
            # torch; a hybrid unit whose shard group has one rank keeps the promise that ``writeback=False`` discards, and
            # so does what is shown on the CPU, where a copy is what every other device gives (torch refuses that).
            whole = handle.shard_S.to(device)
            itself = handle.config.strategy is ShardingStrategy.NO_SHARD and not self._options.offload_to_cpu
            return whole if self._options.writeback or itself else whole.clone()
        if self._options.gather:
            return handle.gathered_copy(handle.shard_S.dtype).to(device)
        return torch.empty(1, dtype=handle.shard_S.dtype, device=device)

    def keep_edits(self, resumes: UnitState) -> None:
        """Write the user's values to the shard, and to the unit's own buffer if that is filled."""
        handle = self._handle
        problem: Exception | None = None
        edited: list[int] = []
        if self._visible:
            try:
                edited = self._collect()
            except (WritebackError, SharedParameterError) as error:
                problem = error
        keeps = self._options.writeback and problem is None
        if keeps and self._options.rank0_only:
            edited = self._broadcast(edited)
        changed = edited if keeps or self._full_F is handle.shard_S else ()
        if keeps:
            with torch.no_grad():
                if not self._options.gather:
                    pass  # edits are in the shard already
                elif handle.sharded:
                    span = handle.shard_map.shard_span(handle.shard_rank)
                    handle.shard_S[: span.numel].copy_(self._full_F[span.as_slice()])
                elif self._full_F is not handle.shard_S:
                    handle.shard_S.copy_(self._full_F)
                # After the copies, which raise a flat parameter's counter: a copy without an edit must not count.
                handle.versions.settle(self._before, changed)
                if resumes in READABLE and handle.needs_buffer:
                    handle.full_F().copy_(self._full_F)
                    handle.versions.note_gather()
            handle.streams.gather_after_compute()  # the shard was written to on the current stream just now
            if self._grads is not None:
                self._grads.keep_edits(self._shown)
        else:
            handle.versions.settle(self._before, changed)
        if problem is not None:
            raise problem

    def _collect(self) -> list[int]:
        """Copy replaced parameters into the buffer, besides edits in place; return the originals that changed."""
        handle = self._handle
        replaced: dict[int, tuple[str, Tensor]] = {}
        bad: list[str] = []
        for fqn, index, value in handle.originals.site_values():
            view = self._views[index]
            if not isinstance(value, Tensor):
                bad.append(f"{fqn}: {type(value).__name__}")
                continue
            plain = handle.originals.plain(index, value)
            if value is not self._shown[index] or plain.data_ptr() != view.data_ptr():
                if plain.shape != view.shape:
                    bad.append(f"{fqn}: shape {tuple(plain.shape)} for {tuple(view.shape)}")
                elif index in replaced and replaced[index][1] is not value:
                    raise SharedParameterError(
                        f"Changing shared parameters is not supported yet: {fqn} and {replaced[index][0]} were one "
                        "parameter and got different values. Set both to the same parameter."
                    )
                else:
                    replaced[index] = (fqn, value)
        if bad:
            raise WritebackError(
                f"Cannot writeback when the parameter shape changes ({handle.name!r}): expected a tensor of the "
                f"parameter's full shape at each place, got {listing(bad)}. Edit in place, or assign the same shape."
            )
        with torch.no_grad():
            for index, (_, value) in replaced.items():
                if value.numel():
                    self._views[index].copy_(handle.originals.plain(index, value).detach())
        in_place = [i for i, param in enumerate(self._shown) if compat.version_of(param) != self._counted[i]]
        return sorted({*replaced, *in_place})

    def _broadcast(self, edited: list[int]) -> list[int]:
        """Give every rank rank 0's values of the parameters, and return which ones it edited.

        First to the replicas, then within the shard group.
        """
        handle = self._handle
        flags = torch.zeros(len(handle.fqns), dtype=torch.uint8, device=handle.config.device)
        flags[edited] = 1
        for group in (handle.groups.replicate, handle.groups.shard):
            if group is not None and group.size() > 1 and not handle.empty:
                flat = self._full_F.to(handle.config.device)
                handle.collectives.broadcast(flat, 0, group, handle.name).wait()
                handle.collectives.broadcast(flags, 0, group, handle.name).wait()
                self._full_F = flat
        return [index for index, flag in enumerate(flags.tolist()) if flag]

    def close(self) -> None:
        """Show and free as before."""
        handle = self._handle
        if self._grads is not None:
            self._grads.close(self._shown)
        handle.originals.show_sharded()
        if self._was_full and handle.unsharded and all(p.grad is None for p in handle.originals.params):
            handle.originals.show_full()
