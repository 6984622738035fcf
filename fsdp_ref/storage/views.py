"""The places of parameters on modules, and what is put there and taken off again.

A tied parameter has several places; all of them must show the same view while the unit is unsharded and the same sharded
parameter otherwise.

The only file that writes parameters, gradients and marks onto modules and tensors which it did not make. What a place
shows has two forms: *registered* (in ``module._parameters``: listed by ``named_parameters()``) and *plain* (an ordinary
attribute, not listed). With original parameters everything is registered; with a flat parameter only what a user may
see as parameters is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_ref.errors import FsdpRuntimeError, listing
from fsdp_ref.layout import FlatLayout, ParamSpec
from fsdp_ref.storage.extension import ParameterExtension

_FLATTENED = "_fsdp_flattened"  # torch's FSDP1 sets it too: surrounding units leave such parameters alone
_BY_US = "_fsdp_ref_flattened"


@dataclass(frozen=True, slots=True, eq=False)
class ParamSite:
    """One module attribute that holds a parameter: ``module.name``, called ``fqn`` from the unit's module."""

    module: nn.Module
    name: str
    fqn: str


@dataclass(frozen=True, slots=True, eq=False)
class ManagedParam:
    """One parameter of a unit with all its places.

    Attributes:
        param: the parameter as the user made it.
        sites: its distinct places, the first being the primary one.
        aliases: every further name (a shared module gives one place several names).
        extension: what is special about it; None for a plain tensor.
    """

    param: nn.Parameter
    sites: tuple[ParamSite, ...]
    aliases: tuple[str, ...]
    extension: ParameterExtension | None = None

    def flattened(self, extension: ParameterExtension) -> ManagedParam:
        """Return the plain parameter that is flattened in place of one that is more; users find it on their modules."""
        local = nn.Parameter(extension.flatten(self.param), requires_grad=self.param.requires_grad)
        return ManagedParam(local, self.sites, self.aliases, extension)

    @property
    def fqn(self) -> str:
        """The primary name, relative to the unit's module."""
        return self.sites[0].fqn

    def spec(self) -> ParamSpec:
        """Describe the parameter for the layout."""
        return ParamSpec.of(self.fqn, tuple(self.param.shape), self.param.stride(), self.aliases)


def mark_flattened(param: Tensor, *, sharded: bool) -> None:
    """Mark a tensor as held by a unit, so that units around it leave it alone; ``sharded``: other ranks hold the rest."""
    setattr(param, _FLATTENED, True)
    setattr(param, _BY_US, sharded)


def is_flattened(param: Tensor) -> bool:
    """Return whether a unit holds ``param``: one of its originals, or a flat parameter itself."""
    return getattr(param, _FLATTENED, False)


def is_held_by_us(param: Tensor) -> bool:
    """Return the same for units of ours alone, not for those of torch's FSDP1."""
    return hasattr(param, _BY_US)


def is_shard(param: Tensor) -> bool:
    """Return whether a unit of ours holds ``param``, and each rank has a part of it."""
    return getattr(param, _BY_US, False)


