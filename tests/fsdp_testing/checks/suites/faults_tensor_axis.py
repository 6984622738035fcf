"""FSDP2 over tensor parallelism with one fault each; ranks import this module by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_testing.adapters import defaults
from fsdp_testing.adapters.adapter import TorchStyle
from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.adapters.torch import fsdp2, saved_state


def computing(layout: str, lies: Callable[[Any], Any]) -> Callable[[nn.Module, Setup], nn.Module]:
    """FSDP2, where modules of a layout compute with each rank's own parts, and say that their output lies otherwise.

    Args:
        layout: Whose modules.
        lies: Says how the output lies, from the input.
    """

    def with_own_parts(module: nn.Module, x: Any) -> Any:
        from torch.distributed.tensor import DTensor

        own = nn.Module()  # to copy a unit of FSDP2 is to make it anew
        vars(own).update(vars(module))
        own._parameters = {name: each if each is None else each.to_local() for name, each in own._parameters.items()}
        return DTensor.from_local(type(module).forward(own, x.to_local()), x.device_mesh, **lies(x))

    def wrap(module: nn.Module, setup: Setup) -> nn.Module:
        for fqn, given in setup.layouts:
            inner = module.get_submodule(fqn)
            if given.startswith(layout) and "Embed" not in type(inner).__name__:
                vars(inner)["forward"] = partial(with_own_parts, inner)
        return fsdp2.wrap(module, setup)

    return wrap


def whole(_x: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return {"placements": [Replicate()]}


def as_the_input(x: Any) -> Any:
    return {"placements": x.placements, "shape": x.shape, "stride": x.stride()}


def clip_by_local_powers(over: str, model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip by what ranks have, added up over one axis, or over both whether an element is there twice or not."""
    import torch.distributed as dist

    grads: list[Any] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if norm_type == float("inf") or not grads:
        return defaults.clip_grad_norm(model, max_norm, norm_type)
    total = torch.stack([grad.to_local().abs().pow(norm_type).sum() for grad in grads]).sum()
    dist.all_reduce(total, group=grads[0].device_mesh["data"].get_group() if over == "data" else dist.group.WORLD)
    norm = total ** (1 / norm_type)
    for grad in grads:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def state_of_first_part(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return a full state that has the first tensor-parallel rank's part in the place of all parts."""
    state = dict(saved_state.full_state_dict(model))
    for fqn, parameter in model.named_parameters():
        placement: Any = parameter.placements[-1] if parameter.device_mesh.ndim == 2 else None
        if placement is not None and placement.is_shard():
            first = state[fqn].chunk(2, placement.dim)[0]
            both = torch.cat([first, first], placement.dim)
            state[fqn] = both.narrow(placement.dim, 0, state[fqn].shape[placement.dim])
    return state


def over_shards_alone(module: nn.Module, setup: Setup) -> nn.Module:
    """Leave the replicas of hybrid sharding out."""
    assert setup.mesh is not None
    return fsdp2.wrap(module, replace(setup, mesh=setup.mesh["shard"], strategy="full_shard"))


def faulty(name: str, **changed: Any) -> TorchStyle:
    return replace(fsdp2.IMPLEMENTATION, name=name, built_on=name, **changed)


PARTIAL_SUMS = faulty("partial-sums", wrap=computing("rowwise", whole))
OWN_GRADIENT = faulty("own-gradient", wrap=computing("sequence", as_the_input))
NORM_OF_ONE_AXIS = faulty("norm-of-one-axis", clip_grad_norm=partial(clip_by_local_powers, "data"))
COUNTED_TWICE = faulty("counted-twice", clip_grad_norm=partial(clip_by_local_powers, "both"))
FIRST_PART = faulty("first-part", full_state_dict=state_of_first_part)
WITHOUT_REPLICAS = faulty("without-replicas", wrap=over_shards_alone)
