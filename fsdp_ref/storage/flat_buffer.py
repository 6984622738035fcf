"""The memory of full parameters: freed and refilled in place.

A :class:`FlatBuffer` is one flat tensor whose storage is freed and refilled in place: the tensor object, and every
view of it, outlives its memory. That is what lets autograd and modules hold views of parameters while the bytes are
gone (the mechanism of FSDP's flat parameter; Source: Zhao et al., "PyTorch FSDP", section 4.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_ref.compat import storage_key


class FlatBuffer:
    """One flat tensor that is allocated only while somebody needs it.

    Attributes:
        tensor: the flat tensor; reading it while it is not allocated is undefined behaviour.
        key: what identifies its storage.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        # A buffer first needed under inference_mode() must still serve training later.
        with torch.inference_mode(False):
            self.tensor: Tensor = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = numel * self.tensor.element_size()
        self._storage = self.tensor.untyped_storage()
        self.key = storage_key(self.tensor)
        self._storage.resize_(0)

    @property
    def allocated(self) -> bool:
        """Whether the storage has its memory (a buffer of no elements always has)."""
        return self._storage.size() == self._nbytes

    def allocate(self) -> None:
        """Give the storage its memory, with undefined content; nothing happens when it has it."""
        if not self.allocated:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Take the memory away; nothing happens when it is gone."""
        if self._nbytes and self.allocated:
            self._storage.resize_(0)
