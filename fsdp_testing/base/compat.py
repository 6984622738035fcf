"""The one file that uses private names of torch; each entry says why no public name serves."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType
from typing import Any

_INITIALISES = "torch.distributed.checkpoint.state_dict"
_FRAMES = 24


def fake_store() -> Any:
    """Return the store of the fake backend. Importing its module registers backend "fake", which has no public home yet."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def tracker_pipe() -> int | None:
    """Return the descriptor on which Python tells its resource tracker what to free; its public name would start the tracker."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    return None if tracker is None else tracker._resource_tracker._fd


def saved_buffers(module: Any) -> list[str]:
    """Return the names of a module's own persistent buffers; the public API can make a buffer non-persistent but not ask."""
    return [name for name, _ in module.named_buffers(recurse=False) if name not in module._non_persistent_buffers_set]


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward ends. Torch has no public name for the engine's callback queue."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread, as while checkpointed activations are computed again."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


@contextlib.contextmanager
def no_transforms() -> Iterator[None]:
    """Operators do what they do outside of `torch.func`'s transforms while the context lasts."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


def is_transformed(tensor: Any) -> bool:
    """Whether a tensor belongs to a transform of `torch.func`, in which it has neither memory nor numbers of its own."""
    import torch

    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def outside_of_transforms(tensor: Any) -> Any:
    """Return a tensor as it is outside of `torch.func`'s transforms: what `vmap` maps over is joined with the tensor's rows."""
    import torch

    functorch = torch._C._functorch
    is_row, mapped = tensor.ndim < 2, []
    while is_transformed(tensor):
        mapped.append(functorch.maybe_get_bdim(tensor))  # -1: not by `vmap`
        tensor = functorch.get_unwrapped(tensor)
    places = [place for place in reversed(mapped) if place >= 0]
    for count, place in enumerate(places):
        tensor = tensor.movedim(count + place, count)
    last = len(places) - is_row
    return tensor.flatten(0, last) if last > 0 else tensor


def factors_of(loss: Any) -> tuple[float, ...]:
    """Return the constants that a loss, or each summand of it, was multiplied with last, as 1/4 for `loss / 4`."""
    return _factors(loss.grad_fn)


def _factors(node: Any) -> tuple[float, ...]:
    name = node.name() if node is not None else ""
    nodes = [function for function, _ in node.next_functions] if node is not None else []
    if name == "AddBackward0":
        first, *others = [_factors(summand) for summand in nodes if summand is not None] or [()]
        return tuple(factor for factor in first if all(factor in other for other in others))
    if name not in ("DivBackward0", "MulBackward0") or [None in nodes, len(nodes)] != [True, 2]:
        return ()
    place = nodes.index(None)
    constant: Any = getattr(node, ("_saved_self", "_saved_other")[place], None)
    if getattr(constant, "numel", int)() != 1 or (name == "DivBackward0" and place == 0):
        return ()
    number = float(constant)
    factor = number if name == "MulBackward0" else 1 / number if number else 0.0
    return (factor, *_factors(nodes[1 - place]))


def makes_state_only() -> bool:
    """Whether an optimizer is stepped by `get_state_dict` or a similar function of torch, only to create its state."""
    frame, left = sys._getframe(1), _FRAMES
    while frame is not None and left:
        if frame.f_globals.get("__name__") == _INITIALISES:
            return True
        frame, left = frame.f_back, left - 1  # type: ignore[assignment]  # until there is none
    return False


def frame_of(thread: threading.Thread) -> FrameType | None:
    """Return the innermost running frame of a thread; None if it has ended."""
    return sys._current_frames().get(thread.ident or 0)


def running(calls: list[FrameType]) -> list[FrameType]:
    """Return the code of the running calls in all threads: a backward pass on CUDA has its own thread."""
    there: list[FrameType] = []
    for top in sys._current_frames().values() if calls else ():
        frame: FrameType | None = top
        while frame is not None:
            there += [frame] if frame in calls else []
            frame = frame.f_back
    return [call for call in calls if call in there]


def schedules_in(schedule: Any) -> tuple[Any, ...]:
    """Return the learning-rate schedules that a schedule is made of and steps in turn."""
    return tuple(getattr(schedule, "_schedulers", ()))


def process_group_named(name: Any) -> Any:
    """Return the process group that a functional collective names; torch resolves names in a private registry."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def maker_of_groups() -> tuple[Any, str]:
    """Return module and name of what `new_group` calls: modules of torch import `new_group` itself, and so do users."""
    from torch.distributed import distributed_c10d

    return distributed_c10d, distributed_c10d._new_group_with_tag.__name__


def collective_options() -> Any:
    """Return the module with the options classes of `ProcessGroup` methods; `torch.distributed` re-exports only some of them."""
    from torch._C import _distributed_c10d

    return _distributed_c10d


_TRACE_RULES = "torch._dynamo.trace_rules"
_kept_out: set[str] = set()


def keep_compiler_out(package: str) -> None:
    """Let `torch.compile` trace no function of a package; what they call is traced.

    `torch.compiler.disable` would import the compiler, which takes seconds; it is told here when it is imported later.
    """
    if package in _kept_out:
        return
    _kept_out.add(package)
    if rules := sys.modules.get(_TRACE_RULES):
        rules.add(package)
    else:
        sys.meta_path.insert(0, _CompilerComes(package))


