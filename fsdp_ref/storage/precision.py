"""The dtypes in which a unit computes, reduces and keeps its buffers, and the casts of inputs.

[Note: mixed precision] ``param_dtype`` counts as mixed only where it differs from the parameters' own dtype;
``reduce_dtype`` follows ``param_dtype`` unless it is given (pytorch PR 90660). Casts of inputs are ordinary autograd
operations, so that a gradient reaches the caller's tensor in the caller's dtype (PR 90921).
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fsdp_ref.config import MixedPrecision

_HEAP_TYPE = 1 << 9  # set in ``__flags__`` of classes that Python code defines


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of one flat parameter.

    Attributes:
        original: dtype of the parameters as the user made them; shards are kept in it.
        compute: dtype of forward and backward.
        reduce: dtype of gradient reduction.
        keep_reduced: reduced gradients stay in ``reduce``.
    """

    original: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    keep_reduced: bool = False

    @classmethod
    def of(cls, original: torch.dtype, policy: MixedPrecision) -> Precision:
        """Apply the rule of [Note: mixed precision]."""
        compute = policy.param_dtype or original
        return cls(original, compute, policy.reduce_dtype or compute, policy.keep_low_precision_grads)

    @property
    def grad(self) -> torch.dtype:
        """Dtype in which reduced gradients are handed to the optimizer."""
        return self.reduce if self.keep_reduced else self.original


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``fn`` to every tensor in nested containers, keeping their types.

    Known containers: mappings, lists, tuples, named tuples, sets, packed sequences and dataclasses (frozen ones too).
    Anything else is returned as it is. Containers in which nothing changed are returned themselves.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        data = fn(value.data)
        return value if data is value.data else value._replace(data=data)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, fn)
    if isinstance(value, Mapping):
        return _map_mapping(value, fn)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [map_tensors(item, fn) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        named = isinstance(value, tuple) and getattr(value, "_fields", None) is not None
        return type(value)(*items) if named else type(value)(items)
    return value


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors in nested containers (those that :func:`map_tensors` knows), in order."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    for value in values:
        map_tensors(value, collect)
    return found


def _map_mapping(value: Mapping[Any, Any], fn: Callable[[Tensor], Tensor]) -> Any:
    items = {key: map_tensors(item, fn) for key, item in value.items()}
    if all(items[key] is item for key, item in value.items()):
        return value
    if type(value) is dict:
        return items
    if isinstance(value, (dict, UserDict)):
        # Not ``value.copy()``, which makes a plain ``dict`` of a user's subclass and leaves its attributes out.
        copied = copy.copy(value)
        copied.update(items)
        return copied
    rebuilt: Any = type(value)
    return rebuilt(items)


def _map_dataclass(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    new = {name: map_tensors(item, fn) for name, item in old.items()}
    # Model libraries return dataclasses that are mappings too, of their fields and maybe of more.
    items = dict(value) if isinstance(value, dict) else {}
    mapped = {
        key: new[key] if key in old and old[key] is item else map_tensors(item, fn) for key, item in items.items()
    }
    if all(new[name] is old[name] for name in old) and all(mapped[key] is items[key] for key in items):
        return value
    # The built-in base's ``__new__``: Python refuses another type's, and the class's own may require arguments.
    maker: Any = next(base for base in type(value).__mro__ if not base.__flags__ & _HEAP_TYPE)
    result = maker.__new__(type(value))
    for key, item in mapped.items():
        maker.__setitem__(result, key, item)
    names = vars(value) if getattr(value, "__dict__", None) is not None else old
    for name, item in {**names, **new}.items():
        object.__setattr__(result, name, item)
    return result


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in ``value`` to ``dtype``, tracked by autograd; others pass unchanged."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t)


def move_to(value: Any, device: torch.device) -> Any:
    """Move every tensor in ``value`` to ``device``, tracked by autograd."""
    return map_tensors(value, lambda t: t.to(device) if t.device != device else t)


class BufferCaster:
    """Casts the floating-point buffers of one unit's modules to ``buffer_dtype``, remembering what they were.

    Args:
        modules: the modules whose nearest unit this is.
        dtype: the dtype of buffers in computation; None leaves them alone.
    """

    def __init__(self, modules: tuple[nn.Module, ...], dtype: torch.dtype | None) -> None:
        self._modules = modules
        self._dtype = dtype
        self._originals: dict[tuple[int, str], torch.dtype] = {}
        self.lowered = False

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferCaster:
        """Return the caster of the copied modules."""
        result = BufferCaster(tuple(copy.deepcopy(module, memo) for module in self._modules), self._dtype)
        memo[id(self)] = result
        ids = {id(old): id(new) for old, new in zip(self._modules, result._modules)}
        result._originals = {(ids[module], name): dtype for (module, name), dtype in self._originals.items()}
        result.lowered = self.lowered
        return result

    def original_dtype(self, module: nn.Module, name: str) -> torch.dtype | None:
        """Return the dtype that a buffer had before it was cast; None when it never was."""
        return self._originals.get((id(module), name))

    def lower(self) -> None:
        """Cast to the low dtype (once)."""
        if self._dtype is None or self.lowered:
            return
        self.lowered = True
        for module, name, buffer in self._floating():
            self._originals.setdefault((id(module), name), buffer.dtype)
            self._cast(module, name, buffer, self._dtype)

    def restore(self) -> None:
        """Cast back to the original dtypes (values keep the rounding they got)."""
        if not self.lowered:
            return
        self.lowered = False
        for module, name, buffer in self._floating():
            self._cast(module, name, buffer, self.original_dtype(module, name) or buffer.dtype)

    def _floating(self) -> list[tuple[nn.Module, str, Tensor]]:
        return [
            (module, name, buffer)
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        ]

    @staticmethod
    @torch.no_grad()
    def _cast(module: nn.Module, name: str, buffer: Tensor, dtype: torch.dtype) -> None:
        # The first forward may be an evaluation in inference mode, and training changes buffers in place afterwards.
        with torch.inference_mode(False):
            module._buffers[name] = buffer.to(dtype)
