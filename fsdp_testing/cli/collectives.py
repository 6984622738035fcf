"""Compares a backend with gloo: every collective, by dtype and size, on two ranks of each.

Inputs are small whole numbers, so that sums are exact in every dtype and in any order: equal bits are due.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_testing.base.backends import backend_named
from fsdp_testing.errors import BackendUnavailable, InvalidArgument, WorldFailed

if TYPE_CHECKING:
    import torch

RANKS = 2
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "uint8")
SIZES = (1, 1023, 1 << 18)
"""Elements that each rank gives to each other one."""
SECONDS = 60.0
REFUSED = "refused: "
EQUAL, WRONG, REFUSES, UNCOMPARED, LOST = "equal", "WRONG", "refuses", "gloo refuses", "LOST"
BAD = (WRONG, LOST)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one collective with one dtype: a word of this module, and the reason."""

    collective: str
    dtype: str
    word: str
    why: str = ""


def check_backend(name: str) -> None:
    """Refuse a backend that cannot be compared here.

    Raises:
        InvalidArgument: There is no such backend, or its collectives move nothing.
        BackendUnavailable: It cannot run so many ranks here.
    """
    backend = backend_named(name)
    if backend.single_process or not backend.makes_group:
        raise InvalidArgument(f"doctor --backend: expected one with collectives between ranks, got {name!r}.")
    if reason := backend.unavailable(RANKS):
        raise BackendUnavailable(f"doctor --backend {name}: expected it to run {RANKS} ranks here, got: {reason}")


def compared(name: str) -> Iterator[Answer]:
    """Yield the answer for every collective and dtype, as soon as it is known."""
    for collective in COLLECTIVES:
        expected, got = (_asked(collective, backend) for backend in ("gloo", name))
        for dtype in DTYPES:
            yield Answer(collective, dtype, *_answer(dtype, expected, got))


def _answer(dtype: str, expected: dict[str, list[str]] | str, got: dict[str, list[str]] | str) -> tuple[str, str]:
    if isinstance(expected, str):
        return UNCOMPARED, expected
    if isinstance(got, str):
        return LOST, got
    for size, *ranks in zip(SIZES, expected[dtype], got[dtype], strict=True):
        due, given = ranks
        if due.startswith(REFUSED):
            return UNCOMPARED, due.removeprefix(REFUSED)
        if given.startswith(REFUSED):
            return REFUSES, given.removeprefix(REFUSED)
        if due != given:
            return WRONG, f"{size:,} elements: gloo gives {due}, this backend gives {given}"
    return EQUAL, ""


def _asked(collective: str, backend: str) -> dict[str, list[str]] | str:
    """Return the results of all ranks at each size, by dtype; or what happened to the ranks."""
    from fsdp_testing import run_ranks

    try:
        device = backend_named(backend).device_type
        ranks = run_ranks(on_rank, collective, device, size=RANKS, backend=backend, timeout=SECONDS)
    except WorldFailed as error:
        return next(iter(str(error).splitlines()), "ranks were lost")
    return {dtype: [_joined([rank[dtype][place] for rank in ranks]) for place in range(len(SIZES))] for dtype in DTYPES}


def _joined(ranks: list[str]) -> str:
    refusals = [text for text in ranks if text.startswith(REFUSED)]
    return refusals[0] if refusals else " and ".join(f"rank {rank} {text}" for rank, text in enumerate(ranks))


# ------------------------------------------------------------------------------------------------ on the ranks
def on_rank(collective: str, device: str) -> dict[str, list[str]]:
    """Return, by dtype and size, the first numbers and a digest of this rank's result; every rank calls."""
    return {dtype: [_one(collective, dtype, size, device) for size in SIZES] for dtype in DTYPES}


def _one(collective: str, dtype: str, size: int, device: str) -> str:
    import torch
    import torch.distributed as dist

    # Neighbours differ, and so do ranks; twice the largest number fits in every dtype.
    numbers = (torch.arange(RANKS * size, device=device) * 7 + 3 * dist.get_rank()) % 31
    try:
        made = COLLECTIVES[collective](numbers.to(getattr(torch, dtype))).cpu()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return REFUSED + f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    digest = hashlib.sha256(made.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]
    return f"{made[:3].tolist()}... ({digest})"


def _reduced(numbers: torch.Tensor, operation: str) -> torch.Tensor:
    import torch.distributed as dist

    dist.all_reduce(numbers, getattr(dist.ReduceOp, operation))
    return numbers


def _rooted(numbers: torch.Tensor, name: str) -> torch.Tensor:
    """Broadcast from, or reduce to, the last rank; after a reduce only the root's result counts."""
    import torch.distributed as dist

    getattr(dist, name)(numbers, RANKS - 1)
    return numbers if name == "broadcast" or dist.get_rank() == RANKS - 1 else numbers.new_zeros(1)


def _into(numbers: torch.Tensor, name: str, share: float) -> torch.Tensor:
    """Return the result of a collective into one tensor, `share` times as long."""
    import torch.distributed as dist

    made = numbers.new_zeros(int(len(numbers) * share))
    getattr(dist, name)(made, numbers)
    return made


def _listed(numbers: torch.Tensor) -> torch.Tensor:
    import torch
    import torch.distributed as dist

    made = [torch.zeros_like(numbers) for _ in range(RANKS)]
    dist.all_gather(made, numbers)
    return torch.cat(made)


def _neighbours(numbers: torch.Tensor) -> torch.Tensor:
    import torch
    import torch.distributed as dist

    rank, made = dist.get_rank(), torch.zeros_like(numbers)
    sent = dist.P2POp(dist.isend, numbers, (rank + 1) % RANKS)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, made, (rank - 1) % RANKS)]):
        work.wait()
    return made


COLLECTIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce, sum": lambda numbers: _reduced(numbers, "SUM"),
    "all_reduce, max": lambda numbers: _reduced(numbers, "MAX"),
    "all_gather": _listed,
    "all_gather_into_tensor": lambda numbers: _into(numbers, "all_gather_into_tensor", RANKS),
    "reduce_scatter_tensor": lambda numbers: _into(numbers, "reduce_scatter_tensor", 1 / RANKS),
    "all_to_all_single": lambda numbers: _into(numbers, "all_to_all_single", 1),
    "broadcast": lambda numbers: _rooted(numbers, "broadcast"),
    "reduce": lambda numbers: _rooted(numbers, "reduce"),
    "send and receive": _neighbours,
}
