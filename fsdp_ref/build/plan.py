"""The unit that each parameter goes to.

The one plan behind the wrapper and the composable API: a list of units in depth-first order, each with the parameters
it will flatten. Reads a module tree and decides; it moves no tensor and changes no module.

[Note: ownership] A parameter belongs to the nearest unit at or above the module that has it. One that is registered in several
places belongs to the lowest unit that contains them all: the last common element of the chains of units that lead from the root
to each place. It is flattened there once, and each place is one of its sites. This holds for the units of one call. A unit that
an earlier call made keeps what it flattened: optimizers, other ranks and the user have its shard by now, so a parameter that it
would have to share is refused, with both units named.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fsdp_ref.annotations import is_replicated, unit_of, units_under
from fsdp_ref.annotations import walk as walk_modules
from fsdp_ref.build.ignored import Ignored
from fsdp_ref.errors import FsdpValueError, listing
from fsdp_ref.naming import clean_tensor_name, join_fqn
from fsdp_ref.storage.views import ManagedParam, ParamSite, is_flattened

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from fsdp_ref.build.targets import Targets


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """One unit to be made.

    Attributes:
        module: the module that becomes a unit.
        fqn: its name below the root; empty for the root.
        options: keyword arguments of the unit.
        params: what it flattens, in the order of ``named_modules()``; may be empty.
        modules: the modules it is responsible for (buffers, precision): itself and everything below that is not
            ignored and has no nearer unit.
        full_precision: made because mixed precision leaves its class alone.
    """

    module: nn.Module
    fqn: str
    options: Mapping[str, Any]
    params: tuple[ManagedParam, ...]
    modules: tuple[nn.Module, ...]
    full_precision: bool = False

    @property
    def fqns(self) -> list[str]:
        """Names of its parameters below the root."""
        return [join_fqn(self.fqn, param.fqn) for param in self.params]


@dataclass(frozen=True, slots=True)
class WrapPlan:
    """All units that one application makes, in depth-first (``modules()``) order, the root first.

    They are made in the reverse order, children first: for ``mod(s1, s2(ss))`` ss, s2, s1, mod. Both APIs and every
    rank do so, so that collectives during construction match.
    """

    units: tuple[PlannedUnit, ...]
    ignored: Ignored = field(default_factory=Ignored)

    @property
    def root(self) -> PlannedUnit:
        """The unit of the module that the API was applied to."""
        return self.units[0]


@dataclass(frozen=True, slots=True)
class _Place:
    """A site before its owner is known; ``chain`` is (unit module, its path) from the root inwards."""

    path: str
    name: str
    module: nn.Module
    chain: tuple[tuple[nn.Module, str], ...]


@dataclass(slots=True)
class _Walk:
    """What one pass over the tree collects."""

    places: dict[nn.Parameter, list[_Place]] = field(default_factory=dict)
    modules: dict[nn.Module, dict[nn.Module, None]] = field(default_factory=dict)
    paths: dict[nn.Module, str] = field(default_factory=dict)
    taken: list[tuple[str, str, nn.Parameter]] = field(default_factory=list)


def make_plan(
    root: nn.Module,
    targets: Targets,
    options: Mapping[str, Any],
    ignored: Ignored,
) -> WrapPlan:
    """Assign every parameter below ``root`` to a unit.

    Args:
        root: the module that the API is applied to.
        targets: nested units to make.
        options: the root's keyword arguments.
        ignored: what to leave alone, nested units' included.

    Raises:
        FsdpValueError: a parameter outside the units below ``root`` belongs to one of them: it is tied across units
            that were made one after the other.
    """
    walk = _walk(root, frozenset(targets.options), ignored)
    if walk.taken:
        raise FsdpValueError(
            f"{type(root).__name__}: expected parameters that belong to no unit yet, got "
            f"{listing(f'{name} (for {owner}, shared with {_owner_of(root, param)})' for name, owner, param in walk.taken)}. "
            "Make both units in one call with a policy, so that the lowest common unit owns the shared parameter, or "
            "keep all modules that share it in one unit."
        )
    owned: dict[nn.Module, list[ManagedParam]] = {}
    for param, places in walk.places.items():
        owner, planned = _assign(param, places)
        owned.setdefault(owner, []).append(planned)
    units = [
        PlannedUnit(
            module,
            clean_tensor_name(walk.paths[module]),
            options if module is root else targets.options[module],
            tuple(owned.get(module, ())),
            tuple(walk.modules[module]),
            module in targets.full_precision,
        )
        for module in walk.modules
    ]
    return WrapPlan(tuple(units), ignored)


def _owner_of(root: nn.Module, param: nn.Parameter) -> str:
    """Name the unit below ``root`` that owns ``param``, and the parameter's name there."""
    for name, _, unit in units_under(root):
        for original, fqn in zip(unit.handle.originals.params, unit.handle.fqns):
            if original is param:
                return f"{fqn} of unit {clean_tensor_name(name)!r}, which was made before"
    return "a unit that was made before"


