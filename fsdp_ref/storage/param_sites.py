"""The places of each parameter of a unit: on which modules, under which names.

A tied parameter has several; all of them must show the same view while the unit is unsharded and the same sharded parameter
otherwise. Nothing is changed here (see ``views``).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp_ref.layout import ParamSpec
from fsdp_ref.storage.extension import ParameterExtension


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
