"""The frame of each finding's script: it runs one program on ranks and in one process, and says where they differ."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fsdp_testing.cases.models.model import loss_of

Steps = Iterator[tuple[str, Sequence[torch.Tensor]]]


class Task(NamedTuple):
    """What differs from script to script."""

    size: int  # ranks
    parts: int  # ranks that hold one model together, and have the same inputs
    width: int  # of the inputs
    dtype: torch.dtype
    build: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], nn.Module]
    access: Any  # how the implementation synchronises, clips and gathers
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    optimizer_first: bool  # before the program
    program: Callable[[Any], Steps]  # yields what each operation gives, on ranks or in one process
    tolerance: float
    gradients: bool  # whether they are comparable at the end


def matching(named: Iterable[tuple[str, nn.Parameter]], patterns: Iterable[str]) -> list[nn.Parameter]:
    """Choose parameters by patterns of their names."""
    return [p for name, p in named if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def clean(name: str) -> str:
    """Remove the components of wrappers from a name."""
    for part in ("_fsdp_wrapped_module.", "module.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name


class Side:
    """The common part of ranks and one process: inputs, and a forward in a mode."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task, self.model = task, model
        self.optimizer = self.make_optimizer() if task.optimizer_first else None

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.task.optimizer(self.model.parameters())

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(clean(name), parameter) for name, parameter in self.model.named_parameters()]

    def loss(self, model: nn.Module, rank: int, batch: tuple[Any, ...], mode: str = "train") -> torch.Tensor:
        seed, rows, usage, scale = batch
        torch.manual_seed(seed + rank)
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        count = rows[rank % len(rows)]
        x = torch.randn(count, self.task.width, generator=generator, dtype=torch.float64).to(self.task.dtype) * scale
        ids = torch.randint(0, 64, (count,), generator=generator)
        modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        with modes.get(mode, contextlib.nullcontext)():
            model.train(mode == "train")
            loss = loss_of(model(x, ids=ids, use=usage[rank % len(usage)] if usage else ()))
            model.train()
        return loss


class OneProcess(Side):
    """One process on all ranks' inputs, with the mean of the ranks' gradients."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, task.build())
        self.replicas = [task.build() for _ in range(task.size // task.parts)]
        for replica in self.replicas:
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                owner, _, leaf = name.rpartition(".")
                setattr(replica.get_submodule(owner), leaf, parameter)

    def forward_backward(self, *batch: Any, sync: bool = True) -> list[torch.Tensor]:
        losses = []
        for rank, replica in enumerate(self.replicas):
            loss = self.loss(replica, rank, batch)
            losses.append(loss.detach())
            if loss.requires_grad:
                (loss / len(self.replicas)).backward()
        return losses

    def only_forward(self, *batch_and_mode: Any) -> list[torch.Tensor]:
        *batch, mode = batch_and_mode
        return [self.loss(replica, rank, tuple(batch), mode).detach() for rank, replica in enumerate(self.replicas)]

    def clip(self, max_norm: float, norm_type: float) -> list[torch.Tensor]:
        return [nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)]

    def edit(self, patterns: Sequence[str], factor: float, writeback: bool) -> None:
        if writeback:
            with torch.no_grad():
                for parameter in matching(self.named(), patterns):
                    parameter.mul_(factor)

    def reload(self, full: bool, with_optimizer: bool) -> None:
        self.model.zero_grad()
        if self.optimizer is not None and not with_optimizer:
            self.optimizer = self.make_optimizer()

    def beyond(self, limit: int, measure: Callable[[], int]) -> list[torch.Tensor]:
        return [torch.zeros(())]

    def state(self) -> dict[str, Any]:
        return {name: (p.detach(), p.grad, p.requires_grad) for name, p in self.named()}


class Ranks(Side):
    """The same on this rank, through the implementation."""

    def __init__(self, task: Task, rank: int) -> None:
        super().__init__(task, task.wrap(task.build()))
        self.rank = rank

    def forward_backward(self, *batch: Any, sync: bool = True) -> list[torch.Tensor]:
        with contextlib.nullcontext() if sync else self.task.access.no_sync(self.model):
            loss = self.loss(self.model, self.rank // self.task.parts, batch)
            if loss.requires_grad:
                loss.backward()
        return [loss.detach()]

    def only_forward(self, *batch_and_mode: Any) -> list[torch.Tensor]:
        *batch, mode = batch_and_mode
        return [self.loss(self.model, self.rank // self.task.parts, tuple(batch), mode).detach()]

    def clip(self, max_norm: float, norm_type: float) -> list[torch.Tensor]:
        return [self.task.access.clip(self.model, max_norm, norm_type)]

    def edit(self, patterns: Sequence[str], factor: float, writeback: bool) -> None:
        with self.task.access.full_parameters(self.model, writeback), torch.no_grad():
            for parameter in matching(self.named(), patterns):
                parameter.mul_(factor)

    def reload(self, full: bool, with_optimizer: bool) -> None:
        options = StateDictOptions(full_state_dict=full)
        model = get_model_state_dict(self.model, options=options)
        old = self.optimizer
        kept = get_optimizer_state_dict(self.model, old, options=options) if with_optimizer and old else None
        fresh = self.task.build()
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.zero_()
        self.model = self.task.wrap(fresh)
        set_model_state_dict(self.model, model, options=options)
        self.optimizer = self.make_optimizer()
        if kept is not None:
            set_optimizer_state_dict(self.model, self.optimizer, kept, options=options)

    def beyond(self, limit: int, measure: Callable[[], int]) -> list[torch.Tensor]:
        """The memory or communication of an operation beyond the sufficient amount."""
        return [torch.tensor(float(max(0, measure() - limit)))]

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.task.access.gathered(self.model)
        return found


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Return whether two tensors are alike."""
    return a.shape == b.shape and bool(((a.double() - b.double()).abs() <= tolerance * (1 + b.double().abs())).all())


