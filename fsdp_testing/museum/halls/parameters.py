"""Bugs of parameters that are odd, shared, edited, cast or copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_ref.access import full_state
from fsdp_ref.build import plan, resolve
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.originals import Originals
from fsdp_testing.museum.exhibit import Exhibit
from fsdp_testing.museum.planting import instead, planting


def _no_scalars(original: Any, params: Any, fqns: Any, *, use_orig_params: bool) -> Any:
    for param, fqn in zip(params, fqns):
        if param.ndim == 0:
            raise ValueError(
                f"FSDP doesn't support scalar parameters. Change {fqn} to a 1D tensor with numel equal to 1."
            )
    return original(params, fqns, use_orig_params=use_orig_params)


def _first_place_only(original: Any, self: Any, handle: Any, params: Any) -> None:
    original(self, handle, [dataclasses.replace(managed, sites=managed.sites[:1]) for managed in params])


def _one_copy_for_each_unit(original: Any, *args: Any) -> Any:
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


def _precision_stays(_original: Any, self: Any, dtype: torch.dtype) -> None:
    self.reshard()
    self.replace_shard(self.shard_S.to(dtype))


def _prefix_stays(_original: Any, name: str) -> str:
    return name


def _buffers_left_empty(original: Any, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    original(module, state, prefix, metadata)
    if prefix:
        return
    buffers: Mapping[str, Any] = dict(module.named_buffers())
    wanted = {full_state.clean_tensor_name(name) for name in buffers}
    for key in [key for key in state if key in wanted]:
        state[key] = torch.zeros_like(state[key])


EXHIBITS = (
    Exhibit(
        id="B015",
        title="names in a state dict keep the prefixes of wrappers",
        story="Names were made relative to another module than the one that was saved, so that they kept a wrapper's "
        "prefix and the dict fits no other model.",
        source="pytorch PR 90933",
        plant=planting((full_state, "clean_tensor_name", instead(_prefix_stays))),
        checks=("full_state_dict.other_wrapping",),
        silent=False,
    ),
    Exhibit(
        id="B078",
        title="a model that was cast goes on in its old dtype",
        story="double() after the first forward changed what users hold; buffers and reductions were made for the dtype "
        "of construction.",
        source="found by this project in torch's FSDP1 and FSDP2",
        plant=planting((FlatHandle, "set_precision", instead(_precision_stays))),
        checks=("conversion.dtype",),
        silent=False,
    ),
    Exhibit(
        id="B079",
        title="scalar parameters are refused",
        story="A learnt temperature or loss scale of shape () ended construction; the message asks users to change the "
        "model.",
        source="torch.distributed.fsdp, _flat_param.py",
        plant=planting((resolve, "check_params", instead(_no_scalars))),
        checks=("sizes.zero_dim",),
        silent=False,
    ),
    Exhibit(
        id="B081",
        title="only the first place of a tied parameter is sharded",
        story="Places were found with duplicates removed: the second module that holds a tied weight kept the old "
        "tensor, and what it learnt was lost.",
        source="pytorch PR 98912, PR 99448",
        plant=planting((Originals, "__init__", instead(_first_place_only))),
        checks=("shared.within_a_unit",),
    ),
    Exhibit(
        id="B139",
        title="a parameter that two units share is untied",
        story="Each unit flattened and reduced its own copy: each holds a part of the gradient, and the weights drift "
        "apart.",
        source="pytorch/torchtitan issue 2817, pytorch PR 176257, PR 179532",
        plant=planting((plan, "_walk", instead(_one_copy_for_each_unit))),
        checks=("shared.across_units",),
    ),
    Exhibit(
        id="B157",
        title="buffers are left out when a model is loaded from a full state dict",
        story="Loading from a full state handled parameters; buffers stayed what uninitialised memory held.",
        source="huggingface/accelerate PR 3898, PR 3921",
        plant=planting((full_state, "_after_save", instead(_buffers_left_empty))),
        checks=("full_state_dict.buffers",),
    ),
)
