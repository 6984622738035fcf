"""The one file that reaches into what torch does not promise to keep; each entry says why no public name serves."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import Any


def fake_store() -> Any:
    """Store of the fake backend. Importing its module registers backend "fake", which has no public home yet."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def global_module_hooks() -> tuple[dict[int, Any], ...]:
    """Hooks that `torch.nn.modules.module.register_module_*` installed: they can be added in public, not listed."""
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


def mode_depths() -> tuple[int, int]:
    """Depth of the dispatch and of the function mode stack: modes are entered in public, but the stack is not shown."""
    import torch

    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def process_groups() -> dict[Any, Any]:
    """Every process group of this process, with what torch knows of it: torch lists only the default one in public."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map


def process_group_count() -> int:
    """How many groups this process has ever made: it names the next one, so ranks must agree about it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.group_count


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward ends. Torch has no public name for the engine's callback queue."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(callback)


def process_group_named(name: Any) -> Any:
    """The process group that a functional collective names; torch resolves the name in its private registry alone."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def collective_options() -> Any:
    """Home of the options classes of `ProcessGroup` methods; `torch.distributed` re-exports only some of them."""
    from torch._C import _distributed_c10d

    return _distributed_c10d


def backend_select_key() -> Any:
    """The key that every call passes before its device is known: torch names keys in public as texts, a key set needs it."""
    import torch

    return torch._C.DispatchKey.BackendSelect


def other_threads() -> int:
    """Python threads besides the main one; `threading.active_count` takes a lock and ten times as long."""
    return _thread._count()
