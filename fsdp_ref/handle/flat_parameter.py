"""How is a flat parameter told from any other parameter?

By a mark. Its type is ``nn.Parameter``, because optimizers choose their fast paths by exact type; ``isinstance(p,
FlatParameter)`` looks for the mark. State lives in the handle; the few attributes on the tensor are constants that
tools read (their names follow ``torch.distributed.fsdp._flat_param``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_MARK = "_is_flat_param"


class _ByMark(type(nn.Parameter)):  # type: ignore[misc]  # the metaclass of Parameter has no public name
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) and getattr(instance, _MARK, False)


class FlatParameter(nn.Parameter, metaclass=_ByMark):
    """All parameters of one unit as one flat tensor; see the module's text for what its objects really are."""

    def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> FlatParameter:
        """Return a marked ``nn.Parameter`` over ``data``."""
        flat: Any = nn.Parameter(torch.empty(0) if data is None else data, requires_grad=requires_grad)
        setattr(flat, _MARK, True)
        return flat  # type: ignore[no-any-return]  # an nn.Parameter by type, a FlatParameter by mark