class _CompilerComes(MetaPathFinder):
    """Tells torch's compiler about a package when the compiler is imported; as in `fsdp_ref.compat`, which knows nothing of us.

    It stays in `sys.meta_path` afterwards: a change of the list is reported as a leak of the test that runs then.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._has_come = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
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
                module.add(self._package)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone
        return spec


def graphs_compiled() -> int:
    """Return how many graphs `torch.compile` has made in this process; the public API does not count them."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("stats", {}).get("unique_graphs", 0))


def backend_select_key() -> Any:
    """Return the key that every call passes before its device is known; a set of keys takes no public name."""
    import torch

    return torch._C.DispatchKey.BackendSelect


def other_threads() -> int:
    """Return how many Python threads there are besides the main one; `threading.active_count` costs ten times as much."""
    return _thread._count()


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of torch, and what its schema says about its arguments.

    Attributes:
        call: Runs it.
        text: As in "aten.add_.Tensor".
        namespace: As "aten".
        name: As "add_".
        arguments: Name of each argument, whether it is written, and whether a result may share its memory.
        is_view: Whether a result shares memory of an argument that is not written.
    """

    call: Callable[..., Any]
    text: str
    namespace: str
    name: str
    arguments: tuple[tuple[str, bool, bool], ...]
    is_view: bool


@functools.cache
def _operator(func: Any) -> Operator:
    schema = func._schema
    arguments = tuple(
        (each.name, each.alias_info is not None and each.alias_info.is_write, each.alias_info is not None)
        for each in schema.arguments
    )
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    return Operator(func, str(func), func.namespace, schema.name.rpartition("::")[2], arguments, is_view)


def operators_run_by(run: Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """Return a context in which `run(operator, arguments, named arguments)` stands for each operator of this thread.

    Includes backward passes on the CPU. A tensor subclass (DTensor) is unwrapped first, so that its inner operators are run.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Running(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # DTensor asks for the shape of a result; fakes want their own mode, which comes after this one.
            if FakeTensor in types:
                return func(*args, **(kwargs or {}))
            if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
                return NotImplemented
            return run(_operator(func), args, kwargs or {})

    return Running()  # type: ignore[no-untyped-call]  # torch annotates the method, not the constructor


def each_operation(see: Callable[[str, list[Any], list[Any]], None]) -> Any:
    """Return a context in which `see(name, inputs, results)` is called after each operation that torch computes.

    `name` is as in "aten.add_.Tensor". `see` gets the operators that `operators_run_by` runs.
    """
    import torch

    def tensors(tree: Any) -> list[Any]:
        if isinstance(tree, torch.Tensor):
            return [tree]
        return [found for part in tree for found in tensors(part)] if isinstance(tree, (list, tuple)) else []

    def run(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operator.call(*args, **kwargs)
        # An operation in place on a list returns nothing: it wrote to its first argument.
        see(operator.text, tensors(args), tensors(args[0] if result is None and args else result))
        return result

    return operators_run_by(run)


def numbers_of(tensor: Any) -> Any:
    """Return a dense tensor, or the one that holds a sparse tensor's numbers; the public method needs a coalesced one."""
    return tensor._values() if tensor.is_sparse else tensor


def storage_key(storage: Any) -> int:
    """Return the identity of a storage's memory while it is referenced; the address of an empty storage is 0."""
    return int(storage._cdata)


def storage_reference(storage: Any) -> Any:
    """Return a weak reference, for `freed`; Python's weak references follow the wrapper, and each tensor makes a new wrapper."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)


def freed(references: Mapping[int, Any]) -> list[int]:
    """Return the keys of the references whose memory is freed. Called for each operator, so every call saved counts."""
    import torch

    gone = torch.UntypedStorage._expired  # StorageWeakRef.expired() needs two more calls
    return [key for key, reference in list(references.items()) if gone(reference.cdata)]


class Unversioned:
    """Replaces the version of a dictionary that has none: such a dictionary may have changed each time."""

    @property
    def value(self) -> object:
        return object()


# Behind reference count, type and number of entries. PEP 509: unique for each state of each dictionary.
_VERSION_OFFSET = 3 * ctypes.sizeof(ctypes.c_void_p)


def state_of_dictionary(names: dict[str, Any]) -> Any:
    """Return an object whose `value` differs after each change of `names`, which must live as long.

    Python up to 3.13 keeps such a number but does not show it. Reading thousands of names around each test instead would take a
    tenth of the test's time, and copy the memory page of each in every new rank.
    """
    return ctypes.c_uint64.from_address(id(names) + _VERSION_OFFSET) if _dictionaries_have_versions() else Unversioned()


@functools.cache
def _dictionaries_have_versions() -> bool:
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 14):
        return False
    names: dict[str, object] = {"a": 1, "b": 2}
    version = ctypes.c_uint64.from_address(id(names) + _VERSION_OFFSET)
    seen = [version.value]
    names["a"] = 3
    seen.append(version.value)
    del names["b"]
    seen.append(version.value)
    names["c"] = None
    seen += [version.value, version.value]
    list(names.values())
    return len(set(seen)) == len(seen) - 1 and version.value == seen[-1]


VERSIONS = "_metadata"
"""The attribute of a state in which `nn.Module.state_dict` keeps the versions of modules; none of its arguments gives them."""


def versions_of(state: object) -> Mapping[str, Any] | None:
    """Return what a state says of each module, by name: `{"version": ...}`; None if it says nothing."""
    return getattr(state, VERSIONS, None)
