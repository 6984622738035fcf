"""The names under which implementations are registered; neither they nor torch are imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

ENTRY_POINT_GROUP = "fsdp_testing.implementations"

#: Name -> import string of what ships with fsdp_testing.
BUILT_IN: Mapping[str, str] = {
    "torch-ddp": "fsdp_testing.adapters.torch.ddp:IMPLEMENTATION",
    "torch-fsdp1": "fsdp_testing.adapters.torch.fsdp1:IMPLEMENTATION",
    "torch-fsdp1-flat": "fsdp_testing.adapters.torch.fsdp1:FLAT",
    "torch-fsdp2": "fsdp_testing.adapters.torch.fsdp2:IMPLEMENTATION",
    "fsdp_ref-wrapper": "fsdp_testing.adapters.ref.adapters:WRAPPER",
    "fsdp_ref-composable": "fsdp_testing.adapters.ref.adapters:COMPOSABLE",
    "fsdp_ref-flat": "fsdp_testing.adapters.ref.adapters:FLAT",
    "fsdp_ref-replicate": "fsdp_testing.adapters.ref.replicated:IMPLEMENTATION",
    "single-process": "fsdp_testing.adapters.single_process:IMPLEMENTATION",
}

_BUILT_IN_ORIGIN = "fsdp-testing"


@dataclass(frozen=True, slots=True)
class Registration:
    """One way to reach an implementation.

    Attributes:
        name: What a user types.
        target: Import string.
        origin: Distribution that registered it.
    """

    name: str
    target: str
    origin: str


def registrations() -> dict[str, tuple[Registration, ...]]:
    """Every registered name with its registrations (several are a conflict, reported when the name is loaded)."""
    found = [Registration(name, target, _BUILT_IN_ORIGIN) for name, target in BUILT_IN.items()]
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        origin = point.dist.name if point.dist is not None else "unknown distribution"
        found.append(Registration(point.name, point.value, origin))
    result: dict[str, tuple[Registration, ...]] = {}
    for registration in found:
        known = result.get(registration.name, ())
        # A distribution that is installed twice (editable and built) registers the same thing twice: no conflict.
        if all((k.target, k.origin) != (registration.target, registration.origin) for k in known):
            result[registration.name] = (*known, registration)
    return result


def names() -> tuple[str, ...]:
    """Every registered name, sorted."""
    return tuple(sorted(registrations()))
