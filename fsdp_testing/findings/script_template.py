"""What does a script that shows a finding look like? The text around model, wrapping and program."""

from __future__ import annotations

from string import Template

TEMPLATE = Template('''"""$sentence

Runs on $size ranks (gloo, CPU) and in one process; exits with 1 where the two part, with 0 where they agree.
Uses torch and the implementation alone. Written by fsdp-testing from case $identity.
"""

import contextlib
import fnmatch
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
$imports

SIZE = $size
torch.set_default_dtype(torch.$dtype)


$model


def wrap(model):
$wrap


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, (list, tuple)):
        value = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [tensor for item in value for tensor in tensors_in(item)]


def loss_of(output):
    return sum(0.5 * (1 + 0.25 * place) * tensor.square().sum() for place, tensor in enumerate(tensors_in(output)))


def inputs(seed, rank, rows, scale):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(rows, $width, generator=generator, dtype=torch.float64).to(torch.get_default_dtype()) * scale
    return x, torch.randint(0, 64, (rows,), generator=generator)


def matching(named, patterns):
    return [p for name, p in named if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


class OneProcess:
    """What one process computes on all ranks' inputs: the mean of the ranks' gradients."""

    def __init__(self):
        self.model = build()
        self.replicas = [build() for _ in range(SIZE)]
        for replica in self.replicas:
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                owner, _, leaf = name.rpartition(".")
                setattr(replica.get_submodule(owner), leaf, parameter)
        self.optimizer = self.make_optimizer() if $early else None

    def make_optimizer(self):
        return torch.optim.$optimizer

    def named(self):
        return list(self.model.named_parameters())

    def forward(self, rank, x, ids, use):
        return self.replicas[rank](x, ids=ids, use=use)

    def forward_backward(self, seed, rows, usage, scale, sync=True):
        losses = []
        for rank in range(SIZE):
            torch.manual_seed(seed + rank)
            x, ids = inputs(seed, rank, rows[rank % len(rows)], scale)
            loss = loss_of(self.forward(rank, x, ids, usage[rank % len(usage)] if usage else ()))
            losses.append(loss.detach())
            if loss.requires_grad:
                (loss / SIZE).backward()
        return losses

    def only_forward(self, seed, rows, usage, scale, mode):
        losses = []
        for rank in range(SIZE):
            torch.manual_seed(seed + rank)
            x, ids = inputs(seed, rank, rows[rank % len(rows)], scale)
            with context(mode):
                self.replicas[rank].train(mode == "train")
                losses.append(loss_of(self.forward(rank, x, ids, usage[rank % len(usage)] if usage else ())).detach())
                self.replicas[rank].train()
        return losses

    def clip(self, max_norm, norm_type):
        return [nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)]

    def edit(self, patterns, factor, writeback):
        if writeback:
            with torch.no_grad():
                for parameter in matching(self.named(), patterns):
                    parameter.mul_(factor)

    def reload(self, full, with_optimizer):
        self.model.zero_grad()
        if self.optimizer is not None and not with_optimizer:
            self.optimizer = self.make_optimizer()

    def state(self):
        return {name: (p.detach(), p.grad, p.requires_grad) for name, p in self.named()}


class Ranks:
    """The same on this rank, through the implementation."""

    def __init__(self, rank):
        self.rank = rank
        self.model = wrap(build())
        self.optimizer = self.make_optimizer() if $early else None

    def make_optimizer(self):
        return torch.optim.$optimizer

    def named(self):
        return [(clean(name), parameter) for name, parameter in self.model.named_parameters()]

    def forward_backward(self, seed, rows, usage, scale, sync=True):
        torch.manual_seed(seed + self.rank)
        x, ids = inputs(seed, self.rank, rows[self.rank % len(rows)], scale)
        with contextlib.nullcontext() if sync else no_sync(self.model):
            loss = loss_of(self.model(x, ids=ids, use=usage[self.rank % len(usage)] if usage else ()))
            if loss.requires_grad:
                loss.backward()
        return [loss.detach()]

    def only_forward(self, seed, rows, usage, scale, mode):
        torch.manual_seed(seed + self.rank)
        x, ids = inputs(seed, self.rank, rows[self.rank % len(rows)], scale)
        with context(mode):
            self.model.train(mode == "train")
            loss = loss_of(self.model(x, ids=ids, use=usage[self.rank % len(usage)] if usage else ())).detach()
            self.model.train()
        return [loss]

    def clip(self, max_norm, norm_type):
        return [clip(self.model, max_norm, norm_type)]

    def edit(self, patterns, factor, writeback):
        with full_parameters(self.model, writeback), torch.no_grad():
            for parameter in matching(self.named(), patterns):
                parameter.mul_(factor)

    def reload(self, full, with_optimizer):
        options = StateDictOptions(full_state_dict=full)
        model = get_model_state_dict(self.model, options=options)
        saved = get_optimizer_state_dict(self.model, self.optimizer, options=options) if with_optimizer else None
        fresh = build()
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.zero_()
        self.model = wrap(fresh)
        set_model_state_dict(self.model, model, options=options)
        self.optimizer = self.make_optimizer()
        if saved is not None:
            set_optimizer_state_dict(self.model, self.optimizer, saved, options=options)

    def state(self):
        return gathered(self.model)


def context(mode):
    return {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, contextlib.nullcontext)()


def clean(name):
    for part in ("_fsdp_wrapped_module.", "module.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name


$access


def program(one):
    """Yields what each operation gives; `one` is either of the two."""
$program
    yield "the end", []


def close(a, b):
    return a.shape == b.shape and bool(((a.double() - b.double()).abs() <= $tolerance * (1 + b.double().abs())).all())


def differences(rank, ranks, one):
    steps = program(ranks)
    for name, expected in program(one):
        got_name, got = next(steps)
        for value in got:
            wanted = expected[rank] if len(expected) == SIZE and len(expected) > 1 else expected[0]
            if not close(value, wanted):
                yield f"rank {rank}, {name}: {value.item()!r}, one process gives {wanted.item()!r}"
    held, wanted = ranks.state(), one.state()
    for name, (value, grad, flag) in wanted.items():
        if name not in held:
            continue
        got, got_grad, got_flag = held[name]
        if got is not None and not close(got, value):
            yield f"rank {rank}, at the end: parameter {name} is off by {(got - value).abs().max().item():.3g}"
        if got_flag != flag:
            yield f"rank {rank}, at the end: {name}.requires_grad is {got_flag}, one process has {flag}"
        if not $gradients or got is None:
            continue
        if got_grad is not None and grad is not None and not close(got_grad, grad):
            yield f"rank {rank}, at the end: gradient of {name} is off by {(got_grad - grad).abs().max().item():.3g}"
        if (got_grad is None) != (grad is None) and (grad if got_grad is None else got_grad).any():
            which = "None, one process has numbers" if got_grad is None else "there, one process has None"
            yield f"rank {rank}, at the end: gradient of {name} is {which}"


def main(rank, file, queue):
    torch.set_default_dtype(torch.$dtype)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=SIZE)
    try:
        found = list(differences(rank, Ranks(rank), OneProcess()))
    except Exception as error:  # the implementation's own
        import traceback

        traceback.print_exc()
        found = [f"rank {rank} raised {type(error).__name__}: {error}"]
    queue.put(found)
    sys.stderr.flush()
    os._exit(0)  # not through the interpreter's end: a live gloo thread may keep it



if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    queue = spawn.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [spawn.Process(target=main, args=(rank, f"{folder}/store", queue), daemon=True) for rank in range(SIZE)]
        for process in processes:
            process.start()
        processes[0].join(100)  # a busy machine takes long to import torch
        for process in processes[1:]:
            process.join(10)
        found = []
        while not queue.empty():
            found += queue.get()
        found += [f"rank {rank} hangs" for rank, process in enumerate(processes) if process.is_alive()]
        found += [f"rank {r} died with exit code {p.exitcode}" for r, p in enumerate(processes) if p.exitcode not in (0, None)]
        for process in processes:
            process.kill()
    print("\\n".join(found) or "the ranks agree with one process")
    sys.exit(1 if found else 0)
''')
