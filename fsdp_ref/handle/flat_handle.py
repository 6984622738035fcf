"""The flat parameter of a unit: its shard, and the full parameter while that exists.

A handle owns one flat parameter: this rank's shard, and a full buffer that is gathered before computation and freed
after it. Of the states of its unit (``states.UnitState``) it moves through three; asking for the one it is in costs
nothing::

        SHARDED --start_unshard--> GATHERING --finish_unshard--> UNSHARDED --reshard--> SHARDED

A unit without parameters has one too, of no elements: it goes through the same states, sends nothing and shows nothing.

Suffixes: ``_S`` this rank's flat shard with right padding, ``_F`` the flat full buffer with all padding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_ref.comm.collectives import Collectives, Pending, collectives_for
from fsdp_ref.comm.streams import Streams
from fsdp_ref.compat import labelled
from fsdp_ref.config import MixedPrecision, ShardingStrategy, UnitConfig
from fsdp_ref.errors import FsdpRuntimeError, FsdpTypeError
from fsdp_ref.handle.flatten import build_layout, cut_shard, flatten
from fsdp_ref.handle.gradients import Gradients
from fsdp_ref.handle.marked_parameter import DESCRIBERS, FlatParameter, like_flat
from fsdp_ref.handle.originals import Originals, Shown
from fsdp_ref.handle.versions import ParameterVersions
from fsdp_ref.layout import ShardMap
from fsdp_ref.states import READABLE, LifeCycle, UnitState
from fsdp_ref.storage import memory
from fsdp_ref.storage.memory import FlatBuffer
from fsdp_ref.storage.precision import Precision
from fsdp_ref.storage.views import ManagedParam, flat_views, mark_flattened, set_data


class FlatHandle:
    """One flat parameter with its shard, its full buffer and its gradient.

    Args:
        params: the parameters with their places, in flattening order; ``flatten.check_params`` accepts them, or there is none.
        module: the module that the unit shards; a flat parameter shown to users is registered on it.
        config: settings of the unit.
        name: the unit's name, for messages and labels.

    Attributes:
        empty: there are no parameters.
        life: the unit's life cycle, shared with it.
        layout: where each parameter lies in the flat buffer.
        fqns: names of the parameters, relative to the unit's module.
        sharded: whether ranks hold different pieces, so that computing needs a gather.
        shard_S: this rank's shard; the flat parameter's data.
        flat_param: the flat parameter itself.
        full_precision: computing without lowering is asked for (evaluation).
        compute_dtype: the dtype in which the parameters compute now.
        needs_buffer: full parameters are a copy; otherwise the shard is the full parameter and nothing is freed.
        grads: its gradient.
        originals: how users see the parameters.
        versions: whether the parameters were changed since they were gathered.
    """

    def __init__(self, params: Sequence[ManagedParam], module: nn.Module, config: UnitConfig, name: str = "") -> None:
        self.name = name
        self.module = module
        self.config = config
        self.groups = groups = config.groups
        # Without a second rank to shard over, the "shard" is the whole flat parameter.
        self.empty = not params
        no_shard = config.strategy is ShardingStrategy.NO_SHARD or self.empty
        self.shard_size = 1 if no_shard else groups.shard_size
        self.sharded = self.shard_size > 1
        self.shard_rank = 0 if no_shard else groups.rank
        pad_ranks = groups.shard_size if no_shard else self.shard_size
        # Without parameters in no lower precision either: the shard of no elements is the full parameter.
        dtype = torch.float32 if self.empty else params[0].param.dtype
        self.precision = Precision.of(dtype, MixedPrecision() if self.empty else config.mixed_precision)
        aligned = config.use_orig_params and not self.empty
        self.layout = build_layout(params, self.precision.compute if aligned else None, pad_ranks)
        self.shard_map = ShardMap(self.layout, self.shard_size)
        self.fqns = [managed.fqn for managed in params]
        self.collectives: Collectives = collectives_for(groups.shard, config.device)
        # Until a root adopts the unit nothing overlaps: what is gathered before that runs on the current stream.
        self.streams: Streams = Streams()
        self.life = LifeCycle()
        # The gather in flight: set where it is issued, taken by the first waiter. Until then the backend writes to
        # the buffer and reads ``_cast_S``.
        self._pending: Pending | None = None
        # One per dtype, for as long as the original dtype stays: modules, records and autograd hold views of these very storages,
        # which are refilled in place, so a buffer is never exchanged for another while a view of it may be in use.
        self._buffers: dict[torch.dtype, FlatBuffer] = {}
        # Made once for each buffer: a view outlives frees and refills, since the storage object stays.
        self._views: dict[torch.dtype, list[Tensor]] = {}
        self._cast_S: Tensor | None = None
        flat_F = flatten([managed.param for managed in params], self.layout, config.device)
        # Without a group to shard over the flat tensor itself becomes the shard: no second copy.
        shard_S = flat_F if self.shard_size == 1 else cut_shard(flat_F, self.shard_map, self.shard_rank)
        self.shard_S = memory.send_home(shard_S, config.device, offload=config.offload and not self.empty)
        self._set_dtype(full_precision=False)
        requires_grad = any(managed.param.requires_grad for managed in params)
        self.flat_param: nn.Parameter = FlatParameter(self.shard_S, requires_grad=requires_grad)
        # Before it becomes visible: units made around this one must leave it alone.
        mark_flattened(self.flat_param, sharded=self.sharded)
        self.originals = Originals(self, params)
        self.grads = Gradients(self, self.originals)
        self.versions = ParameterVersions(self)
        # Last of the parts: from here on modules show what users will see, and an error before leaves theirs in place.
        self.originals.take_over()
        for describe in DESCRIBERS:
            describe(self)

    # ------------------------------------------------------------------ facts

    @property
    def state(self) -> UnitState:
        """The unit's life-cycle state."""
        return self.life.state

    @property
    def unsharded(self) -> bool:
        """Whether full parameters may be read."""
        return self.life.state in READABLE

    # ------------------------------------------------------------------ buffers

    def buffer(self, dtype: torch.dtype) -> FlatBuffer:
        """Return the full buffer of a dtype, made on first use; it may be freed at the moment."""
        # Of the padded size: the backend writes whole shards, the last one with its right padding.
        found = self._buffers.get(dtype)
        if found is None:
            found = self._buffers[dtype] = FlatBuffer(self.shard_map.padded_numel, dtype, self.config.device)
        return found

    def full_F(self) -> Tensor:
        """Return the full parameter that computation reads now (the shard itself where nothing is gathered)."""
        return self.buffer(self.compute_dtype).tensor if self.needs_buffer else self.shard_S

    def compute_views(self) -> list[Tensor]:
        """Return one view of the full parameter per original, in its own shape; valid while unsharded."""
        if not self.needs_buffer:
            # Not kept: a user may replace the shard, and views of the old one would compute with old values.
            return flat_views(self.shard_S, self.layout)
        dtype = self.compute_dtype
        found = self._views.get(dtype)
        if found is None:
            found = self._views[dtype] = flat_views(self.buffer(dtype).tensor, self.layout)
        return found

    def set_precision(self, dtype: torch.dtype) -> None:
        """Make ``dtype`` the original dtype: the user cast the whole model. The shard is converted, buffers dropped."""
        # Full parameters of the old dtype must not be computed with, and a gather in flight reads the shard that goes.
        self.reshard()
        self.precision = self.grads.sum.precision = Precision.of(dtype, self.config.mixed_precision)
        # A new tensor: the gather that may have read the old one was waited for above.
        self.replace_shard(memory.another_home(self.shard_S, dtype))
        # A buffer that still waits for its last reader would be dropped with its memory in use.
        self.streams.free_rest()
        self._buffers.clear()
        self._views.clear()

    def exchange_buffer(self) -> None:
        """Go on with a copy of the full buffer: the user holds the current one's memory, and may put it back as it is."""
        dtype = self.compute_dtype
        used, fresh = self.buffer(dtype), FlatBuffer(self.shard_map.padded_numel, dtype, self.config.device)
        self.streams.allocate(fresh)
        self.streams.compute_after_gather()
        with torch.no_grad():
            fresh.tensor.copy_(used.tensor)
        # It goes when the user drops it, on any stream.
        self.streams.used_by_compute(used.tensor)
        self._buffers[dtype] = fresh
        del self._views[dtype]

    def replace_shard(self, shard_S: Tensor) -> None:
        """Take ``shard_S`` (same size) as this rank's shard."""
        self.shard_S = shard_S
        self._set_dtype(full_precision=self.full_precision)
        # The parameter objects stay: optimizers hold them, and key their state by them.
        set_data(self.flat_param, shard_S)
        # Last: originals point at pieces of the shard, which is the new one by now.
        self.originals.forget_views()

    def _set_dtype(self, *, full_precision: bool) -> None:
        """Derive what is read many times in a step."""
        self.full_precision = full_precision
        self.compute_dtype = self.precision.original if full_precision else self.precision.compute
        cast = self.compute_dtype != self.shard_S.dtype
        # An offloaded shard is copied to the device, so it needs a buffer also where nothing is sharded.
        self.needs_buffer = self.sharded or cast or self.shard_S.device.type != self.config.device.type

    # ------------------------------------------------------------------ life cycle

    def start_unshard(self) -> bool:
        """Begin to gather the full parameter; return False if it is gathered or in flight, or a user has it.

        Collectives:
            One all-gather over the shard group, when sharded. All of its ranks must call.
        """
        # By the state and not by the storage: a buffer that waits to be freed still has its memory, but must not be read.
        if self.life.state is not UnitState.SHARDED:
            return False
        self.life.move(UnitState.GATHERING, self.name)
        # Before the shard is read: an edit that comes while the gather runs is later than what it brings.
        self.versions.note_gather()
        if not self.needs_buffer:
            return True  # computation reads the shard, which is never freed
        buffer, dtype = self.buffer(self.compute_dtype), self.compute_dtype
        try:
            with self.streams.pre_unshard(), torch.no_grad():
                source_S = memory.fetch(self.shard_S, self.config.device, dtype)
            self.streams.gather_after_prepare()
            # Allocated on the stream that issues the fill: the allocator may hand out memory whose last reader ran there,
            # and the current stream waits for this one before it reads (:meth:`_wait_for_gather`).
            self.streams.allocate(buffer)
            with self.streams.unshard(), torch.no_grad():
                if self.sharded:
                    self._pending = self.collectives.all_gather(buffer.tensor, source_S, self.groups.shard, self.name)
                else:
                    buffer.tensor.copy_(source_S, non_blocking=True)
            # A cast or fetched copy is read by the collective on other streams: it lives until the gather is waited for.
            self._cast_S = source_S
        except BaseException:
            # Nothing will fill the buffer. The next user gathers again instead of waiting for this gather.
            self._pending = self._cast_S = None
            self.streams.free_rest()  # the buffer may be among them: then it is still read
            buffer.free()
            self.life.move(UnitState.SHARDED, self.name)
            raise
        return True

    def gather_into(self, full_F: Tensor, part_S: Tensor) -> None:
        """Gather shard-sized tensors of all ranks into ``full_F`` and wait.

        Collectives:
            One all-gather over the shard group.
        """
        # A copy where anything differs; it lives until the wait below, so the collective may read it all the while.
        source = part_S.to(full_F.device, full_F.dtype)
        with torch.no_grad():
            self.collectives.all_gather(full_F, source, self.groups.shard, self.name).wait()

    def gathered_copy(self, dtype: torch.dtype) -> Tensor:
        """Return the full parameter in memory of the caller's own, whatever state the unit is in.

        Collectives:
            One all-gather over the shard group, when sharded.
        """
        # Not the unit's buffer: a forward that waits for its backward computes with what is in there.
        full_F = torch.empty(self.shard_map.padded_numel, dtype=dtype, device=self.config.device)
        if self.sharded:
            self.gather_into(full_F, self.shard_S)
        else:
            with torch.no_grad():
                full_F.copy_(self.shard_S)
        return full_F

    def finish_unshard(self) -> None:
        """Wait until the full parameter may be read."""
        # On a device the current stream waits and not the host, which may issue kernels that read the buffer at once.
        if self.life.state is UnitState.GATHERING:
            self._wait_for_gather()
            self.life.move(UnitState.UNSHARDED, self.name)

    def _wait_for_gather(self) -> None:
        """Let the current stream wait; only then is it the one to say when the source of the gather may be reused."""
        with labelled("wait_for_gather", self.name):
            self.streams.compute_after_gather()
            pending, self._pending = self._pending, None
            if pending is not None:
                try:
                    pending.wait()
                except BaseException:
                    # The content of the buffer is unknown: the next user gathers again. Buffer and source keep their
                    # memory until then, since the backend may still write to the one and read the other.
                    self.life.move(UnitState.SHARDED, self.name)
                    raise
            source_S, self._cast_S = self._cast_S, None
            if source_S is not None and source_S is not self.shard_S:
                self.streams.used_by_compute(source_S)

    def reshard(self) -> None:
        """Free the full parameter (also one whose gather is in flight; it is waited for first).

        For the handle's own changes of dtype, and for handles without a unit; a unit decides in ``Unit.reshard``.
        """
        if self.life.state is UnitState.SHARDED or self.life.state is UnitState.SUMMONED:
            return
        if self.life.state is UnitState.GATHERING:
            # Freed before the wait, the buffer would be written to after its memory was reused.
            self._wait_for_gather()
        if self.needs_buffer:
            # Views of the buffer, in modules' and in autograd's hands, outlive its memory: the next gather fills it in place.
            # Kernels of the current stream that were issued before may run after the host has come here.
            self.streams.free(self.buffer(self.compute_dtype))
        self.life.move(UnitState.SHARDED, self.name)

    def set_full_precision(self, wanted: bool) -> None:
        """Compute without lowering from the next unshard on (evaluation), or with it again."""
        if wanted != self.full_precision:
            # First: what is gathered lies in the buffer of the other dtype.
            self.reshard()
            self._set_dtype(full_precision=wanted)

    def __repr__(self) -> str:
        return f"FlatHandle(flat_fqns={self.fqns}, state={self.life.state.name})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatHandle:
        """Return an independent flat parameter over the same groups, sharded, without gradients.

        The modules that hold the originals are being copied around it, so nothing is put on them yet: the copied
        originals hang there already.

        Raises:
            FsdpRuntimeError: Full parameters are in use.
        """
        if self.originals.shown is Shown.COMPUTING or self.originals.shown is Shown.SUMMONED:
            raise FsdpRuntimeError(
                f"deepcopy of {self!r}: expected an idle unit, got one whose full parameters are in use. Copy the model "
                "outside of forward, backward and summon_full_params."
            )
        copied = FlatHandle.__new__(FlatHandle)
        memo[id(self)] = copied
        # Whatever the original has gathered or has under way stays its own: the copy begins sharded.
        fresh: dict[str, Any] = {
            "life": LifeCycle(),
            "_pending": None,
            "_buffers": {},
            "_views": {},
            "_cast_S": None,
        }
        vars(copied).update({**vars(self), **fresh, "streams": Streams()})
        vars(copied)["shard_S"] = memory.another_home(self.shard_S, self.shard_S.dtype)
        vars(copied).update(module=copy.deepcopy(self.module, memo))
        # After the module, whose copy registers the copied flat parameter: the memo makes both the same object.
        flat = like_flat(copy.deepcopy(self.flat_param, memo), self.flat_param)
        set_data(flat, copied.shard_S)
        vars(copied)["flat_param"] = flat
        originals = self.originals.copied(copied, memo)
        vars(copied).update(originals=originals, grads=Gradients(copied, originals))
        vars(copied)["versions"] = ParameterVersions(copied)
        # The constants that were copied describe the original's buffer.
        for describe in DESCRIBERS:
            describe(copied)
        return copied

    def __reduce__(self) -> Any:
        raise FsdpTypeError(
            f"cannot pickle the flat parameter {self.name!r}: expected plain tensors, got something that belongs to a "
            "process group. Save a state dict, or copy full parameters inside summon_full_params."
        )
