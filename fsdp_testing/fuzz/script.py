"""How does a finding become a script that anyone can run, with torch and the implementation and nothing of ours?

The script builds the model, runs the program on the ranks with the implementation and in one process without it, and
says where the two part. It is written for the implementations whose way of wrapping is known here, and only for what
can be told that way: `script_for` returns None for the rest. Values of parameters and inputs are not those of the case,
so a script is run before anyone is told that it reproduces.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from string import Template

from fsdp_testing.fuzz.discovery import Discovery
from fsdp_testing.fuzz.source import model_source
from fsdp_testing.records import (
    Batch,
    BuildOptimizer,
    Case,
    Clip,
    EditFullParameters,
    Forward,
    ForwardBackward,
    Freeze,
    Move,
    Observe,
    Operation,
    SetLr,
    Step,
    Thaw,
    ZeroGrad,
    plan,
)

_FSDP1_STRATEGIES = {
    "full_shard": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
    "no_shard": "NO_SHARD",
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "_HYBRID_SHARD_ZERO2",
}

_TEMPLATE = Template('''"""$sentence

Runs on $size ranks (gloo, CPU) and in one process; exits with 1 where the two part, with 0 where they agree.
Uses torch and the implementation alone. Written by fsdp-testing from case $identity.
"""

import contextlib
import fnmatch
import sys
import tempfile
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
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
        if $gradients and got is not None and got_grad is not None and grad is not None and not close(got_grad, grad):
            yield f"rank {rank}, at the end: gradient of {name} is off by {(got_grad - grad).abs().max().item():.3g}"
        if $gradients and got is not None and (got_grad is None) != (grad is None) and (grad if got_grad is None else got_grad).any():
            yield f"rank {rank}, at the end: gradient of {name} is {'None' if got_grad is None else 'not None'}, one process differs"


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


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    queue = spawn.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [spawn.Process(target=main, args=(rank, f"{folder}/store", queue), daemon=True) for rank in range(SIZE)]
        for process in processes:
            process.start()
        processes[0].join(60)
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

_DDP = (
    "from torch.nn.parallel import DistributedDataParallel",
    "    return DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)",
    '''def no_sync(model):
    return model.no_sync()


def clip(model, max_norm, norm_type):
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


@contextlib.contextmanager
def full_parameters(model, writeback):
    yield


def gathered(model):
    return {clean(name): (p.detach(), p.grad, p.requires_grad) for name, p in model.named_parameters()}''',
)

_FSDP2_ACCESS = '''@contextlib.contextmanager
def no_sync(model):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def clip(model, max_norm, norm_type):
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).full_tensor()


def gathered(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    whole = lambda t: None if t is None else t.full_tensor().detach()
    return {name: (whole(p), whole(p.grad), p.requires_grad) for name, p in model.named_parameters()}'''

_FSDP1_ACCESS = '''def no_sync(model):
    return model.no_sync()


def clip(model, max_norm, norm_type):
    return model.clip_grad_norm_(max_norm, norm_type)


def full_parameters(model, writeback):
    return FSDP.summon_full_params(model, writeback=writeback)


def gathered(model):
    flags = {clean(name): p.requires_grad for name, p in model.named_parameters()}
    held = {}
    for with_grads in (True, False):
        try:
            with FSDP.summon_full_params(model, writeback=False, with_grads=with_grads):
                for name, p in model.named_parameters():
                    grad = p.grad.detach().clone() if with_grads and p.grad is not None else None
                    held[clean(name)] = (p.detach().clone(), grad, flags[clean(name)])
            return held
        except (NotImplementedError, AssertionError):
            continue
    return held'''


def script_for(found: Discovery) -> str | None:
    """Returns the script for a finding, or None if it cannot be told with torch alone."""
    case = found.case
    family = _FAMILIES.get(found.implementation)
    if family is None or case.model.tree is None or case.wrapping.policy is not None or case.wrapping.ignored:
        return None
    if any(type(operation) not in _WRITERS for operation in case.program):
        return None
    imports, wrap, access = family(case)
    if "def full_parameters" not in access and any(isinstance(o, EditFullParameters) for o in case.program):
        return None
    arguments = ", ".join(f"{key}={value!r}" for key, value in case.optimizer.arguments.items())
    kind = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[case.optimizer.name]
    late = any(isinstance(operation, BuildOptimizer) for operation in case.program)
    pending = _ends_pending(case)
    return _TEMPLATE.substitute(
        sentence=_sentence(found),
        identity=case.identity,
        size=case.world.size,
        imports=imports,
        dtype=case.model.dtype,
        model=model_source(case.model.tree),
        wrap=wrap,
        width=case.model.tree["width"],
        early=not late,
        optimizer=f"{kind}(self.model.parameters(), {arguments})",
        access=access,
        program=_program(case),
        tolerance=_tolerance(case),
        gradients=not pending,
    )


def _sentence(found: Discovery) -> str:
    return re.sub(r'[\\"]', "'", found.sentence())


def _tolerance(case: Case) -> str:
    if case.mixed_precision is not None:
        return "5e-2"  # the one process computes in full precision here
    return "1e-9" if case.model.dtype == "float64" else "1e-4"


def _ends_pending(case: Case) -> bool:
    pending = False
    for operation in case.program:
        if isinstance(operation, ForwardBackward):
            pending = operation.no_sync
    return pending


def _program(case: Case) -> str:
    lines: list[str] = []
    for planned in plan(case):
        operation = planned.operation
        if not planned.void:
            lines += [f"    {line}" for line in _WRITERS[type(operation)](f"{planned.index} {operation.kind}", operation)]
    return "\n".join(lines)


def _batch(batch: Batch) -> str:
    return f"{batch.seed}, {batch.rows!r}, {batch.usage!r}, {batch.scale!r}"


def _write_forward_backward(name: str, operation: ForwardBackward) -> list[str]:
    sync = ", sync=False" if operation.no_sync else ""
    return [f"yield {name!r}, one.forward_backward({_batch(operation.batch)}{sync})"]


def _write_flags(flag: bool) -> Callable[[str, Freeze | Thaw], list[str]]:
    def write(_name: str, operation: Freeze | Thaw) -> list[str]:
        return [f"for p in matching(one.named(), {operation.patterns!r}):", f"    p.requires_grad_({flag})"]

    return write


_WRITERS: dict[type[Operation], Callable[..., list[str]]] = {
    ForwardBackward: _write_forward_backward,
    Forward: lambda name, o: [f"yield {name!r}, one.only_forward({_batch(o.batch)}, {o.mode!r})"],
    ZeroGrad: lambda _, o: [f"(one.optimizer or one.model).zero_grad(set_to_none={o.set_to_none})"],
    Step: lambda _, o: ["one.optimizer.step()"],
    BuildOptimizer: lambda _, o: ["one.optimizer = one.make_optimizer()"],
    SetLr: lambda _, o: ["for group in one.optimizer.param_groups:", f"    group['lr'] = {o.lr!r}"],
    Freeze: _write_flags(False),
    Thaw: _write_flags(True),
    Clip: lambda name, o: [f"yield {name!r}, one.clip({o.max_norm!r}, float({str(o.norm_type)!r}))"],
    EditFullParameters: lambda _, o: [f"one.edit({o.patterns!r}, {o.factor!r}, {o.writeback})"],
    Observe: lambda _, o: [],
    Move: lambda _, o: ['one.model.to("cpu")'],
}


def _innermost_first(case: Case) -> list[str]:
    return sorted(case.wrapping.units, key=lambda name: -name.count("."))


def _ddp(_case: Case) -> tuple[str, str, str]:
    return _DDP


def _fsdp2(case: Case) -> tuple[str, str, str]:
    options = ["mesh=mesh"]
    imports = ["FSDPModule", "fully_shard"]
    shape = case.world.mesh_shape
    names = ', mesh_dim_names=("replicate", "shard")' if len(shape) == 2 else ""
    if case.strategy in ("shard_grad_op", "hybrid_shard_zero2"):
        options.append("reshard_after_forward=False")
    if case.mixed_precision is not None:
        spec = case.mixed_precision
        dtypes = [f"{key}=torch.{getattr(spec, key)}" for key in ("param_dtype", "reduce_dtype") if getattr(spec, key)]
        options.append(f"mp_policy=MixedPrecisionPolicy({', '.join(dtypes)})")
        imports.append("MixedPrecisionPolicy")
    if case.cpu_offload:
        options.append("offload_policy=CPUOffloadPolicy(pin_memory=False)")
        imports.append("CPUOffloadPolicy")
    lines = [f"mesh = init_device_mesh('cpu', {shape!r}{names})"]
    lines += [f"fully_shard(model.{name}, {', '.join(options)})" for name in _innermost_first(case)]
    lines += [f"fully_shard(model, {', '.join(options)})", "return model"]
    head = "from torch.distributed.device_mesh import init_device_mesh\n"
    head += f"from torch.distributed.fsdp import {', '.join(sorted(imports))}"
    return head, "\n".join(f"    {line}" for line in lines), _FSDP2_ACCESS


def _fsdp1(case: Case) -> tuple[str, str, str]:
    options = [f"sharding_strategy=ShardingStrategy.{_FSDP1_STRATEGIES[case.strategy]}", 'device_id=torch.device("cpu")']
    imports = ["FullyShardedDataParallel as FSDP", "ShardingStrategy"]
    lines: list[str] = []
    head = ""
    if case.strategy.startswith("hybrid"):
        head = "from torch.distributed.device_mesh import init_device_mesh\n"
        lines.append(f"mesh = init_device_mesh('cpu', {case.world.mesh_shape!r}, mesh_dim_names=('replicate', 'shard'))")
        options.append("device_mesh=mesh")
    if case.mixed_precision is not None:
        spec = case.mixed_precision
        dtypes = [
            f"{key}=torch.{getattr(spec, key)}"
            for key in ("param_dtype", "reduce_dtype", "buffer_dtype")
            if getattr(spec, key)
        ]
        options.append(f"mixed_precision=MixedPrecision({', '.join(dtypes)})")
        imports.append("MixedPrecision")
    original = case_uses_original_parameters(case)
    options.append(f"use_orig_params={original}")
    for name in _innermost_first(case):
        lines.append(f"model.{name} = FSDP(model.{name}, {', '.join(options)})")
    lines.append(f"return FSDP(model, {', '.join(options)})")
    head += f"from torch.distributed.fsdp import {', '.join(imports)}"
    return head, "\n".join(f"    {line}" for line in lines), _FSDP1_ACCESS


def case_uses_original_parameters(_case: Case) -> bool:
    """FSDP1 is told with its original parameters, which names everything as the module does."""
    return True


_FAMILIES: dict[str, Callable[[Case], tuple[str, str, str]]] = {
    "torch-ddp": _ddp,
    "torch-fsdp1": _fsdp1,
    "torch-fsdp2": _fsdp2,
}
