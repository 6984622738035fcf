"""Trainable parameters that no unit manages, because modules were changed after sharding.

A unit manages only the parameters that it flattened. A later parameter, of a replacing module or from ``register_parameter``,
would be trained on each rank alone: it is not gathered, its gradient is not averaged, and no error says so. What is compared is
places (a module and a name), since another parameter in a managed place is taken over (``handle.writeback``), while a managed
parameter that moved elsewhere is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp_ref.annotations import is_replicated, unit_of, units_under, walk
from fsdp_ref.errors import FsdpRuntimeError, listing
from fsdp_ref.handle.originals import Shown
from fsdp_ref.naming import FLAT_PARAM, clean_tensor_name, join_fqn
from fsdp_ref.runtime.guards import Guard
from fsdp_ref.runtime.unit import Unit

if TYPE_CHECKING:
    from fsdp_ref.runtime.root import Root


class TreeWatch(Guard):
    """Looks at the modules of one tree before forwards; while they stay the same that is two comparisons of lists.

    Args:
        root: the tree.
    """

    def __init__(self, root: Root) -> None:
        super().__init__(root)
        self._modules: list[nn.Module] = []
        self._children: list[dict[str, nn.Module | None]] | None = None
        self._names: list[list[str]] = []
        self._frozen: list[tuple[nn.Module, str]] = []

    def forward_begins(self) -> None:
        """Check that units manage all trained parameters; each rank checks alone.

        Raises:
            FsdpRuntimeError: There are trainable parameters that no unit manages or ignores, or units that came after the
                first forward; all are named.
        """
        if not torch.is_grad_enabled():
            return
        modules = self._modules
        if (
            [module._modules for module in modules] == self._children
            and [list(module._parameters) for module in modules] == self._names
            and not any(_trainable(module, name) for module, name in self._frozen)
        ):
            return
        holder, units = self.root.unit.holder, self.root.units
        found = _ours(holder)
        late = {unit: clean_tensor_name(path) for path, _, unit in units_under(holder) if unit not in self.root.index}
        places = {place for unit in (*units, *late) for place in _places(unit)}
        ignored = {param for unit in units if unit.ignored for param in unit.ignored.params}
        outside = [
            (path, module, name)
            for module, path in found.items()
            for name, param in module._parameters.items()
            if param is not None and (module, name) not in places and param not in ignored
        ]
        trained = [join_fqn(path, name) for path, module, name in outside if _trainable(module, name)]
        if late or trained:
            self._refuse(trained, list(late.values()), {*found})
        self._modules = list(found)
        self._children = [dict(module._modules) for module in self._modules]
        self._names = [list(module._parameters) for module in self._modules]
        self._frozen = [(module, name) for _, module, name in outside]

    def _refuse(self, trained: list[str], late: list[str], present: set[nn.Module]) -> None:
        gone = [
            join_fqn(unit.name, managed.fqn)
            for unit in self.root.units
            for managed in unit.handle.originals.managed
            if all(site.module not in present for site in managed.sites)
        ]
        problems = [f"trainable parameters that no unit manages: {listing(trained)}"] if trained else []
        problems += [f"units made after the first forward: {listing(late)}"] if late else []
        problems += [f"managed parameters that are no longer in the model: {listing(gone)}"] if gone else []
        raise FsdpRuntimeError(
            f"forward of {self.root.unit!r}: expected the modules that were there when it was sharded, each trainable "
            f"parameter managed by a unit, got {'; '.join(problems)}. Replace or add modules and parameters before "
            "sharding (later ones are not gathered, and their gradients not averaged), freeze them, or keep their gradients "
            "equal yourself and pass their modules as ignored_modules when sharding."
        )


def _trainable(module: nn.Module, name: str) -> bool:
    param = module._parameters.get(name)
    return param is not None and param.requires_grad


def _places(unit: Unit) -> Iterator[tuple[nn.Module, str]]:
    """Return where parameters of a unit are registered on purpose."""
    handle = unit.handle
    if not handle.originals.use_orig_params:
        yield handle.module, FLAT_PARAM
    if handle.originals.use_orig_params or handle.originals.shown is Shown.SUMMONED:
        for managed in handle.originals.managed:
            for site in managed.sites:
                yield site.module, site.name


def _ours(holder: nn.Module) -> dict[nn.Module, str]:
    """Return the modules whose parameters units should manage, each once, with clean names.

    Modules of another parallelism are left out, and so is everything below ignored modules except units.
    """
    unit = unit_of(holder)
    ignored = unit.ignored.modules if unit is not None and unit.ignored else frozenset()
    left_alone: dict[str, bool] = {}
    found: dict[nn.Module, str] = {}
    for path, module in walk(holder, is_replicated):
        leave = (left_alone.get(path.rpartition(".")[0], False) or module in ignored) and unit_of(module) is None
        left_alone[path] = leave
        if not leave and not is_replicated(module):
            found.setdefault(module, clean_tensor_name(path))
    return found
