"""State of torch that one job may leave to the next and that has no public name; each entry says what it is for."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any


def module_hooks() -> tuple[dict[int, Any], ...]:
    """Return the hooks that `torch.nn.modules.module.register_module_*` installed: the public API can add but not list them."""
    from torch.nn.modules import module

    names = (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_forward_hooks_always_called",
        "_global_forward_hooks_with_kwargs",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
        "_global_buffer_registration_hooks",
        "_global_module_registration_hooks",
        "_global_parameter_registration_hooks",
    )
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


def optimizer_hooks() -> tuple[dict[int, Any], ...]:
    """Return the hooks on the steps of all optimizers, which `register_optimizer_step_*` can add but not list."""
    from torch.optim import optimizer

    return optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks


def mode_depths() -> tuple[int, int]:
    """Return the depths of the dispatch and of the function mode stack, for which torch has no public name."""
    import torch

    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def process_groups() -> dict[Any, Any]:
    """Return every process group of this process, with torch's record of it; the public API lists only the default group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map


def process_group_count() -> int:
    """Return how many groups this process has ever made: the number names the next group, so ranks must agree on it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.group_count


def forget_dtensor_layouts() -> None:
    """Clear DTensor's cached layouts. They hold meshes, and a new mesh of the same ranks equals the old one.

    No public name clears them; without this a warm world's next job communicates over destroyed groups.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


def saved_tensors_hooks() -> Any:
    """Return the innermost hooks of `torch.autograd.graph.saved_tensors_hooks`, which only its context takes away."""
    import torch

    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def leave_saved_tensors_hooks(before: Any) -> None:
    """Leave contexts of `saved_tensors_hooks` until the hooks `before` are the innermost ones."""
    import torch

    while saved_tensors_hooks() not in (None, before):
        torch._C._autograd._pop_saved_tensors_default_hooks()


def forward_mode_level() -> int:
    """Return how many levels of `torch.autograd.forward_ad` are entered, less one: the API enters and exits them."""
    from torch.autograd import forward_ad

    return forward_ad._current_level


def runs_backward_on_threads() -> bool:
    """Return what `torch.autograd.set_multithreading_enabled` has set; there is no getter."""
    import torch

    return torch._C._is_multithreading_enabled()


def print_options() -> dict[str, Any]:
    """Return the arguments that `torch.set_printoptions` was called with, or their defaults; there is no getter."""
    import torch

    return vars(torch._tensor_str.PRINT_OPTS).copy()


def validates_distributions() -> bool:
    """Return what `Distribution.set_default_validate_args` has set; there is no getter.

    Always true once the compiler is imported, which turns it off for good.
    """
    import torch

    return torch.distributions.Distribution._validate_args or "torch._dynamo" in sys.modules


def store_of_world() -> Any:
    """Return the store behind that of the default group, without prefixes; None if there is no group."""
    from torch.distributed import distributed_c10d

    if not distributed_c10d.is_initialized():
        return None
    store: Any = distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def world_timeout() -> timedelta | None:
    """Return how long collectives of the default group may take; None if there is none. It has a setter, also private."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    group: Any = dist.group.WORLD
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def set_world_timeout(timeout: timedelta) -> None:
    """Give collectives of the default group so long."""
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timeout, distributed_c10d.group.WORLD)
