"""FSDP2 keeps a module with a parametrized weight in memory; without FSDP2, or without the parametrization, it is freed.

Run with torch alone: python fsdp2-keeps-parametrized.py
"""

import gc
import tempfile
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def is_kept(*, parametrized: bool, sharded: bool) -> bool:
    layer = nn.Linear(6, 6)
    if parametrized:
        nn.utils.parametrizations.weight_norm(layer)
    if sharded:
        fully_shard(layer)
    layer(torch.ones(1, 6)).sum().backward()
    reference = weakref.ref(layer)
    del layer
    gc.collect()
    return reference() is not None


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        kept = {
            (parametrized, sharded): is_kept(parametrized=parametrized, sharded=sharded)
            for parametrized in (False, True)
            for sharded in (False, True)
        }
        print("kept, by (parametrized, sharded):", kept)
        assert kept == {(False, False): False, (False, True): False, (True, False): False, (True, True): True}
        dist.destroy_process_group()
