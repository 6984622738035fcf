"""A world under torchrun: its ranks are torchrun's processes, and torchrun's exit status is the verdict.

Every process runs the call once, and all get the results. A process in which the call raises exits with that error, and
torchrun's agent ends the others, which may wait for it in a collective.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fsdp_testing.base.backends import RankPlace, backend_named
from fsdp_testing.base.env import Launch
from fsdp_testing.errors import BackendUnavailable, HarnessError, InvalidArgument
from fsdp_testing.ranks.faults.fault import end_all, never_reached
from fsdp_testing.ranks.pool import world as world_place
from fsdp_testing.ranks.pool.targets import resolve, target_of


def run_attached(
    launch: Launch,
    function: Callable[..., Any] | str,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    size: int,
    backend: str,
) -> list[Any]:
    """Call `function` in this process as one rank of torchrun's world.

    Args:
        launch: How torchrun started this process.
        function: As in `run_ranks`, but it need not be importable, since it is not sent.
        call: Its arguments.
        size: Must be the number of torchrun's processes.
        backend: A backend whose ranks are processes.

    Returns:
        Results by rank, on every rank.

    Collectives: one all_gather_object on the default group; every process must come here.

    Raises:
        InvalidArgument: For another size, or a backend of one process.
        BackendUnavailable: With the reason.
        Exception: Whatever the function raises in this process.
    """
    if size != launch.world_size:
        raise InvalidArgument(
            f"run_ranks: expected size={launch.world_size}, the number of torchrun's processes, got {size}. "
            "Under torchrun its processes are the world; pass their number, or run without torchrun."
        )
    world = join(launch, backend)
    args, kwargs = call
    with _ledger_of(world.rank):
        try:
            value = (resolve(target_of(function)) if isinstance(function, str) else function)(*args, **kwargs)
        finally:
            # This process lives on: faults that the function injected must not reach later calls.
            unreached = end_all()
    if unreached:
        raise HarnessError(never_reached(unreached))
    return world.all_gather_object(value)


@contextmanager
def _ledger_of(rank: int) -> Iterator[None]:
    """Record this process's collectives, which faults count; ranks of torchrun share no memory, so none is compared."""
    # Here: other systems lack what the ledger needs to be imported, and are refused in a sentence.
    from fsdp_testing.ranks.ledger import interception
    from fsdp_testing.ranks.ledger.memory import LedgerMemory, create
    from fsdp_testing.ranks.ledger.recorder import Recorder

    descriptor = create(1)
    memory = LedgerMemory(descriptor, 1)
    os.close(descriptor)
    recorder = Recorder(memory, rank, compare=False)
    recorder.start_job(1)
    outer = interception.activate(recorder)
    try:
        yield
    finally:
        interception.activate(outer)
        memory.close()


def join(launch: Launch, backend: str) -> world_place.World:
    """This process's view of torchrun's world; the first call makes the group, and every process must come here.

    Raises:
        InvalidArgument: For a backend of one process, or a different backend than in the first call.
        BackendUnavailable: With the reason.
    """
    if not world_place.inside_rank():
        world_place.enter(_joined(launch, backend))
    world = world_place.current_world()
    if world.backend != backend:
        raise InvalidArgument(
            f"world: expected backend {world.backend!r}, with which torchrun's processes have joined, got {backend!r}. "
            "Run the tests of each backend under a separate torchrun."
        )
    return world


def _joined(launch: Launch, name: str) -> world_place.World:
    import torch.distributed as dist

    backend = backend_named(name)
    if backend.single_process:
        raise InvalidArgument(f"run_ranks: expected a backend of processes under torchrun, got {name!r}.")
    reason = backend.unavailable(launch.local_world_size)
    if reason is not None:
        raise BackendUnavailable(f"backend {name!r} cannot run a world of {launch.world_size} here: {reason}.")
    devices = backend.device_count() if backend.device_count is not None else 0
    # torchrun numbers the local ranks; if there are fewer devices, local ranks share them in turn.
    index = launch.local_rank % devices if devices else launch.local_rank
    if backend.prepare is not None:
        backend.prepare(RankPlace(launch.rank, launch.world_size, index))
    if not dist.is_initialized():
        # The agent's own store, as torchrun means it to be used.
        dist.init_process_group(backend.torch_backend, init_method="env://")
        # A gloo thread that is alive when the interpreter ends can abort the process (pytorch #179291, #190489), and torchrun
        # would call that a failure. Only for a group made here: users destroy their own groups.
        atexit.register(_leave)
    device = backend.device_type if backend.device_type == "cpu" else f"{backend.device_type}:{index}"
    return world_place.World(launch.rank, launch.world_size, name, device)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
