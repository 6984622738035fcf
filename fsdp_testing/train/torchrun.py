"""How does code that expects torchrun find itself started by it, inside a rank that has a world already?

torchrun's variables are set, and `init_process_group` takes the world that is there over instead of failing with
"initialize twice". Afterwards everything is as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from fsdp_testing.base import env
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.ranks.pool.world import World

# No agent serves a store there: who joins a store of its own instead of the world's group is refused a connection at once.
_ADDRESS, _PORT = "127.0.0.1", 29500


def variables(world: World) -> dict[str, str | None]:
    """Return the variables that torchrun sets in each process of one host."""
    return env.as_launched(world.rank, world.size, _ADDRESS, _PORT) | {
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@contextmanager
def as_torchrun_starts(world: World) -> Iterator[None]:
    """Set torchrun's variables, and let the code make and destroy "its" default group, which is the world's.

    Raises:
        InvalidArgument: From `init_process_group`, for another number of ranks than the world has.
    """
    real_destroy = dist.destroy_process_group
    mine = dist.group.WORLD

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        del backend, args
        for name, wanted in (("world_size", world.size), ("rank", world.rank)):
            given = kwargs.get(name, -1)
            if given not in (-1, wanted):
                raise InvalidArgument(
                    f"init_process_group: expected {name}={wanted}, as torchrun says in {name.upper()}, got {given}. "
                    "Read it from the environment."
                )

    def destroy_process_group(group: Any = None) -> None:
        if group is not None and group is not mine:
            real_destroy(group)

    with env.temporary(variables(world)), ExitStack() as stack:
        for place in (dist, dist.distributed_c10d):
            stack.enter_context(mock.patch.object(place, "init_process_group", init_process_group))
            stack.enter_context(mock.patch.object(place, "destroy_process_group", destroy_process_group))
        yield