def flat_views(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """Return one view of ``flat`` per parameter, in the parameter's own shape and strides."""
    return [
        flat.as_strided(spec.shape, spec.stride, flat.storage_offset() + start)
        for spec, start in zip(layout.params, layout.starts)
    ]


def gap_views(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """Return one view of ``flat`` per gap, tail and right padding: what belongs to no parameter."""
    views = [flat[gap.start : gap.stop] for gap in layout.gaps]
    if flat.numel() > layout.numel:
        views.append(flat[layout.numel :])
    return views


def alias(view: Tensor) -> Tensor:
    """Return a tensor on the same memory that autograd takes for an independent one (own version, no base)."""
    return view.data


class Placeholder(Tensor):
    """Stands where a parameter was that users do not see now: its shape, strides and dtype, and nothing to compute with.

    It is on the meta device. A plain tensor there would not refuse: torch multiplies a matrix on the CPU by one on meta without
    an error, and the result is memory that nothing was written to (torch 2.13, `F.linear`, `@` and convolutions without bias).
    """

    fqn: str

    @staticmethod
    def of(spec: ParamSpec, dtype: torch.dtype) -> Placeholder:
        """Return one for a parameter."""
        result = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="meta").as_subclass(Placeholder)
        result.fqn = spec.fqn
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as torch documents it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse to compute.

        Raises:
            FsdpRuntimeError: Always.
        """
        if func is torch.ops.aten.detach.default:  # as `.data` does
            return args[0]
        given = [item for arg in (*args, *(kwargs or {}).values()) for item in (arg if type(arg) is list else [arg])]
        names = {item.fqn for item in given if isinstance(item, Placeholder)}
        raise FsdpRuntimeError(
            f"{func}: expected a parameter with values, got {listing(sorted(names))}, which its unit has only in forward, in "
            "registered methods and in summon_full_params. Compute there."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        """Return this one: it never changes."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # an argument without a name
        """Name the parameter."""
        return f"Placeholder({self.fqn!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


class SiteWriters:
    """Writes tensors to all places of a unit's parameters.

    Args:
        params: the parameters with their places.
        registered: the form in which full and sharded values are shown (see the module's text).
    """

    def __init__(self, params: Sequence[ManagedParam], *, registered: bool) -> None:
        self.registered = registered
        # Flat lists for what happens twice per unit and pass: writing into the dictionaries skips ``nn.Module.__setattr__``,
        # which would look through parameters, buffers and children each time.
        self._direct: list[tuple[int, dict[str, Any], str]] = []
        self._through: list[tuple[int, ParamSite]] = []  # of modules whose class watches what is set on them
        for index, site in ((index, site) for index, managed in enumerate(params) for site in managed.sites):
            if overrides_setattr(site.module):
                self._through.append((index, site))
            else:
                self._direct.append((index, _home(site.module, registered), site.name))

    def show(self, values: Sequence[Tensor]) -> None:
        """Put ``values[i]`` at every place of parameter i, in the form of this object."""
        for index, home, name in self._direct:
            home[name] = values[index]
        for index, site in self._through:
            _assign(site, values[index], registered=self.registered)

    def all_show(self, values: Sequence[Tensor]) -> bool:
        """Return whether every place shows exactly ``values[i]``."""
        for index, home, name in self._direct:
            if home.get(name) is not values[index]:
                return False
        return all(getattr(site.module, site.name, None) is values[index] for index, site in self._through)


def reshape_sites(params: Sequence[ManagedParam], values: Sequence[Tensor], *, registered: bool) -> None:
    """Put ``values[i]`` at every place of parameter i in either form: as parameters, or so that none stays registered."""
    for managed, value in zip(params, values):
        for site in managed.sites:
            _assign(site, value, registered=registered)


def overrides_setattr(module: nn.Module) -> bool:
    """Return whether the class of ``module`` watches attribute assignment (recurrent layers do)."""
    return type(module).__setattr__ is not nn.Module.__setattr__


def set_flat_param(module: nn.Module, name: str, flat: nn.Parameter | None) -> None:
    """Register the flat parameter on its module, or take it off with None."""
    module._parameters.pop(name, None)
    if flat is not None:
        module._parameters[name] = flat


def set_data(param: Tensor, data: Tensor) -> None:
    """Point ``param`` at other memory, keeping the object (shape, dtype and device may change)."""
    param.data = data


def set_grad(param: Tensor, grad: Tensor | None) -> None:
    """Set the gradient of ``param``, also where torch's own check of shape, dtype or device would refuse it.

    Between a backward without synchronisation and the synchronising one a sharded parameter has the gradient of the
    full one; with low-precision gradients the dtypes differ.
    """
    if grad is None:
        param.grad = None
    elif grad.shape == param.shape and grad.dtype == param.dtype and grad.device == param.device:
        param.grad = grad
    else:
        # torch checks what is assigned to ``.grad``, and not what its data is exchanged for.
        accepted = torch.empty_like(param, requires_grad=False)
        param.grad = None
        param.grad = accepted
        param.grad.data = grad


def _home(module: nn.Module, registered: bool) -> dict[str, Any]:
    return module._parameters if registered else module.__dict__


def _assign(site: ParamSite, value: Tensor, *, registered: bool) -> None:
    """Set one place through the module's own ``__setattr__``, then file it in the wanted form and order."""
    module, name = site.module, site.name
    order = list(module._parameters)
    module._parameters.pop(name, None)
    module.__dict__.pop(name, None)
    if overrides_setattr(module):
        setattr(module, name, value)
        module._parameters.pop(name, None)
        module.__dict__.pop(name, None)
    _home(module, registered)[name] = value
    if registered and order and name in order:
        rest = dict(module._parameters)
        module._parameters.clear()
        module._parameters.update({key: rest.pop(key) for key in order if key in rest} | rest)
