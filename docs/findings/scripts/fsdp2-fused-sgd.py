"""SGD with `fused=True` raises on parameters of FSDP2; with `foreach=True`, or as AdamW, it steps.

Run with torch alone: python fsdp2-fused-sgd.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def stepped(optimizer: type[torch.optim.Optimizer], **kernel: bool) -> str:
    model = nn.Linear(4, 4)
    fully_shard(model)
    steps = optimizer(model.parameters(), lr=0.1, **kernel)
    model(torch.ones(1, 4)).sum().backward()
    try:
        steps.step()
    except NotImplementedError as error:
        return str(error).partition(".,")[0]
    return "stepped"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        outcomes = {
            "AdamW, fused": stepped(torch.optim.AdamW, fused=True),
            "SGD, foreach": stepped(torch.optim.SGD, foreach=True),
            "SGD, fused": stepped(torch.optim.SGD, fused=True),
        }
        for how, outcome in outcomes.items():
            print(f"{how}: {outcome}")
        assert outcomes["AdamW, fused"] == outcomes["SGD, foreach"] == "stepped"
        assert "does not have a sharding strategy" in outcomes["SGD, fused"], "fixed in this torch"
        dist.destroy_process_group()
