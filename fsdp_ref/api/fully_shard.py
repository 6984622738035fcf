"""``fully_shard(module, ...)``: the composable API. The module keeps its class, its names and its forward.

The same units over the same runtime as the wrapper, with original parameters always; forward is reached through module
hooks, ours around all others. Source: the composable ``fully_shard`` of torch 2.0 (pytorch PRs 87927 to 91044), and that of
torch 2.6 and later for the newer arguments and for methods.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from fsdp_ref.annotations import is_replicated, unit_of
from fsdp_ref.api.arguments import older_arguments
from fsdp_ref.api.contract import check_one_module, contract
from fsdp_ref.api.module_methods import give_methods
from fsdp_ref.build.attach import attach
from fsdp_ref.build.ignored import resolve_ignored
from fsdp_ref.build.plan import PlannedUnit
from fsdp_ref.build.targets import PolicyObject
from fsdp_ref.compat import RunningCall, backward_pre_hooks
from fsdp_ref.config import BackwardPrefetch
from fsdp_ref.errors import AlreadyAppliedError, ConfigError, listing
from fsdp_ref.runtime import calls
from fsdp_ref.runtime.backward import begin_backward
from fsdp_ref.runtime.forward import enter_forward, exit_forward
from fsdp_ref.runtime.unit import Unit


class FullyShardState:
    """What ``fully_shard.state(module)`` returns: ``unit`` is the unit that the module became."""

    def __init__(self) -> None:
        self.unit: Unit | None = None


@contract(state_cls=FullyShardState)
def fully_shard(
    module: nn.Module,
    *,
    process_group: Any = None,
    policy: Any = None,
    strategy: Any = None,
    mixed_precision: Any = None,
    cpu_offload: Any = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    device_id: int | str | torch.device | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    sync_module_states: bool = False,
    forward_prefetch: bool = False,
    backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE,
    device_mesh: Any = None,
    mesh: Any = None,
    reshard_after_forward: bool | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> nn.Module:
    """Shard the parameters of ``module`` in place and return it.

    Args:
        module: the module.
        process_group: the shard group, or (shard group, replicate group) for hybrid strategies. Default: all ranks.
        policy: which submodules become units; an object with ``_run_policy``. Units made by earlier calls below
            ``module`` stay unchanged.
        strategy: what is sharded and when it is freed. Default: ``FULL_SHARD``.
        mixed_precision: dtypes of computation, reduction and buffers.
        cpu_offload: where shards live outside computation.
        ignored_modules: modules to leave alone; replicated subtrees are left alone anyway.
        device_id: the device of computation. Default: where the parameters are.
        param_init_fn: initializes modules that are on the meta device.
        sync_module_states: start from rank 0's parameters and buffers.
        forward_prefetch: prefetch the next unit in forward, in the order of the first iteration.
        backward_prefetch: when backward prefetches the next unit; None: never.
        device_mesh: instead of ``process_group``.
        mesh: a mesh of one axis, or of two (replicate, shard); also says which strategy.
        reshard_after_forward: False keeps full parameters for backward. In place of ``strategy``.
        mp_policy: a ``MixedPrecisionPolicy``, ours or torch's, in place of ``mixed_precision``.
        offload_policy: a ``CPUOffloadPolicy`` or ``OffloadPolicy``, ours or torch's, in place of ``cpu_offload``.
        ignored_params: parameters to leave alone, in place of ``ignored_modules``.

    Afterwards the module, and each module that ``policy`` chooses, has the methods of ``api.module_methods``.

    Raises:
        ConfigError: ``policy`` is not a policy object, or two arguments set the same option.
        UnsupportedError: ``reshard_after_forward`` as a number of ranks.
        FsdpTypeError: ``module`` is not one module.
        AlreadyAppliedError: applied to this module before, or replicated.

    Collectives:
        With ``sync_module_states`` broadcasts; hybrid strategies without groups make groups. All ranks must call.
    """
    check_one_module("fully_shard", module)
    _refuse(module, policy)
    older = {
        "process_group": process_group,
        "strategy": strategy,
        "cpu_offload": cpu_offload,
        "mixed_precision": mixed_precision,
        "ignored_modules": ignored_modules,
        "device_mesh": device_mesh,
    }
    given = older_arguments(mesh, reshard_after_forward, mp_policy, offload_policy, ignored_params, older)
    ignored = resolve_ignored(module, given.pop("ignored_modules"), ignored_params)
    options = {
        **given,
        "param_init_fn": param_init_fn,
        "device_id": device_id,
        "sync_module_states": sync_module_states,
        "forward_prefetch": forward_prefetch,
        "backward_prefetch": backward_prefetch,
        "limit_all_gathers": True,
        "use_orig_params": True,
    }
    fully_shard.state(module).unit = attach(module, options, _hook, policy=policy, ignored=ignored, composable=True)[-1]
    return module


def _refuse(module: nn.Module, policy: object) -> None:
    if policy is not None and not isinstance(policy, PolicyObject):
        raise ConfigError(
            f"Expects an `_FSDPPolicy` but got {policy!r}: expected an object with _run_policy, got "
            f"{type(policy).__name__}. Pass for example ModuleWrapPolicy({{Block}})."
        )
    if is_replicated(module):
        raise AlreadyAppliedError(
            f"Cannot apply fully_shard on a module that `replicate` was applied to (Cannot apply both fully_shard and "
            f"replicate): expected one of the two, got both on {type(module).__name__}. Apply them to different modules."
        )
    if unit_of(module) is not None:
        raise AlreadyAppliedError(
            f"fully_shard has already been applied to the following module: {listing([type(module).__name__])}, by a "
            "policy or as a wrapper. Apply it once per module."
        )


def _hook(planned: PlannedUnit) -> nn.Module:
    """Hook a module: users go on calling it itself."""
    give_methods(planned.module)
    planned.module.__dict__["register_full_backward_pre_hook"] = MethodType(_register_behind_own, planned.module)
    if backward_pre_hooks(planned.module):
        _begin_before_users(planned.module)
    hooks = _ForwardHooks(planned.module)
    # First before forward, and last of the hooks that are there after it, so that hooks of other APIs see full parameters.
    planned.module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True)
    planned.module.register_forward_hook(hooks.after, always_call=True)
    return planned.module


def _register_behind_own(
    module: nn.Module, hook: Callable[..., Any], prepend: bool = False
) -> torch.utils.hooks.RemovableHandle:
    """Register a hook as ``nn.Module.register_full_backward_pre_hook`` does; it finds full parameters."""
    handle = type(module).register_full_backward_pre_hook(module, hook, prepend=prepend)
    _begin_before_users(module)
    return handle


def _begin_before_users(module: nn.Module) -> None:
    """Have the unit's backward begin before a user's backward pre-hook runs.

    torch runs those before the hooks on the outputs that forward gave. The own one is there only beside others: it puts a node
    of the graph behind the module, where callers may not change outputs in place.
    """
    hooks = backward_pre_hooks(module)
    for key in [key for key, hook in hooks.items() if hook is _begin_backward]:
        del hooks[key]
    nn.Module.register_full_backward_pre_hook(module, _begin_backward, prepend=True)


def _begin_backward(module: nn.Module, _grads: Any) -> None:
    unit = unit_of(module)
    if unit is not None and unit.root is not None:
        begin_backward(unit)


class _ForwardHooks:
    """The hooks of one module.

    ``after`` is also called when forward raised; it knows by the exception that is being handled then and was not when
    forward began. Then, too, when ``before`` was not called, because a global hook that comes before all hooks of modules
    raised: the call that is open is another one then, and goes on.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._open: list[tuple[calls.Frame, BaseException | None]] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Run before everything else of the module's call."""
        unit = unit_of(module)
        assert isinstance(unit, Unit)  # set right after hooking
        handled = sys.exception()
        frame, args, kwargs = enter_forward(unit, args, kwargs, RunningCall.of_caller())
        if not frame.nested:
            self._open.clear()  # a call that Ctrl-C ended left its own
        self._open.append((frame, handled))
        return args, kwargs

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Run after everything else of the module's call."""
        if not self._open:
            return output  # ``before`` itself raised
        frame, handled = self._open[-1]
        if sys.exception() is handled:
            self._open.pop()
            return exit_forward(frame, output)
        if frame.running is not None and frame.running.is_around():
            self._open.pop()
            calls.abort(frame)
        return output
