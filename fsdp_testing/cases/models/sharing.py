"""Models that use something more than once: a parameter, a module, a call."""

from __future__ import annotations

from torch import nn

from fsdp_testing.cases.models.model import Chain, Family, float_input

ZOO = Family()


@ZOO.model("tied_within", float_input(5), ("pair", "free"), "tied uneven", "shared_parameters")
def tied_within() -> nn.Module:
    """One parameter under two names inside one unit."""
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    return Chain("pair free", pair=Chain("first second", first=first, second=second), free=nn.Linear(5, 5))


@ZOO.model(
    "tied_across",
    float_input(5),
    ("first", "middle", "last"),
    "tied uneven",
    "shared_parameters shared_across_units",
)
def tied_across() -> nn.Module:
    """One parameter in two units."""
    first, last = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
    last.weight = first.weight
    return Chain("first middle last", first=first, middle=nn.Linear(5, 5), last=last)


@ZOO.model("called_twice", float_input(7), ("again", "between"), "reused_module uneven", "reused_modules")
def called_twice() -> nn.Module:
    """A unit that runs twice in one forward."""
    return Chain("again between again", again=nn.Linear(7, 7), between=nn.Linear(7, 7))


@ZOO.model(
    "registered_twice",
    float_input(7),
    ("layer", "other"),
    "reused_module tied uneven",
    "shared_parameters reused_modules",
)
def registered_twice() -> nn.Module:
    """A unit under two names."""
    layer = nn.Linear(7, 7)
    return Chain("layer other alias", layer=layer, other=nn.Linear(7, 7), alias=layer)
