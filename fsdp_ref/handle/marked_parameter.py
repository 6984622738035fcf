"""The mark of a flat parameter.

Its type is ``nn.Parameter``, because optimizers choose their fast paths by exact type; ``isinstance(p, FlatParameter)``
looks for the mark. State lives in the handle; attributes on the tensor are constants for tools, which
``torch_names`` adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fsdp_ref.handle.flat_handle import FlatHandle

_MARK = "_is_flat_param"

DESCRIBERS: Final[list[Callable[[FlatHandle], None]]] = []
"""Called with each handle whose flat parameter is complete; ``torch_names`` puts constants on it."""


class _ByMark(type(nn.Parameter)):  # type: ignore[misc]  # the metaclass of Parameter has no public name
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) and getattr(instance, _MARK, False)


class FlatParameter(nn.Parameter, metaclass=_ByMark):
    """All parameters of one unit as one flat tensor; the module's docstring describes its objects."""

    def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> FlatParameter:
        """Return a marked ``nn.Parameter`` over ``data``."""
        flat: Any = nn.Parameter(torch.empty(0) if data is None else data, requires_grad=requires_grad)
        setattr(flat, _MARK, True)
        return flat  # an nn.Parameter by type, a FlatParameter by mark


def like_flat(copied: nn.Parameter, original: nn.Parameter) -> nn.Parameter:
    """Give a copy of a flat parameter the marks and constants of the original."""
    # torch copies a parameter without its Python attributes.
    for name, value in vars(original).items():
        setattr(copied, name, value)
    return copied