def differences(task: Task, rank: int) -> Iterator[str]:
    """Run the program on both sides and yield each difference between this rank and one process."""
    ranks, one = Ranks(task, rank), OneProcess(task)
    steps = task.program(ranks)
    for name, expected in task.program(one):
        _, got = next(steps)
        for value in got:
            wanted = expected[rank // task.parts] if len(expected) == task.size // task.parts > 1 else expected[0]
            if not close(value, wanted, task.tolerance):
                yield f"rank {rank}, {name}: {value.item()!r}, one process gives {wanted.item()!r}"
    found = ranks.state()
    for name, wanted in one.state().items():
        if name in found:
            yield from differences_at_end(task, f"rank {rank}, at the end", name, found[name], wanted)


def differences_at_end(task: Task, where: str, name: str, found: Any, wanted: Any) -> Iterator[str]:
    """Yield the differences in one parameter at the end of the program."""
    (got, got_grad, got_flag), (value, grad, flag) = found, wanted
    if got is not None and not close(got, value, task.tolerance):
        yield f"{where}: parameter {name} is off by {(got - value).abs().max().item():.3g}"
    if got_flag != flag:
        yield f"{where}: {name}.requires_grad is {got_flag}, one process has {flag}"
    if not task.gradients or got is None:
        return
    if got_grad is not None and grad is not None and not close(got_grad, grad, task.tolerance):
        yield f"{where}: gradient of {name} is off by {(got_grad - grad).abs().max().item():.3g}"
    if (got_grad is None) != (grad is None) and (grad if got_grad is None else got_grad).any():
        which = "None, one process has numbers" if got_grad is None else "there, one process has None"
        yield f"{where}: gradient of {name} is {which}"


def run_rank(task: Task, rank: int, file: str, queue: Any) -> None:
    """Run one rank: report the differences, and exit."""
    torch.set_default_dtype(task.dtype)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=task.size)
    try:
        found = list(differences(task, rank))
    except Exception as error:  # noqa: BLE001 - the implementation's own
        traceback.print_exc()
        found = [f"rank {rank} raised {type(error).__name__}: {error}"]
    queue.put(found)
    sys.stderr.flush()
    os._exit(0)  # without the interpreter's shutdown, which a live gloo thread may block


def main(task: Task) -> int:
    """Run the ranks and print their findings; return 1 if they differ from one process, 0 if they agree."""
    spawn = mp.get_context("spawn")
    queue = spawn.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(task, rank, f"{folder}/store", queue) for rank in range(task.size)]
        processes = [spawn.Process(target=run_rank, args=each, daemon=True) for each in arguments]
        for process in processes:
            process.start()
        processes[0].join(100)  # a busy machine takes long to import torch
        for process in processes[1:]:
            process.join(10)
        found: list[str] = []
        while not queue.empty():
            found += queue.get()
        found += [f"rank {rank} hangs" for rank, process in enumerate(processes) if process.is_alive()]
        codes = [(rank, process.exitcode) for rank, process in enumerate(processes)]
        found += [f"rank {rank} died with exit code {code}" for rank, code in codes if code not in (0, None)]
        for process in processes:
            process.kill()
    sys.stdout.write(("\n".join(found) or "the ranks agree with one process") + "\n")
    return 1 if found else 0
