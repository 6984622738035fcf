"""The parameters of a unit as users see them, outside and inside computation.

With original parameters each user's ``nn.Parameter`` object lives on; outside computation its data is the piece of it
that this rank's shard holds (one-dimensional, possibly empty). Without, users see one flat parameter, and the places of
the originals hold placeholders: right shape and dtype, and any computation with one raises an error.

Inside forward and backward every place shows a plain tensor that autograd tracks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from fsdp_ref.naming import FLAT_PARAM
from fsdp_ref.storage.views import (
    ManagedParam,
    ParamSite,
    Placeholder,
    SiteWriters,
    flat_views,
    mark_flattened,
    reshape_sites,
    set_data,
    set_flat_param,
)

if TYPE_CHECKING:
    from fsdp_ref.handle.flat_handle import FlatHandle


class Shown(Enum):
    """What the places of the originals show."""

    SHARDED = auto()
    """Originals over pieces of the shard, or placeholders."""
    FULL = auto()
    """Originals over the full buffer: a unit that stays unsharded between forward and backward."""
    COMPUTING = auto()
    """Tracked views, inside forward or backward."""
    SUMMONED = auto()
    """Parameters over a buffer that a user may edit."""


class OwnHook:
    """Base of the tensor hooks on parameters that are no user's."""

    __slots__ = ()


PARAM_GUARDS: Final[list[Callable[[nn.Parameter, str], None]]] = []
"""Called with each tensor that users see as a parameter, and with its name; they may put an :class:`OwnHook` on it."""


def guard_param(param: nn.Parameter, name: str) -> None:
    """Let guards look at what users are about to see as a parameter."""
    for guard in PARAM_GUARDS:
        guard(param, name)


