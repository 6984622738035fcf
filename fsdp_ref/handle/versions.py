"""Changes of parameters since the values that a forward computed with were gathered.

[Note: versions] Autograd counts the in-place changes of a tensor and refuses a backward that needs a value from before
one. It cannot count for full parameters, which are gathered anew from a shard. What users change are the originals (or
the flat parameter), whose own counters go up with each in-place change, also of a piece without elements, so that all
ranks count alike. Two things they do not count: values that the reference itself takes over (replaced data, edits in a
summon or in forward), and the step of an optimizer on a rank that has nothing of a parameter and hence no gradient for it.

Such a rank cannot see whether the others had a gradient: they may have cleared it. All ranks must gather, or none. So each
step of an optimizer makes what is gathered old, whatever it changed.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fsdp_ref import compat
from fsdp_ref.errors import ParametersChangedError
from fsdp_ref.naming import join_fqn
from fsdp_ref.states import UnitState

if TYPE_CHECKING:
    from fsdp_ref.handle.flat_handle import FlatHandle


class ParameterVersions:
    """The versions of the parameters of one handle: one number for each original, or one for the flat parameter.

    Args:
        handle: the flat parameter.

    Attributes:
        of_buffer: the versions of what the full buffer holds. A list of its own for each gather and each forward pass:
            what autograd saves keeps the one of its pass.
    """

    def __init__(self, handle: FlatHandle) -> None:
        self._handle = handle
        self._many = handle.originals.use_orig_params
        self._added = [0] * (len(handle.fqns) if self._many else 1)
        self.of_buffer: list[int] = []
        # Where this rank has a piece of every original its counters show every step of an optimizer.
        self._whole = not self._many or all(handle.originals.present(index) for index in range(len(handle.fqns)))
        self._stepped = False
        # One hook for the process, however many units: optimizers are not known here.
        compat.after_optimizer_steps(_after_step)
        _handles.add(handle)

    def now(self) -> list[int]:
        """Return the current versions."""
        return [compat.version_of(param) + added for param, added in zip(self._handle.originals.held, self._added)]

    def note_gather(self) -> None:
        """The full buffer holds, or is about to hold, the current values."""
        self.of_buffer, self._stepped = self.now(), False

    def new_pass(self) -> None:
        """A forward pass begins to use what is gathered."""
        # Edits that this forward makes count for it alone; what earlier passes saved keeps their list.
        self.of_buffer = self.of_buffer.copy()

    def out_of_date(self) -> bool:
        """Return whether parameters were changed since they were gathered, or may have been; the same on all ranks."""
        return self._stepped or self.of_buffer != self.now()

    def count(self, indices: Iterable[int]) -> None:
        """Count a change of these originals that their own counters do not show."""
        # Each once, however many originals changed: a flat parameter counts as one.
        for index in {index if self._many else 0 for index in indices}:
            self._added[index] += 1

    def may_miss_steps(self) -> bool:
        """Return whether the step of an optimizer can make anything old here that counters do not show."""
        return self._handle.state is not UnitState.SHARDED or not self._whole

    def note_step(self, stepped: Collection[int]) -> None:
        """An optimizer has made a step over the parameters of these ids."""
        params = self._handle.originals.held
        # Frozen ones do not count: an optimizer leaves alone what has no gradient.
        self._stepped |= any(id(param) in stepped and param.requires_grad for param in params)
        if not self._whole:
            originals, used = self._handle.originals, self._handle.grads.sum.used
            empty = [i for i, param in enumerate(params) if not param.numel() and not originals.present(i)]
            self.count(index for index in empty if id(params[index]) in stepped and used[index])

    def count_in_pass(self, indices: Iterable[int]) -> None:
        """Count a change that the running forward made itself, in what it computes with: its own later use is right."""
        self.count(indices)
        # In place: what autograd has saved in this pass holds this very list.
        self.of_buffer[:] = self.now()

    def settle(self, before: list[int], changed: Collection[int]) -> None:
        """Count one change of each of ``changed`` since ``before``, and no other, whatever counters say."""
        entries = {index if self._many else 0 for index in changed}
        for index, (was, now) in enumerate(zip(before, self.now())):
            self._added[index] += was + (index in entries) - now

    def adopted(self, index: int, old: Tensor, new: Tensor) -> None:
        """Another parameter took the place of an original: that is one change."""
        self._added[index] += compat.version_of(old) - compat.version_of(new) + 1

    def owner(self, position: int) -> int:
        """Return the original that an element of the flat parameter belongs to."""
        return max(bisect_right(self._handle.layout.starts, position) - 1, 0)

    def check(self, used: list[int], position: int) -> None:
        """Refuse to compute with values that have changed since a forward used them.

        Args:
            used: the versions of that forward.
            position: where the value lies in the flat parameter, in elements.

        Raises:
            ParametersChangedError: they have.
        """
        owner = self.owner(position)
        index = owner if self._many else 0
        # Only this original: a step of another one in the same flat buffer does not matter to what was saved.
        if used[index] != compat.version_of(self._handle.originals.held[index]) + self._added[index]:
            refuse_changed(self._handle, owner)


def refuse_changed(handle: FlatHandle, index: int) -> None:
    """Refuse a backward that needs an original in values which are gone.

    Raises:
        ParametersChangedError: Always.
    """
    name = repr(handle.name) if handle.name else "the root"
    raise ParametersChangedError(
        f"backward through {name}: parameter {join_fqn(handle.name, handle.fqns[index])!r}, which gradient computation "
        "needs, has been modified by an inplace operation since forward used it: expected the values that forward "
        "computed with, got later ones (of an optimizer's step, or of an edit). Run backward for every forward before "
        "the optimizer steps or parameters are edited, or run forward again."
    )


_handles: weakref.WeakSet[FlatHandle] = weakref.WeakSet()


def _after_step(optimizer: Any, *_: Any) -> None:
    """Mark gathered values of stepped parameters as old; count the step where other ranks alone have a gradient."""
    # A copy: another thread's collection may drop one meanwhile.
    handles = [handle for handle in list(_handles) if handle.versions.may_miss_steps()]
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]} if handles else set()
    for handle in handles:
        handle.versions.note_step(stepped)
