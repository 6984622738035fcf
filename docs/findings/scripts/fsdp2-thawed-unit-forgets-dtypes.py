"""FSDP2: a unit frozen in the first forward cannot be trained later. Run: python fsdp2-thawed-unit-forgets-dtypes.py"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def thaw(*, frozen_first: bool) -> str:
    """Trains, freezes the first layer around one forward, thaws it and trains again; says how that ends."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    inputs = torch.randn(2, 4)
    if not frozen_first:
        with torch.no_grad():
            model(inputs)
    model[0].requires_grad_(False)
    model(inputs).sum().backward()
    model[0].requires_grad_(True)
    try:
        model(inputs).sum().backward()
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return f"gradient in {model[0].weight.grad.dtype}"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    told = {frozen: thaw(frozen_first=frozen) for frozen in (False, True)}
    if rank == 0:
        print(told)
    assert told[False] == "gradient in torch.float32"
    assert "BFloat16" in told[True], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
