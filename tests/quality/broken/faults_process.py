"""Faults that end or stop a rank."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch.distributed as dist
from toy import Toy, ToyAdapter


class Hangs(Toy):
    """Rank 1 waits for a barrier that rank 0 never enters, and rank 0 for a sum."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.rank == 1:
            dist.recv(self.shards["layers.0.bias"].detach().clone(), 0)
        return super().forward(*args, **kwargs)


class Dies(Toy):
    """Rank 1 is killed in its second forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if self.rank == 1 and self.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(*args, **kwargs)


class Leaves(Toy):
    """Rank 1 leaves with an exit code."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.rank == 1:
            os._exit(7)
        return super().forward(*args, **kwargs)


HANGS = ToyAdapter(Hangs, "HANGS")
DIES = ToyAdapter(Dies, "DIES")
LEAVES = ToyAdapter(Leaves, "LEAVES")
