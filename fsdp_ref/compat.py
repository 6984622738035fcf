"""Which names of torch differ between the supported versions, or exist only as private ones?

Everything in the package that is not torch's public, stable surface is imported here and nowhere else.
"""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase  # no public name covers every batch norm

__all__ = ["BatchNormBase"]
