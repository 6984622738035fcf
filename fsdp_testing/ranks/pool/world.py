"""What code inside a rank sees of its world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fsdp_testing.errors import HarnessError, InvalidArgument

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from fsdp_testing.ranks.faults.injection import Injection


class World:
    """A rank's view of its world: rank, size, device, and the group of all ranks (torch's default process group).

    `pooled` says that the rank came from a pool, not from torchrun.
    """

    def __init__(self, rank: int, size: int, backend: str, device: str, *, pooled: bool = False) -> None:
        self.rank = rank
        self.pooled = pooled
        self.size = size
        self.backend = backend
        self._device = device

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, backend={self.backend!r}, device={self._device!r})"

    @cached_property
    def device(self) -> torch.device:
        """The device this rank computes on."""
        import torch

        return torch.device(self._device)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        import torch.distributed as dist

        group = dist.group.WORLD
        if group is None:
            raise HarnessError(
                "world.group: expected the world's process group, got none: the test destroyed it, or its backend is 'bare'. "
                "Make groups of your own with torch.distributed.new_group and destroy those."
            )
        return group

    @cached_property
    def mesh(self) -> DeviceMesh:
        """1-D mesh over all ranks, on the world's device type; made on first use (by all ranks)."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.device.type, (self.size,))

    def barrier(self) -> None:
        """Wait until every rank is here. Collectives: one barrier on the world's group; all ranks must join."""
        import torch.distributed as dist

        dist.barrier(self.group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Picklable `value` of every rank, by rank. Collectives: all ranks must join."""
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    @contextmanager
    def check_streams(self) -> Iterator[None]:
        """Fail if two streams of this rank use the same memory in no fixed order.

        Inside the context, streams and events of the device's module (`torch.cpu` on the CPU) are recorded. Make the model
        inside: streams made earlier are not recorded. Collectives: none.

        Raises:
            AssertionError: If there are races, when the context ends without an exception. Lists every race with both code
                lines.
            HarnessError: The device has no streams.
        """
        from fsdp_testing.ranks.streams.observation import observe
        from fsdp_testing.ranks.streams.races import StreamAccount

        with observe(self.device) as history:
            yield
        account = StreamAccount.of(history)
        if account.races:
            raise AssertionError(f"rank {self.rank} has {account.race_count} races on its streams:\n{account}")

    def inject(self, *faults: str) -> Injection:
        """Inject faults into this rank, `world.inject("delay=0.5@rank=1,collective=3")`, until teardown or the end of the call.

        As a context manager it ends with the context. Call it on every rank: each rank takes the faults that name it. Places
        are counted from this call on. Collectives: none.

        Raises:
            InvalidArgument: A text is not a fault, or names a rank outside this world; the message lists kinds and places.
            HarnessError: The test or call ends without an exception, and a fault of this rank was not reached.
        """
        from fsdp_testing.ranks.faults.fault import Fault
        from fsdp_testing.ranks.faults.injection import inject

        return inject([Fault.parse(text, self.size) for text in faults], self.rank)

    def assert_equal_across_ranks(self, tensor: torch.Tensor, name: str = "tensor") -> None:
        """Fail on every rank unless `tensor` has the same dtype, shape and bits on all ranks.

        Bits, not values: -0.0 differs from 0.0 and a NaN equals itself. Collectives: all ranks must join.

        Raises:
            AssertionError: Names the ranks that differ from rank 0, the first difference and its size.
            InvalidArgument: It is no tensor.
        """
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(
                f"assert_equal_across_ranks: expected a tensor, got {type(tensor).__name__}. Compare other values with "
                "`all_gather_object`."
            )
        plain = tensor.detach().cpu().contiguous()
        copies = self.all_gather_object(plain)
        problems = []
        for rank, copy in enumerate(copies):
            if copy.dtype != copies[0].dtype or copy.shape != copies[0].shape:
                got = f"{copy.dtype}{list(copy.shape)}"
                problems.append(f"rank {rank} holds {got}, rank 0 {copies[0].dtype}{list(copies[0].shape)}")
                continue
            bits = [c.reshape(-1).view(torch.uint8).reshape(c.numel(), -1) for c in (copies[0], copy) if c.numel()]
            if bits and not torch.equal(bits[0], bits[1]):
                problems.append(_first_difference(copies[0], copy, bits, rank))
        if problems:
            raise AssertionError(f"{name} differs across ranks: " + "; ".join(problems))


def _first_difference(first: torch.Tensor, copy: torch.Tensor, bits: list[torch.Tensor], rank: int) -> str:
    differing = (bits[0] != bits[1]).any(dim=1).nonzero().reshape(-1)
    at = int(differing[0])
    mine, theirs = first.reshape(-1)[at].item(), copy.reshape(-1)[at].item()
    return (
        f"rank {rank} differs from rank 0 in {differing.numel()} of {first.numel()} elements, "
        f"first at flat index {at}: {theirs!r} against {mine!r}"
    )


_world: World | None = None


def current_world() -> World:
    """Return the world of the rank that this code runs in.

    Raises:
        HarnessError: When called outside a rank.
    """
    if _world is None:
        raise HarnessError(
            "current_world: expected to be called inside a rank, got the controlling process. "
            "Call it in a function given to run_ranks, worlds(...).run, or in a test marked with `world`."
        )
    return _world


def inside_rank() -> bool:
    """Return whether this process is a rank of a world."""
    return _world is not None


def enter(world: World | None) -> None:
    """Make `world` the current one of this process."""
    global _world
    _world = world
