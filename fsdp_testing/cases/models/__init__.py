"""The models for checks: small ones with one trait each and two real ones; none contains code for sharding.

`MODELS[name]` gives a `ZooModel`: `build(seed, dtype)`, `make_input(seed, rank, step, batch, dtype)`, `loss(output)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fsdp_testing.cases.models import inputs, plain, transformers, unusual
from fsdp_testing.cases.models.model import Inputs, ZooModel, loss_of, structure_of, tensors_in

__all__ = ["MODELS", "Inputs", "ZooModel", "loss_of", "structure_of", "tensors_in"]

#: Every model by name.
MODELS: Mapping[str, ZooModel] = MappingProxyType(
    {model.name: model for family in (plain, inputs, unusual, transformers) for model in family.ZOO}
)
