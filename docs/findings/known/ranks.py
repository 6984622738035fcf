"""What every script here shares: two ranks over gloo, torch alone, and an exit code.

A script's `defect(rank)` returns what is wrong, or an empty text. Exit 1 and a line: the defect shows; 0: it is gone;
2: the script itself is broken.
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

CPU = torch.device("cpu")
LONGEST_S = 90


def show(defect, size=2, dies=False):
    """Run `defect` on `size` ranks and exit. `dies`: that a rank is killed or never ends is the defect, not an accident."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        said = context.SimpleQueue()
        ranks = [context.Process(target=_rank, args=(defect, rank, size, folder, said)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LONGEST_S)
        lost = [f"rank {rank}: {_fate(process)}" for rank, process in enumerate(ranks) if process.exitcode != 0]
        for process in ranks:
            process.kill()
        lines = [] if lost else sorted(said.get() for _ in ranks)
    found = lost if dies else [line for line in lines if not line.endswith(": ")]
    print("\n".join(found if found or not lost else lost) or "gone in this torch")
    os._exit(2 if lost and not dies else int(bool(found)))


def _fate(process):
    return "never ended" if process.exitcode is None else f"exit code {process.exitcode}"


def _rank(defect, rank, size, folder, said):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.manual_seed(0)
    try:
        said.put(f"rank {rank}: {' '.join(defect(rank).split())[:200]}")
    except Exception:  # noqa: BLE001 - the script is broken, whatever it raised
        traceback.print_exc()
        os._exit(3)
    sys.stdout.flush()
    os._exit(0)


def fsdp1(module, **options):
    """`module` in FSDP1 on the CPU, with original parameters unless asked otherwise."""
    return FullyShardedDataParallel(module, **{"device_id": CPU, "use_orig_params": True} | options)


def fsdp2(*modules, mesh=None, **options):
    """The last module, after `fully_shard` of each one in order."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for module in modules:
        fully_shard(module, mesh=mesh, **options)
    return modules[-1]


def hybrid(replicas, shards):
    """A mesh for hybrid sharding."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def data(rank, seed=0, rows=3, width=4):
    """Inputs that differ by rank."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * seed + rank))


def mean(tensor):
    """Mean over the ranks."""
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def full(tensor):
    """The whole of a sharded tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def off(what, found, expected, bound=1e-5):
    """Say how far `found` is from `expected`, if it is."""
    if found is None or found.shape != expected.shape:
        return f"{what}: expected {tuple(expected.shape)}, got {found if found is None else tuple(found.shape)}"
    gap = (found.detach().double() - expected.detach().double()).abs().max().item()
    return f"{what} is off by {gap:.3g}" if not gap <= bound else ""


def error_of(call, *arguments, **options):
    """The error that a call raises, as text."""
    with contextlib.suppress(SystemExit):
        try:
            call(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - any error is what is looked for
            return f"{type(error).__name__}: {error}"
    return ""


def mlp(depth=2, width=4):
    """Linear layers, alike on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def summoned(model, name="weight"):
    """Full values and gradients of FSDP1's first parameter of that name, as copies."""
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for fqn, parameter in model.named_parameters():
            if fqn.endswith(name):
                return parameter.detach().clone(), None if parameter.grad is None else parameter.grad.clone()
    raise KeyError(name)
