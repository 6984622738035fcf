"""Where, on which modules and under which names, does each parameter of a unit hang?

A tied parameter hangs in several places; all of them must show the same view while the unit is unsharded and the same
sharded parameter otherwise. Nothing is changed here (see ``views``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from fsdp_ref.layout import ParamSpec
from fsdp_ref.storage.extension import ParameterExtension


@dataclass(frozen=True, slots=True, eq=False)
class ParamSite:
    """One place where a parameter hangs: ``module.name``, called ``fqn`` from the unit's module."""

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

    @classmethod
    def of(cls, param: nn.Parameter, named: Iterable[tuple[nn.Module, str, str]]) -> ManagedParam:
        """Collect places given as (module, name, fqn); one that occurs under several names is one place."""
        sites: dict[tuple[nn.Module, str], ParamSite] = {}
        names: list[str] = []
        for module, name, fqn in named:
            names.append(fqn)
            sites.setdefault((module, name), ParamSite(module, name, fqn))
        return cls(param, tuple(sites.values()), tuple(names[1:]))

    @property
    def fqn(self) -> str:
        """The primary name, relative to the unit's module."""
        return self.sites[0].fqn

    def spec(self) -> ParamSpec:
        """Describe the parameter for the layout."""
        return ParamSpec.of(self.fqn, tuple(self.param.shape), self.param.stride(), self.aliases)


def sites_below(module: nn.Module, params: Iterable[nn.Parameter]) -> list[ManagedParam]:
    """Find every place of ``params`` (compared by identity) below ``module``.

    Returns:
        One entry per parameter found, in the order of ``named_modules`` with duplicates, then of registration.
    """
    wanted = {id(param) for param in params}
    found: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        for name, param in submodule.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) in wanted:
                found.setdefault(param, []).append((submodule, name, f"{prefix}.{name}" if prefix else name))
    return [ManagedParam.of(param, named) for param, named in found.items()]
