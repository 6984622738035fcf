"""Bugs of parameters that are odd, shared, edited, cast or copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from planting import known_bug
from torch import nn

from fsdp_ref.build import plan, resolve
from fsdp_ref.checkpoint import model_state
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.originals import Originals


@known_bug("B015", model_state, "clean_tensor_name", "pytorch PR 90933", "full_state_dict.other_wrapping", silent=False)
def prefix_stays(_original: Any, name: str) -> str:
    """Names in a state dict keep the prefixes of wrappers.

    Names were made relative to another module than the one that was saved, so that they kept a wrapper's prefix and
    the dict fits no other model.
    """
    return name


@known_bug(
    "B078",
    FlatHandle,
    "set_precision",
    "found by this project in torch's FSDP1 and FSDP2",
    "conversion.dtype",
    silent=False,
)
def precision_stays(_original: Any, self: Any, dtype: torch.dtype) -> None:
    """A model that was cast goes on in its old dtype.

    double() after the first forward changed what users hold; buffers and reductions were made for the dtype of
    construction.
    """
    self.reshard()
    self.replace_shard(self.shard_S.to(dtype))


@known_bug("B079", resolve, "check_params", "torch.distributed.fsdp, _flat_param.py", "sizes.zero_dim", silent=False)
def no_scalars(original: Any, params: Any, fqns: Any, *, use_orig_params: bool) -> Any:
    """Scalar parameters are refused.

    A learnt temperature or loss scale of shape () ended construction; the message asks users to change the model.
    """
    for param, fqn in zip(params, fqns):
        if param.ndim == 0:
            raise ValueError(
                f"FSDP doesn't support scalar parameters. Change {fqn} to a 1D tensor with numel equal to 1."
            )
    return original(params, fqns, use_orig_params=use_orig_params)


@known_bug("B081", Originals, "__init__", "pytorch PR 98912, PR 99448", "shared.within_a_unit")
def first_place_only(original: Any, self: Any, handle: Any, params: Any) -> None:
    """Only the first place of a tied parameter is sharded.

    Places were found with duplicates removed: the second module that holds a tied weight kept the old tensor, and
    what it learnt was lost.
    """
    original(self, handle, [dataclasses.replace(managed, sites=managed.sites[:1]) for managed in params])


@known_bug("B139", plan, "_walk", "pytorch/torchtitan issue 2817, pytorch PR 176257, PR 179532", "shared.across_units")
def one_copy_for_each_unit(original: Any, *args: Any) -> Any:
    """A parameter that two units share is untied.

    Each unit flattened and reduced its own copy: each holds a part of the gradient, and the weights drift apart.
    """
    walk = original(*args)
    for param, places in list(walk.places.items()):
        first = places[0].chain[-1][0]
        others = [place for place in places if place.chain[-1][0] is not first]
        if not others:
            continue
        walk.places[param] = [place for place in places if place.chain[-1][0] is first]
        copied = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
        for place in others:
            setattr(place.module, place.name, copied)
        walk.places[copied] = others
    return walk


@known_bug("B157", model_state, "_after_save", "huggingface/accelerate PR 3898, PR 3921", "full_state_dict.buffers")
def buffers_left_empty(original: Any, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Buffers are left out when a model is loaded from a full state dict.

    Loading from a full state handled parameters; buffers stayed what uninitialised memory held.
    """
    original(module, state, prefix, metadata)
    if prefix:
        return
    buffers: Mapping[str, Any] = dict(module.named_buffers())
    wanted = {model_state.clean_tensor_name(name) for name in buffers}
    for key in [key for key in state if key in wanted]:
        state[key] = torch.zeros_like(state[key])
