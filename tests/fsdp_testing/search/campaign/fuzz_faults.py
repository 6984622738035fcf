"""Implementations that are right until they clip: one for each way in which a case may end badly."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from toy import Toy, ToyAdapter

KEPT: list[Any] = []


class Raises(Toy):
    """Every rank raises."""

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        raise RuntimeError(f"cannot clip to {max_norm}")


class OneRaises(Toy):
    """Rank 1 raises, rank 0 waits for it."""

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        if self.rank == 1:
            raise RuntimeError("rank 1 cannot clip")
        return super().clip(max_norm, norm_type)


class Dies(Toy):
    """Rank 1 is killed."""

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().clip(max_norm, norm_type)


class KillsHost(Toy):
    """A rank on a host that says it may be killed kills the process that forks ranks there, and waits for its own end.

    Where the variable is the path of a FIFO, whoever reads it kills the host.
    """

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        self.kill()
        return super().clip(max_norm, norm_type)

    @staticmethod
    def kill() -> None:
        asked = os.environ.get("KILL_THIS_HOST", "")
        if Path(asked).is_fifo():
            Path(asked).write_text("now", encoding="ascii")
            threading.Event().wait()
        if asked:
            pid = os.getpid()
            while b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            # Nobody else: an orphan's parent is a stranger.
            if b"fsdp_testing.cli.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
            threading.Event().wait()


class KillsHostAtOnce(KillsHost):
    """Already when a module is wrapped, which an adapter is examined by."""

    def __init__(self, *arguments: Any) -> None:
        self.kill()
        super().__init__(*arguments)


class Hangs(Toy):
    """Rank 1 never comes."""

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        if self.rank == 1:
            threading.Event().wait()
        return super().clip(max_norm, norm_type)


class Leaks(Toy):
    """Changes the default dtype of the process."""

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        return super().clip(max_norm, norm_type)


class GathersMore(Toy):
    """Rank 1 starts a collective that nobody joins, after all others of this model; the numbers are right."""

    extra: Any = None

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        if self.rank == 1:
            KEPT.append(dist.all_reduce(torch.zeros(1), async_op=True))
        return super().clip(max_norm, norm_type)


class Wrong(Toy):
    """Clips to half of what was asked."""

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        return super().clip(max_norm / 2, norm_type)


class Refuses(Toy):
    """Says that it cannot."""

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        raise NotImplementedError("clipping is not there yet")


class KeepsModels(Toy):
    """Is never let go."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        KEPT.append(self)


class Ending:
    """Does something when the collector frees it, which is after the last case of a batch has been reported."""

    def __init__(self) -> None:
        self.me = self


class Death(Ending):
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Sleep(Ending):
    def __del__(self) -> None:
        threading.Event().wait()


class DiesLate(Toy):
    """Rank 1 is killed when a model is freed that was clipped."""

    end: type[Ending] = Death

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        if self.rank == 1:
            self.ending = self.end()
        return super().clip(max_norm, norm_type)


class HangsLate(DiesLate):
    """Rank 1 never comes back from freeing a model that was clipped."""

    end = Sleep


class DiesOnce(Toy):
    """Rank 1 is killed when a model is freed that was clipped, as long as a file is there."""

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        once = Path(os.environ.get("FUZZ_DIES_ONCE", "/nowhere"))
        if self.rank == 1 and once.exists():
            once.unlink()
            self.ending = Death()
        return super().clip(max_norm, norm_type)


class DiesAtNext(Toy):
    """All ranks are killed when a model is built after one that was clipped."""

    def __init__(self, *arguments: Any) -> None:
        if "clipped" in KEPT:
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(*arguments)

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        KEPT.append("clipped")
        return super().clip(max_norm, norm_type)


class WrongMean(Toy):
    """Every micro-batch leaves gradients that are off, whatever else the case has."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        return super().mean(fqn, contribution) * 1.5


RAISES_IN_CLIP = ToyAdapter(Raises, "RAISES_IN_CLIP")
ONE_RAISES_IN_CLIP = ToyAdapter(OneRaises, "ONE_RAISES_IN_CLIP")
DIES_IN_CLIP = ToyAdapter(Dies, "DIES_IN_CLIP")
KILLS_HOST = ToyAdapter(KillsHost, "KILLS_HOST")
KILLS_HOST_AT_ONCE = ToyAdapter(KillsHostAtOnce, "KILLS_HOST_AT_ONCE")
HANGS_IN_CLIP = ToyAdapter(Hangs, "HANGS_IN_CLIP")
LEAKS_IN_CLIP = ToyAdapter(Leaks, "LEAKS_IN_CLIP")
GATHERS_MORE_IN_CLIP = ToyAdapter(GathersMore, "GATHERS_MORE_IN_CLIP")
WRONG_IN_CLIP = ToyAdapter(Wrong, "WRONG_IN_CLIP")
REFUSES_CLIP = ToyAdapter(Refuses, "REFUSES_CLIP")
KEEPS_MODELS = ToyAdapter(KeepsModels, "KEEPS_MODELS")
DIES_LATE = ToyAdapter(DiesLate, "DIES_LATE")
HANGS_LATE = ToyAdapter(HangsLate, "HANGS_LATE")
DIES_AT_NEXT = ToyAdapter(DiesAtNext, "DIES_AT_NEXT")
DIES_ONCE = ToyAdapter(DiesOnce, "DIES_ONCE")
WRONG_MEAN = ToyAdapter(WrongMean, "WRONG_MEAN")