class Originals:
    """The user-visible side of one handle.

    Args:
        handle: the flat parameter.
        params: its parameters with their places.
    """

    def __init__(self, handle: FlatHandle, params: Sequence[ManagedParam]) -> None:
        self._handle = handle
        self.managed = list(params)
        self.params: list[nn.Parameter] = [managed.param for managed in params]
        self.extensions = [managed.extension for managed in params]
        # The same by place: module and name.
        self.extended = {(s.module, s.name): m.extension for m in params if m.extension is not None for s in m.sites}
        self.use_orig_params = handle.config.use_orig_params or not params
        # What optimizers step, and ``backward(inputs=...)`` names.
        self.held: list[nn.Parameter] = self.params if self.use_orig_params else [handle.flat_param]
        self.shown = Shown.SHARDED
        self.hooks_aside: list[tuple[dict[int, Any], dict[int, Any]]] = []  # see ``param_hooks.set_aside``
        self._placeholders = [
            Placeholder.of(spec, handle.shard_S.dtype)
            for spec in (() if self.use_orig_params else handle.layout.params)
        ]
        # Pieces in this rank's shard: parameter index -> (offset, numel); absent ones are missing.
        self.pieces = {
            piece.param_index: (piece.offset_in_shard, piece.span_in_param.numel)
            for piece in handle.shard_map.param_spans(handle.shard_rank)
        }
        # Kept, since ``absorb_params`` compares with them before each gather.
        self._shard_views: list[Tensor] | None = None
        for param, name in zip(self.held, handle.fqns if self.use_orig_params else [FLAT_PARAM]):
            guard_param(param, name)

    @cached_property
    def _writers(self) -> SiteWriters:
        """Made on first use: in a copied model the modules are filled only after the handle was copied."""
        return SiteWriters(self.managed, registered=self.use_orig_params)

    def copied(self, handle: FlatHandle, memo: dict[int, Any]) -> Originals:
        """Return the user-visible side of a copy of the handle (see ``FlatHandle.__deepcopy__``)."""
        managed = [
            ManagedParam(
                copy.deepcopy(param, memo),
                tuple(ParamSite(copy.deepcopy(site.module, memo), site.name, site.fqn) for site in old.sites),
                old.aliases,
                old.extension,
            )
            for param, old in zip(self.params, self.managed)
        ]
        # Through the memo: a parameter that hangs on several modules is copied once.
        result = Originals(handle, managed)
        if self.use_orig_params:
            result._point_at(result.shard_views())
        result._placeholders = self._placeholders  # those that the copied modules show
        for param in result.params:
            mark_flattened(param, sharded=handle.sharded)
        return result

    # ------------------------------------------------------------------ what a shard-sized flat tensor means

    def pieces_of(self, flat_S: Tensor) -> list[Tensor]:
        """Return, per original, the piece of it in a shard-sized flat tensor: 1-D, or whole where nothing is sharded."""
        if not self._handle.sharded:
            return flat_views(flat_S, self._handle.layout)
        none = flat_S[0:0]  # of the shard's own storage, by which a replaced piece without elements is noticed
        return [
            flat_S[start : start + numel] if numel else none
            for start, numel in (self.pieces.get(index, (0, 0)) for index in range(len(self.params)))
        ]

    def shard_views(self) -> list[Tensor]:
        """Return each original's piece of this rank's shard (the same objects until the shard is replaced)."""
        if self._shard_views is None:
            self._shard_views = self.pieces_of(self._handle.shard_S)
        return self._shard_views

    def present(self, index: int) -> bool:
        """Return whether this rank holds any of original ``index``; all of them hold all of an empty parameter."""
        # All ranks hold empty parameters, as in one process, where an optimizer steps them too.
        return not self._handle.sharded or index in self.pieces or not self._handle.layout.params[index].numel

    def forget_views(self) -> None:
        """The shard was replaced: point the originals at the new one."""
        # While originals are shown in full they point at the buffer, and at the new shard once they are sharded again.
        self._shard_views = None
        if self.use_orig_params and self.shown is not Shown.FULL:
            self._point_at(self.shard_views())

    # ------------------------------------------------------------------ what is shown

    def take_over(self) -> None:
        """Replace the user's parameters by their sharded form, once, at construction."""
        for param in self.params:
            mark_flattened(param, sharded=self._handle.sharded)
        if self.use_orig_params:
            # The same objects as before: an optimizer built earlier holds them.
            self._point_at(self.shard_views())
            self._writers.show(self.params)
        else:
            reshape_sites(self.managed, self._placeholders, registered=False)
            set_flat_param(self._handle.module, FLAT_PARAM, self._handle.flat_param)

    def show_sharded(self, *, anew: bool = False) -> None:
        """Show what users see outside computation; ``anew``: the originals point elsewhere although they seem not to."""
        if self.shown is Shown.SHARDED and not anew:
            return
        if self.use_orig_params:
            # Computing puts other tensors on the modules and leaves the originals pointing at the shard.
            if self.shown is not Shown.COMPUTING or anew:
                self._point_at(self.shard_views())
            self._writers.show(self.params)
        elif self.shown is Shown.SUMMONED:
            # Summoned parameters were registered, so that ``named_parameters`` finds them; placeholders are not.
            reshape_sites(self.managed, self._placeholders, registered=False)
            set_flat_param(self._handle.module, FLAT_PARAM, self._handle.flat_param)
        else:
            # Each place shows a plain attribute, before and after: nothing is filed anew.
            self._writers.show(self._placeholders)
        self.shown = Shown.SHARDED

    def unflattened(self, views: list[Tensor]) -> list[Tensor]:
        """Return what modules compute with: the views, but for parameters that are more than a plain tensor."""
        if not self.extended:
            return views
        return [view if each is None else each.unflatten(view) for view, each in zip(views, self.extensions)]

    def plain(self, index: int, value: Tensor) -> Tensor:
        """Return the plain tensor in what a place of original ``index`` shows; the inverse of :meth:`unflattened`.

        Raises:
            FsdpError: a user put something else there.
        """
        extension = self.extensions[index]
        return value if extension is None else extension.flatten(value)

    def show_computing(self, views: Sequence[Tensor]) -> None:
        """Show tracked views of the full parameter."""
        if self.use_orig_params and self.shown is Shown.FULL:
            # Users and optimizers keep these objects: they must never see a buffer that is about to be freed.
            self._point_at(self.shard_views())
        self._writers.show(views)
        self.shown = Shown.COMPUTING

    def show_full(self) -> None:
        """Show the originals over the full buffer (original parameters only)."""
        # In-place edits now go to the buffer, which is freed: see ``writeback.keep_full_edits``.
        self._point_at(self._handle.compute_views())
        self._writers.show(self.params)
        self.shown = Shown.FULL

    def show_summoned(self, views: Sequence[Tensor]) -> list[nn.Parameter]:
        """Show editable parameters over ``views`` and return them."""
        full = self.unflattened(list(views))
        shown = [nn.Parameter(value, requires_grad=wanted) for value, wanted in zip(full, self.trainable())]
        if self.use_orig_params:
            # Users' own objects, so that optimizers and hooks which know them see the edit.
            self._point_at(views)
            for index, extension in enumerate(self.extensions):
                if extension is None:
                    shown[index] = self.params[index]
                else:
                    guard_param(shown[index], self._handle.fqns[index])
            self._writers.show(shown)
        else:
            # Not both at once: a walk over parameters in a summon finds each element once.
            set_flat_param(self._handle.module, FLAT_PARAM, None)
            reshape_sites(self.managed, shown, registered=True)
        self.shown = Shown.SUMMONED
        return shown

    def site_values(self) -> list[tuple[str, int, object]]:
        """Return what each place shows now, as (name, parameter index, value); None for a missing attribute."""
        sites = [(site, index) for index, managed in enumerate(self.managed) for site in managed.sites]
        return [(site.fqn, index, getattr(site.module, site.name, None)) for site, index in sites]

    def unchanged(self) -> bool:
        """Return whether every place shows what users see while parameters are sharded."""
        return self._writers.all_show(self.params if self.use_orig_params else self._placeholders)

    def trainable(self) -> list[bool]:
        """Return which originals want a gradient now; without original parameters the flat one speaks for all."""
        if self.use_orig_params:
            return [param.requires_grad for param in self.params]
        return [self._handle.flat_param.requires_grad] * len(self.params)

    def _point_at(self, views: Sequence[Tensor]) -> None:
        for param, view in zip(self.params, views):
            set_data(param, view)
