"""Names of torch that differ between the supported versions, or exist only as private ones.

Everything in the package that is not torch's public, stable surface is imported here and nowhere else.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, Final, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import _global_optimizer_post_hooks as optimizer_hooks  # nothing public lists them
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

P = ParamSpec("P")
R = TypeVar("R")

BatchNormBase = _BatchNorm  # no public name covers every batch norm

# Renamed in torch 2.13; the older names stay as deprecated aliases for a while.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_flat(out: torch.Tensor, inp: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-gather of flat tensors: ``out`` holds every rank's ``inp`` one after the other."""
    return cast("dist.Work", _all_gather(out, inp, group=group, async_op=True))


def reduce_scatter_flat(out: torch.Tensor, inp: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start a summing reduce-scatter of flat tensors: ``out`` holds this rank's chunk of the sum of all ``inp``."""
    return cast("dist.Work", _reduce_scatter(out, inp, group=group, async_op=True))


def graph_task_id() -> int:
    """Return the number of the backward pass that runs this code, -1 outside of any; nested passes have their own."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Return whether this code runs inside a backward pass of this thread."""
    return graph_task_id() != -1


def pass_reaches(node: Any) -> bool:
    """Return whether the backward pass that runs now executes ``node``.

    Raises:
        RuntimeError: the node is of a leaf whose gradient ``torch.autograd.grad`` returns.
    """
    reaches: Callable[[Any], bool] = getattr(torch._C, "_will_engine_execute_node")  # noqa: B009 - not in the stubs
    return reaches(node)


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` once when the backward pass that runs now has finished; not when it fails."""
    Variable._execution_engine.queue_callback(callback)


def hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register a hook for the gradient of ``tensor`` that runs before those that are there."""
    handle = cast("RemovableHandle", tensor.register_hook(hook))
    hooks: dict[int, Any] = tensor._backward_hooks  # type: ignore[assignment]  # made by register_hook
    others = {key: other for key, other in hooks.items() if key != handle.id}
    for key in others:
        del hooks[key]
    hooks.update(others)
    return handle


def backward_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return what runs when the gradients of the module's outputs arrive, by its key, in order; to be changed."""
    return module._backward_pre_hooks


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return the pair of saved-tensor hooks (of checkpointing, of offloaded activations, ours) that is in force, if any."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def saved_tensor_hooks_allowed() -> bool:
    """Return whether saved-tensor hooks may be installed here (function transforms forbid them)."""
    allowed: Callable[[], bool] = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled")  # noqa: B009 - not in the stubs
    return allowed()


def storage_key(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of ``tensor`` while the storage lives, whatever memory it has."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often ``tensor`` was changed in place; 0 for an inference tensor, which has no counter."""
    return 0 if tensor.is_inference() else tensor._version


def after_optimizer_steps(callback: Callable[..., None]) -> None:
    """Run ``callback(optimizer, args, kwargs)`` after each step of any optimizer of this process; registered only once."""
    if callback not in optimizer_hooks.values():
        register_optimizer_step_post_hook(callback)


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the result of a functional collective, if ``tensor`` is one, and return a plain tensor."""
    module = sys.modules.get(
        "torch.distributed._functional_collectives"
    )  # who made such a tensor imported it; slow to import
    return tensor.wait() if module is not None and isinstance(tensor, module.AsyncCollectiveTensor) else tensor


@functools.cache
@functools.cache  # once in a process: the compiler keeps a list
def keep_compiler_out() -> None:
    """Let ``torch.compile`` trace no function of this package, and go on to trace what it calls: the user's modules.

    Traced, the runtime broke into hundreds of graphs, and ended in errors of the compiler. torch has no public name for this.
    The compiler is not imported for this: it is told when it is imported later.
    """
    if rules := sys.modules.get(_TRACE_RULES):
        rules.add(__package__)
    else:
        sys.meta_path.insert(0, _CompilerComes())


_TRACE_RULES: Final = "torch._dynamo.trace_rules"


class _CompilerComes(MetaPathFinder):
    """Tells torch's compiler about this package when the compiler is imported.

    It stays in ``sys.meta_path`` afterwards: a test in which the compiler is imported must not seem to change the list.
    """

    def __init__(self) -> None:
        self._has_come = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None, but for the rules: their spec, whose loader adds one when it has run them."""
        if fullname != _TRACE_RULES or self._has_come:
            return None
        self._has_come = True
        # Of the other finders: another package may wait for the compiler, too.
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                module.add(__package__)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone
        return spec


_set_compiler: Final[Callable[..., Any]] = torch._C._dynamo.eval_frame.set_eval_frame


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function, and all that it calls, as it is, also where ``torch.compile`` compiled its caller.

    Rules of files (:func:`keep_compiler_out`) do not reach what those call: streams of a vendor's device, written in Python, were
    compiled, and work went to another stream. ``torch.compiler.disable`` would import the compiler.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _set_compiler(None)
        try:
            return function(*args, **kwargs)
        finally:
            _set_compiler(before)

    return call


def detailed_debug() -> bool:
    """Return whether torch's distributed debug level is DETAIL (``TORCH_DISTRIBUTED_DEBUG``)."""
    level: Callable[[], Any] = getattr(dist, "get_debug_level")  # noqa: B009 - not in the stubs
    return bool(level().name == "DETAIL")


_NOT_PROFILED: Final = nullcontext()
_profiler: Final[Any] = torch.autograd.profiler


def labelled(event: str, unit: str) -> AbstractContextManager[object]:
    """Return a range ``FSDP::event (unit)`` of torch's profiler.

    Without a profiler it does nothing, because an unrecorded range would cost microseconds.
    """
    if not _profiler._is_profiler_enabled:
        return _NOT_PROFILED
    return torch.profiler.record_function(f"FSDP::{event} ({unit or 'root'})")


def calls_of(module: str) -> list[FrameType]:
    """Return the calls of functions of the module with this name that are on the stack, innermost first."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            found.append(frame)
        frame = frame.f_back
    return found


def metadata_of(state: object) -> dict[str, Any]:
    """Return the versions of modules, by path, that come with what ``state_dict()`` collects."""
    return getattr(state, "_metadata", {})


def metadata_being_loaded() -> dict[str, Any]:
    """Return the versions of modules, by path, that the running ``load_state_dict`` has; hooks below its module get none."""
    calls = (frame for frame in calls_of("torch.nn.modules.module") if frame.f_code.co_name == "load_state_dict")
    return next((frame.f_locals.get("metadata") for frame in calls), None) or {}


def method_called_on(objects: Collection[object]) -> str:
    """Return the name of the outermost method of one of ``objects`` on the stack, ``nn.Module``'s own left out; "" if none."""
    found, frame = "", sys._getframe(1).f_back
    while frame is not None:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        own = getattr(getattr(type(first), code.co_name, None), "__code__", None) is code
        if own and code.co_filename != torch.nn.modules.module.__file__ and any(first is one for one in objects):
            found = code.co_name
        frame = frame.f_back
    return found


class RunningCall:
    """A Python call that is on the stack now; tells later whether it has ended, in whatever way.

    torch skips the hooks after a call that raised (those after forward for a ``BaseException``, those after collecting
    a state for any); this call shows that such a hook will not run.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame

    @classmethod
    def of_caller(cls) -> RunningCall:
        """Return the call that called the function that asks."""
        return cls(sys._getframe(2))

    @classmethod
    def of_outermost_module_method(cls) -> RunningCall:
        """Return the outermost call on the stack of one of ``nn.Module``'s own methods."""
        found = frame = sys._getframe(1)
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_filename == torch.nn.modules.module.__file__:
                found = frame
        return cls(found)

    def is_around(self) -> bool:
        """Return whether the function that asks was called from this call, or from the one that it is a part of."""
        asking = sys._getframe(2)
        return asking is self._frame or asking is self._frame.f_back

    def ended(self) -> bool:
        """Return whether the call is over."""
        try:
            self._frame.clear()
        except RuntimeError:  # Python clears no frame that is still executing
            return False
        return True
