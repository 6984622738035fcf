"""Bugs of mixed precision and buffers."""

from __future__ import annotations

import dataclasses
from typing import Any

from fsdp_ref.storage.precision import BufferCaster, Precision
from fsdp_testing.museum.exhibit import Exhibit
from fsdp_testing.museum.planting import instead, planting, skipped


def _reduces_in_full(original: Any, cls: Any, dtype: Any, policy: Any) -> Precision:
    precision: Precision = original(cls, dtype, policy)
    return precision if policy.reduce_dtype is not None else dataclasses.replace(precision, reduce=precision.original)


def _first_module_only(original: Any, self: Any) -> Any:
    return original(self)[:1]


def _same_is_mixed(original: Any, cls: Any, dtype: Any, policy: Any) -> Precision:
    if policy.param_dtype == dtype:
        raise AttributeError("'FlatParameter' object has no attribute '_mp_shard'")
    precision: Precision = original(cls, dtype, policy)
    return precision


EXHIBITS = (
    Exhibit(
        id="B003",
        title="a param_dtype equal to the parameters' own counts as mixed precision",
        story="The test was whether param_dtype is given, not whether it differs: a copy in low precision was expected "
        "where none had been made.",
        source="pytorch PR 90660, issue 90657",
        plant=planting((Precision, "of", instead(_same_is_mixed))),
        checks=("mixed_precision.same_dtype",),
        silent=False,
    ),
    Exhibit(
        id="B004",
        title="gradients are reduced in the wrong dtype when only param_dtype is given",
        story="reduce_dtype has to follow param_dtype unless it is given; the inference was missing, and gradients "
        "were reduced in full precision. The results differ in the last bits only.",
        source="pytorch PR 90660",
        plant=planting((Precision, "of", instead(_reduces_in_full))),
        checks=("mixed_precision.param_bfloat16",),
    ),
    Exhibit(
        id="B064",
        title="only one of several buffers is cast",
        story="A hook used the variable of an earlier loop: of all buffers one was handled, the others kept their dtype.",
        source="pytorch issue 93391",
        plant=planting((BufferCaster, "_floating", instead(_first_module_only))),
        checks=("mixed_precision.buffers",),
    ),
    Exhibit(
        id="B065",
        title="buffer_dtype is ignored",
        story="Buffers of modules without parameters stayed in float32 under a policy that lowers them.",
        source="pytorch issue 143900",
        plant=planting((BufferCaster, "lower", skipped())),
        checks=("mixed_precision.buffers",),
    ),
)
