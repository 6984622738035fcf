"""What of torch's state may a job leave changed? Defaults, autograd and autocast, determinism, hooks, groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fsdp_testing.base import compat
from fsdp_testing.ranks.ledger import messages
from fsdp_testing.ranks.pool.hygiene_probe import Probe, Setting, attribute, leftovers_probe, settings_probe

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
        *(attribute(torch.backends.cudnn, name, f"cudnn.{name}") for name in ("enabled", "benchmark", "deterministic")),
        Setting("flush denormals", lambda: _TINIEST + 0.0 == 0.0, torch.set_flush_denormal),
        Setting("tensor sharing strategy", torch.multiprocessing.get_sharing_strategy, None),
        Setting("warn_always", torch.is_warn_always_enabled, torch.set_warn_always),
    ],
)


def _hooks() -> list[tuple[int, int]]:
    return [(i, key) for i, hooks in enumerate(compat.global_module_hooks()) for key in hooks]


def _groups() -> tuple[Any, list[Any], int]:
    if not dist.is_available() or not dist.is_initialized():
        return None, [], 0
    # The count differs also when a group was made and destroyed again, which is no dirt but explains open sockets.
    return dist.group.WORLD, list(compat.process_groups()), compat.process_group_count()


def _tell_groups(before: tuple[Any, list[Any], int], now: tuple[Any, list[Any], int]) -> Iterator[str]:
    if before[0] is not now[0]:
        yield "the default process group was destroyed" if now[0] is None else "the default process group was replaced"
        return
    for group in now[1]:
        if group not in before[1]:
            ranks = dist.get_process_group_ranks(group)
            name = getattr(group, "group_desc", "") or getattr(group, "group_name", "")
            yield f"process group {name!r} of ranks {ranks} was not destroyed"
    for group in before[1]:
        if group not in now[1]:
            yield "a process group that the job did not make was destroyed"


def _cuda_memory() -> int:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return torch.cuda.memory_allocated()


PROBES: tuple[Probe, ...] = (
    DEFAULTS,
    Probe("torch mode", compat.mode_depths),
    leftovers_probe(
        "module hook",
        _hooks,
        lambda hook: f"{compat.global_module_hooks()[hook[0]][hook[1]]!r} on every module was added",
        lambda hook: compat.global_module_hooks()[hook[0]].pop(hook[1]),
        lost="a hook on every module was removed",
    ),
    Probe("process group", _groups, None, _tell_groups),
    leftovers_probe(
        "message",
        messages.pending,
        lambda message: f"nobody waited for {message[1]}: it may take, or be taken for, a message of a later call",
    ),
    Probe(
        "CUDA memory",
        _cuda_memory,
        None,
        lambda before, now: iter([f"{now - before} bytes of CUDA memory are still allocated"] if now > before else []),
        collect_first=True,
    ),
)