def _walk(root: nn.Module, targets: frozenset[nn.Module], ignored: Ignored) -> _Walk:
    """Visit every path (shared modules once per path) and note each parameter's places.

    Subtrees of ignored modules, replicated modules and existing units are not entered.
    """
    walk = _Walk()
    chains: dict[str, tuple[tuple[nn.Module, str], ...]] = {}

    def left_alone(module: nn.Module) -> bool:
        return unit_of(module) is not None or module in ignored.modules or is_replicated(module)

    for path, module in walk_modules(root, left_alone):
        is_root = module is root and not path
        if not is_root and left_alone(module):
            continue
        chain = () if is_root else chains[path.rpartition(".")[0]]
        if is_root or (module in targets and all(module is not unit for unit, _ in chain)):
            chain = (*chain, (module, path))
            walk.modules.setdefault(module, {})
            walk.paths.setdefault(module, path)
        chains[path] = chain
        walk.modules[chain[-1][0]].setdefault(module)
        if is_root and unit_of(module) is not None:
            # Wrapping a wrapper is legal: the new unit stands around the old one and has no parameters itself.
            break
        if is_root and module in ignored.modules:
            continue
        for name, param in module._parameters.items():
            if param is None or (ignored.params and param in ignored.params):
                continue
            if is_flattened(param):
                owner = clean_tensor_name(chain[-1][1])
                walk.taken.append((join_fqn(path, name), f"unit {owner!r}" if owner else "the root unit", param))
                continue
            walk.places.setdefault(param, []).append(_Place(path, name, module, chain))
    return walk


def _assign(param: nn.Parameter, places: list[_Place]) -> tuple[nn.Module, ManagedParam]:
    """Return the owner (see [Note: ownership]) and the parameter with its sites relative to it."""
    if len(places) == 1:
        [only] = places
        owner, base = only.chain[-1]
        fqn = clean_tensor_name(join_fqn(only.path[len(base) :].lstrip("."), only.name))
        return owner, ManagedParam(param, (ParamSite(only.module, only.name, fqn),), ())
    common = [unit for unit, _ in places[0].chain]
    for place in places[1:]:
        along = [unit for unit, _ in place.chain]
        same = 0
        while same < min(len(common), len(along)) and common[same] is along[same]:
            same += 1
        common = common[:same]
    depth = len(common) - 1
    sites: dict[tuple[nn.Module, str], ParamSite] = {}
    names: dict[str, None] = {}
    for place in places:
        base = place.chain[depth][1]
        relative = place.path[len(base) :].lstrip(".")
        fqn = clean_tensor_name(join_fqn(relative, place.name))
        names.setdefault(fqn)
        # A module that occurs twice is one site with two names.
        sites.setdefault((place.module, place.name), ParamSite(place.module, place.name, fqn))
    return common[depth], ManagedParam(param, tuple(sites.values()), tuple(names)[1:])


def check_frozen(plan: WrapPlan, *, use_orig_params: bool) -> None:
    """Check that each nested unit's parameters are all frozen or all trainable.

    Mixed units work only with original parameters, and even then gather gradients for the frozen ones.

    Raises:
        FsdpValueError: A mixed unit without original parameters; names the first one in post-order and the others.

    Warns:
        UserWarning: A mixed unit with original parameters.
    """
    texts = []
    for unit in _post_order(plan)[:-1]:  # the root, which comes last, is checked when it is flattened
        numel = {True: 0, False: 0}
        names: dict[bool, list[str]] = {True: [], False: []}
        for name, planned in zip(unit.fqns, unit.params):
            names[planned.param.requires_grad].append(name)
            numel[planned.param.requires_grad] += planned.param.numel()
        if not (names[True] and names[False]):
            continue
        cost = (
            " We do not recommend wrapping such modules since the gradient memory usage will be higher than expected "
            f"({sum(numel.values())} numel instead of {numel[True]} numel before sharding via reduce-scatter)."
            if use_orig_params
            else " FSDP does not support wrapping such modules when use_orig_params=False."
        )
        texts.append(
            f"{unit.fqn} has both parameters with requires_grad=True and False.{cost} If possible, wrap the frozen "
            f"parameters with FSDP separately.\nThe following parameters have requires_grad=True:\n{names[True]}\n"
            f"The following parameters have requires_grad=False:\n{names[False]}"
        )
    if texts and not use_orig_params:
        raise FsdpValueError("\n".join(texts))
    for text in texts:
        warnings.warn(text, UserWarning, stacklevel=3)


def _post_order(plan: WrapPlan) -> list[PlannedUnit]:
    """Return the units children before parents, siblings in registration order."""
    order: list[PlannedUnit] = []
    open_units: list[PlannedUnit] = []
    for unit in plan.units:
        while open_units and open_units[-1].fqn and not unit.fqn.startswith(open_units[-1].fqn + "."):
            order.append(open_units.pop())
        open_units.append(unit)
    return order + open_units[::-1]
