"""Compares the settings of torch that a job may leave changed, its process groups, messages and device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_testing.base import torch_state
from fsdp_testing.ranks.ledger import messages
from fsdp_testing.ranks.pool.hygiene_leftovers import Probe, Setting, attribute, leftovers_probe, settings_probe
from fsdp_testing.ranks.pool.private_store import PrivateStore

_PREFIX, _OF_TORCH = "//", "0//store_based_barrier_key"
_DEVICES = ("cpu", "cuda")
_TINIEST = 5e-324


def _autocast(device: str) -> list[Setting]:
    def set_enabled(value: bool) -> None:
        torch.set_autocast_enabled(device, value)
        torch.clear_autocast_cache()

    return [
        Setting(f"autocast of {device}", lambda: torch.is_autocast_enabled(device), set_enabled),
        Setting(
            f"autocast dtype of {device}",
            lambda: torch.get_autocast_dtype(device),
            lambda value: torch.set_autocast_dtype(device, value),
        ),
    ]


def _leave_forward_mode(level: int) -> None:
    while torch_state.forward_mode_level() > level:
        torch.autograd.forward_ad.exit_dual_level()


DEFAULTS = settings_probe(
    "torch default",
    [
        Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        Setting(
            "default device",
            torch.get_default_device,
            # `None` removes the mode that any other value would leave on the stack.
            lambda device: torch.set_default_device(None if device.type == "cpu" else device),
        ),
        Setting("intra-op threads", torch.get_num_threads, torch.set_num_threads),
        Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        Setting("inference mode", torch.is_inference_mode_enabled),
        Setting(
            "anomaly mode",
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda value: torch.autograd.set_detect_anomaly(*value),
        ),
        *(setting for device in _DEVICES for setting in _autocast(device)),
        Setting("autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        Setting(
            "deterministic algorithms",
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        attribute(torch.utils.deterministic, "fill_uninitialized_memory", "fill_uninitialized_memory"),
        Setting("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        *(attribute(torch.backends.mkldnn, name, f"mkldnn.{name}") for name in ("enabled", "deterministic")),
        Setting(
            "byte order of torch.load",
            torch.serialization.get_default_load_endianness,
            torch.serialization.set_default_load_endianness,
        ),
        *(attribute(torch.backends.cudnn, name, f"cudnn.{name}") for name in ("enabled", "benchmark", "deterministic")),
        Setting("flush denormals", lambda: _TINIEST + 0.0 == 0.0, torch.set_flush_denormal),
        Setting("tensor sharing strategy", torch.multiprocessing.get_sharing_strategy, None),
        Setting("warn_always", torch.is_warn_always_enabled, torch.set_warn_always),
        Setting("saved_tensors_hooks", torch_state.saved_tensors_hooks, torch_state.leave_saved_tensors_hooks),
        Setting("forward-mode level", torch_state.forward_mode_level, _leave_forward_mode),
        Setting(
            "multithreading of autograd",
            torch_state.runs_backward_on_threads,
            torch.autograd.set_multithreading_enabled,
        ),
        Setting(
            "validation of distributions",
            torch_state.validates_distributions,
            torch.distributions.Distribution.set_default_validate_args,
        ),
        Setting("print options", torch_state.print_options, lambda options: torch.set_printoptions(**options)),
        *(
            Setting(
                f"torch.__future__.{name}",
                getattr(torch.__future__, f"get_{name}"),
                getattr(torch.__future__, f"set_{name}"),
            )
            for name in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion")
        ),
        *(attribute(torch.backends.opt_einsum, name, f"opt_einsum.{name}") for name in ("enabled", "strategy")),
        *(
            Setting(
                f"scaled_dot_product_attention, {kernel}",
                getattr(torch.backends.cuda, f"{kernel}_sdp_enabled"),
                getattr(torch.backends.cuda, f"enable_{kernel}_sdp"),
            )
            for kernel in ("flash", "mem_efficient", "math", "cudnn")
        ),
        *(
            [Setting("TORCH_DISTRIBUTED_DEBUG", dist.get_debug_level, dist.set_debug_level)]
            if dist.is_available()
            else []
        ),
    ],
)


def _module_hooks() -> list[tuple[int, int]]:
    return [(i, key) for i, hooks in enumerate(torch_state.module_hooks()) for key in hooks]


def _optimizer_hooks() -> list[tuple[int, int]]:
    # A library adds its own for good, on first use: a function of its module, and none made in a test.
    return [
        (i, key)
        for i, hooks in enumerate(torch_state.optimizer_hooks())
        for key, hook in hooks.items()
        if "<locals>" in getattr(hook, "__qualname__", "") or "." not in getattr(hook, "__module__", ".")
    ]


def _hooks_probe(
    kind: str, on: str, read: Callable[[], Any], all_hooks: Callable[[], tuple[dict[int, Any], ...]]
) -> Probe:
    return leftovers_probe(
        kind,
        read,
        lambda hook: f"{all_hooks()[hook[0]][hook[1]]!r} on every {on} was added",
        lambda hook: all_hooks()[hook[0]].pop(hook[1]),
        lost=f"a hook on every {on} was removed",
    )


def _groups() -> tuple[Any, list[Any], int]:
    if not dist.is_available() or not dist.is_initialized():
        return None, [], 0
    # The count also differs when a group was made and destroyed again, which is no leak but explains open sockets.
    return dist.group.WORLD, list(torch_state.process_groups()), torch_state.process_group_count()


def _tell_groups(before: tuple[Any, list[Any], int], now: tuple[Any, list[Any], int]) -> Iterator[str]:
    if before[0] is not now[0]:
        yield "the default process group was destroyed" if now[0] is None else "the default process group was replaced"
        return
    for group in now[1]:
        if group not in before[1]:
            ranks = dist.get_process_group_ranks(group)
            given = getattr(group, "group_desc", "")
            name = given if given not in ("", "undefined") else getattr(group, "group_name", "")
            yield f"process group {name!r} of ranks {ranks} was not destroyed"
    for group in before[1]:
        if group not in now[1]:
            yield "a process group that the job did not make was destroyed"


def _tell_timeout(before: timedelta | None, now: timedelta | None) -> Iterator[str]:
    if before is not None and now is not None:  # a group that was destroyed is told as that
        yield f"{before} -> {now}"


def _put_timeout(before: timedelta, now: timedelta) -> None:
    del now
    torch_state.set_world_timeout(before)


def _store_keys() -> frozenset[str]:
    store = torch_state.store_of_world() if dist.is_available() else None
    # Groups put theirs behind a prefix of their own.
    keys = store.list_keys() if isinstance(store, PrivateStore) else ()
    return frozenset(key for key in keys if key.count(_PREFIX) == 1 and not key.startswith(_OF_TORCH))


def _tell_keys(before: frozenset[str], now: frozenset[str]) -> Iterator[str]:
    yield from (f"key {key.partition(_PREFIX)[2]!r} is in the default store" for key in sorted(now - before))


def _cuda_memory() -> int:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return torch.cuda.memory_allocated()


TORCH_PROBES: tuple[Probe, ...] = (
    DEFAULTS,
    Probe("torch mode", torch_state.mode_depths),
    _hooks_probe("module hook", "module", _module_hooks, torch_state.module_hooks),
    _hooks_probe("optimizer hook", "optimizer", _optimizer_hooks, torch_state.optimizer_hooks),
    Probe("process group", _groups, None, _tell_groups),
    Probe("timeout of the default group", torch_state.world_timeout, _put_timeout, _tell_timeout),
    # Not put back: a rank that ended first would remove what others still wait for.
    Probe("store", _store_keys, None, _tell_keys),
    leftovers_probe(
        "message",
        messages.pending,
        lambda message: f"{message[1]} was never waited for: a later call may receive it",
    ),
    Probe(
        "CUDA memory",
        _cuda_memory,
        None,
        lambda before, now: iter([f"{now - before} bytes of CUDA memory are still allocated"] if now > before else []),
        collect_first=True,
    ),
)
