"""Bugs of mixed precision and buffers."""

from __future__ import annotations

import dataclasses
from typing import Any

from planting import known_bug

from fsdp_ref.storage.precision import BufferCaster, Precision


@known_bug("B003", Precision, "of", "pytorch PR 90660, issue 90657", "mixed_precision.same_dtype", silent=False)
def same_is_mixed(original: Any, cls: Any, dtype: Any, policy: Any) -> Precision:
    """A param_dtype equal to the parameters' own counts as mixed precision.

    The test was whether param_dtype is given, not whether it differs: a copy in low precision was expected where none
    had been made.
    """
    if policy.param_dtype == dtype:
        raise AttributeError("'FlatParameter' object has no attribute '_mp_shard'")
    precision: Precision = original(cls, dtype, policy)
    return precision


@known_bug("B004", Precision, "of", "pytorch PR 90660", "mixed_precision.param_bfloat16")
def reduces_in_full(original: Any, cls: Any, dtype: Any, policy: Any) -> Precision:
    """Gradients are reduced in the wrong dtype when only param_dtype is given.

    reduce_dtype has to follow param_dtype unless it is given; the inference was missing, and gradients were reduced
    in full precision. The results differ in the last bits only.
    """
    precision: Precision = original(cls, dtype, policy)
    return precision if policy.reduce_dtype is not None else dataclasses.replace(precision, reduce=precision.original)


@known_bug("B064", BufferCaster, "_floating", "pytorch issue 93391", "mixed_precision.buffers")
def first_module_only(original: Any, self: Any) -> Any:
    """Only one of several buffers is cast.

    A hook used the variable of an earlier loop: of all buffers one was handled, the others kept their dtype.
    """
    return original(self)[:1]


@known_bug("B065", BufferCaster, "lower", "pytorch issue 143900", "mixed_precision.buffers")
def stays_as_it_is(_original: Any, *_args: Any) -> None:
    """The policy's buffer_dtype is ignored.

    Buffers of modules without parameters stayed in float32 under a policy that lowers them.
    """
